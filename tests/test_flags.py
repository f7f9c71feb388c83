"""What a form shows as a command line is what the command line reads, and the other way round."""

import shlex

import pytest

from mmfsdp.cli.words import parse
from mmfsdp.params import ParamError, RunParams, load
from mmfsdp.params.flags import command_line, differences, read_command_line

MORE = [{"source": "json", "path": "a b.jsonl", "weight": 0.2}]
CASES = [
    ("tiny", {}),
    ("tiny", {"train.steps": 60, "fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 1.5, "launch.replace": True}),
    ("openflamingo_9b", {"fsdp.mixed_precision": None, "model.freeze": ["vision_encoder.*", "!x y*"]}),
    ("llava_7b", {"train.max_grad_norm": None, "fsdp.sync_module_states": False, "train.lr": 1e-5}),
    ("tiny", {"model.vision.config.embed_dim": 32, "data.more": MORE}),
    ("tiny", {"fsdp.backend": "FSDP1", "fsdp.use_orig_params": True, "launch.name": "été"}),
    (None, {"launch.folder": "a 'b' <script> $HOME", "model.freeze": ["a.*"]}),
    ("tiny", {"model.language.config.tie_word_embeddings": False, "data.pair_fraction": 0.5}),
    ("tiny", {"launch.executor": "slurm", "launch.setup": ["source a b"], "launch.sbatch": ["exclusive"]}),
]


@pytest.mark.parametrize("config, changes", CASES)
def test_a_command_line_says_the_parameters_to_the_form_and_to_the_command(config, changes):
    params = (load(config) if config else RunParams()).change(**changes)
    line = command_line(params, config)
    assert read_command_line(line) == (params, config)
    assert parse("run", shlex.split(line)[2:]) == params


def test_what_flags_cannot_say_is_named():
    params = load("tiny").change(**{"model.language.config": {"model_type": "gpt2"}, "train.steps": 50})
    line = command_line(params, "tiny")
    assert "--train.steps 50" in line and "# no flags say all of model.language:" in line
    encoder = [{"modality": "audio", "config": {"model_type": "whisper"}}]
    assert "model.encoders" in command_line(load("llava_7b").change(**{"model.encoders": encoder}), "llava_7b")


@pytest.mark.parametrize(
    "line, words",
    [
        ("mmfsdp run --trian.steps 3", "did you mean train.steps?"),
        ("mmfsdp run --train.steps", "has no values"),
        ("mmfsdp run --train.steps 1 2", "has 2 values"),
        ('mmfsdp run "', "close the quote"),
        ("rm -rf", "begin it with mmfsdp"),
        ("mmfsdp run x", "belongs to no flag"),
        ("mmfsdp run --launch.replace maybe", "not true or false"),
        ("mmfsdp run --data.more [", "is not YAML"),
    ],
)
def test_a_mistake_is_named(line, words):
    with pytest.raises(ParamError, match=words.replace("?", r"\?")):
        read_command_line(line)


def test_differences_are_by_dotted_name():
    a = load("tiny")
    assert differences(a, a) == {}
    assert differences(a, a.change(**{"train.steps": 7, "train.warmup_steps": 1})) == {
        "train.steps": (400, 7),
        "train.warmup_steps": (20, 1),
    }
