"""Flags of the command line give the parameters that Python gives."""

import shlex

import pytest

from mmfsdp.kit.cli import build_parser
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.params import ParamError, RunParams, load


def parse(line: str) -> RunParams:
    return params_of(read_words(build_parser(), ["run", *shlex.split(line)]))


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
    assert parse(f"--config tiny {line}") == load("tiny").change(**CASES[line])


@pytest.mark.parametrize(
    "line, words",
    [
        ("--trian.steps 3", "did you mean --train.steps?"),
        ("--train.steps", "--train.steps: expected one argument; `mmfsdp run --help` shows the usage"),
        ("--train.steps 1 2", "'2' is one word too many; remove it"),
        ("--data.more [", "data.more: is not YAML"),
        ("--data.more.0.weight 2", "data.more.0.weight: no such field"),
        ("--train.steps 0", "train.steps: '0' should be greater than or equal to 1"),
        ("--train.lr -1e-3", "train.lr: '-1e-3' should be greater than 0"),
        ("--data.more.0.weight=2", "data.more.0.weight: no such field"),
        ("--data.more.0.weight", "data.more.0.weight: a value is missing"),
        ("--train.lr abc", "train.lr: 'abc' should be a valid number"),
        (
            "--fsdp.frozen-policy KEPT",
            "fsdp.frozen_policy: 'KEPT' is not allowed; did you mean KEEP? Choose SHARD",
        ),
        ("--fsdp.cpu-offload --fsdp.no-enable-fsdp", "fsdp.cpu_offload: True cannot be honored by DDP"),
    ],
)
def test_a_mistake_is_named(line, words):
    with pytest.raises(ParamError, match=words.replace("?", r"\?")):
        parse(line)
