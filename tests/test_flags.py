"""The command line that a form shows gives the same parameters when it is run."""

import shlex

import pytest

from mmfsdp.cli.planning import parse
from mmfsdp.params import ParamError, RunParams, load
from mmfsdp.params.flags import command_line, read_words

MORE = [{"source": "json", "path": "a b.jsonl", "weight": 0.2}]
CASES = [
    ("tiny", {}),
    ("tiny", {"train.steps": 60, "fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 1.5, "launch.replace": True}),
    ("openflamingo_9b", {"fsdp.mixed_precision": None, "model.freeze": ["vision_encoder.*", "!x y*"]}),
    ("llava_7b", {"train.max_grad_norm": None, "fsdp.sync_module_states": False, "train.lr": 1e-5}),
    ("tiny", {"model.vision.config.embed_dim": 32, "data.more": MORE}),
    ("tiny", {"fsdp.backend": "FSDP1", "fsdp.use_orig_params": True, "launch.name": "été"}),
    ("tiny", {"model.language.config": {"model_type": "gpt2", "n_embd": None}, "train.steps": 50}),
    (None, {"model.kind": "transformers", "model.name": "a/b", "model.picture": {"tokens": 256}}),
    (None, {"launch.folder": "a 'b' <script> $HOME", "model.freeze": ["a.*"]}),
    ("tiny", {"model.language.config.tie_word_embeddings": False, "data.pair_fraction": 0.5}),
    ("tiny", {"launch.executor": "slurm", "launch.setup": ["source a b"], "launch.sbatch": ["exclusive"]}),
]


@pytest.mark.parametrize("config, changes", CASES)
def test_a_command_line_gives_the_parameters_that_it_was_made_from(config, changes):
    params = (load(config) if config else RunParams()).change(**changes)
    line = command_line(params, config)
    words = shlex.split(line)
    assert words[:2] == ["mmfsdp", "run"] and read_words(words[2:]) == (params, config)
    assert parse("run", words[2:]) == params


@pytest.mark.parametrize(
    "line, words",
    [
        ("--trian.steps 3", "did you mean --train.steps?"),
        ("--train.steps", "Missing value for argument '--train.steps'"),
        ("--train.steps 1 2", "Unrecognized options: 2"),
        ("x", "Unrecognized options: x"),
        ("--launch.replace maybe", "Unrecognized options: maybe"),
        ("--data.more [", "is not YAML"),
        ("--train.steps 0", "train.steps: 0 should be greater than or equal to 1"),
        ("--train.lr fast", "train.lr: .*'fast'"),
        ("--fsdp.frozen-policy KEPT", "invalid choice 'KEPT' .*'--fsdp.frozen-policy'. .*'SHARD', 'KEEP'"),
        ("--fsdp.cpu-offload --fsdp.no-enable-fsdp", "fsdp.cpu_offload: True cannot be honored by DDP"),
    ],
)
def test_a_mistake_is_named(line, words):
    with pytest.raises(ParamError, match=words.replace("?", r"\?")):
        read_words(shlex.split(line))
