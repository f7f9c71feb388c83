"""Flags of the command line give the parameters that Python gives."""

import shlex

import pytest

from mmfsdp.cli.planning import parse
from mmfsdp.params import ParamError, load
from mmfsdp.params.flags import read_words

CASES = {
    "": {},
    "--train.steps 60 --fsdp.frozen-policy AUTO --fsdp.memory-budget-gib 1.5 --launch.replace": {
        "train.steps": 60,
        "fsdp.frozen_policy": "AUTO",
        "fsdp.memory_budget_gib": 1.5,
        "launch.replace": True,
    },
    "--train.max-grad-norm None --fsdp.no-sync-module-states --model.freeze a.* '!x y*' --train.lr 1e-05": {
        "train.max_grad_norm": None,
        "fsdp.sync_module_states": False,
        "model.freeze": ["a.*", "!x y*"],
        "train.lr": 1e-5,
    },
    "--model.language.config '{model_type: gpt2, n_embd: null}'": {
        "model.language.config": {"model_type": "gpt2", "n_embd": None},
    },
}


@pytest.mark.parametrize("line", CASES)
def test_flags_change_the_parameters_of_a_config(line):
    params = load("tiny").change(**CASES[line])
    words = ["--config", "tiny", *shlex.split(line)]
    assert read_words(words) == (params, "tiny")
    assert parse("run", words) == params


@pytest.mark.parametrize(
    "line, words",
    [
        ("--trian.steps 3", "did you mean --train.steps?"),
        ("--train.steps", "Missing value for argument '--train.steps'"),
        ("--train.steps 1 2", "Unrecognized options: 2"),
        ("--data.more [", "is not YAML"),
        ("--train.steps 0", "train.steps: 0 should be greater than or equal to 1"),
        ("--fsdp.frozen-policy KEPT", "invalid choice 'KEPT' .*'--fsdp.frozen-policy'. .*'SHARD', 'KEEP'"),
        ("--fsdp.cpu-offload --fsdp.no-enable-fsdp", "fsdp.cpu_offload: True cannot be honored by DDP"),
    ],
)
def test_a_mistake_is_named(line, words):
    with pytest.raises(ParamError, match=words.replace("?", r"\?")):
        read_words(shlex.split(line))
