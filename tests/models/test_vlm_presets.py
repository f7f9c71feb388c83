"""Presets of published vision-language models: as large as their checkpoints; the largest is planned on a laptop."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmfsdp.models.build import build_model
from mmfsdp.params import ParamError, load
from mmfsdp.train.prepare import preview

ROOT = Path(__file__).parents[2]
PUBLISHED = {  # parameters of the checkpoints on huggingface.co
    "gemma_3_4b": 4_300_079_472,
    "internvl3_8b": 7_944_300_032,
    "llama_3_2_11b_vision": 10_670_220_835,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_72b": 73_410_777_344,
    "smolvlm2_2b": 2_246_784_880,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_its_checkpoint(name):
    params = load(name)
    model, _ = build_model(params.model, meta=True)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert params.model.picture["tokens"] < params.data.max_length


@pytest.mark.parametrize("name", ["smolvlm2_2b", "llama_3_2_11b_vision"])
def test_its_configuration_alone_gives_a_peak_with_activations(name):
    plan, cost = preview(load(name))
    assert plan.memory_events and cost.peak_bytes > cost.memory.parameters
    with pytest.raises(ParamError, match="model.picture: pixels is not an input of .*; remove it"):
        preview(load(name).change(**{"model.picture": {"tokens": 1, "pixels": [1]}}))


@pytest.mark.real
def test_the_largest_is_planned_with_an_example_for_1024_ranks_in_3_gib():
    """The bench says how long it takes, too; that depends on the machine."""
    command = [sys.executable, "-m", "tests.bench.largest"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(printed.split()[-2]) < 3
