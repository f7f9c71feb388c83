"""Presets of published vision-language models: as large as their checkpoints; the largest is planned on a laptop."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from mmfsdp.core.token_loss import PIECE_BYTES, LossLinear
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.train.prepare import kept_model, preview
from mmfsdp.params import ParamError, load, preset_names

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


LIGHT = {"tiny", "smolvlm2_2b"}
WITHOUT_EXAMPLE = {"tiny_llava"}
"""Presets whose inputs are known only once their data are read."""
PEAK_OUTSIDE_HEAD = {"gemma_3_4b", "llava_7b", "openflamingo_9b", "small", "tiny"}
"""Presets that hold most in the backward of a layer. All others do in the head's forward, where it has its piece."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LIGHT else pytest.mark.extended)
        for name in preset_names()
        if name not in WITHOUT_EXAMPLE
    ],
)
def test_the_head_of_a_preset_holds_one_piece_of_logits(name):
    params = load(name).change(**{"launch.ranks": 8})
    plan, cost = preview(params)
    model, _ = kept_model(params)
    outside = "backward of " in cost.peak_when and "head" not in cost.peak_when
    assert outside == (name in PEAK_OUTSIDE_HEAD), cost.peak_when
    [head] = [key for key, module in model.named_modules() if isinstance(module, LossLinear)]
    [unit] = [unit for unit in plan.units if any(key and f"{head}.".startswith(f"{key}.") for key in unit.modules)]
    in_head = 0  # bytes that the head's forward allocates
    for before, event in pairwise(plan.memory_events):
        if (event.event, event.unit) == ("post_forward", unit.order):
            in_head = max(in_head, event.peak - before.allocated)
    weight = model.get_submodule(head).weight
    hidden = params.train.batch_size * params.data.max_length * weight.shape[1]
    # The gradients that the head makes; and the norm before it, in the same unit.
    kept = 4 * hidden * 3 + (4 * weight.numel() if weight.requires_grad else 0)
    # The logits in 16 bits, and in fp32 the logits and their log-probabilities, which CPUs compute one after the other.
    piece = PIECE_BYTES // 2 + 2 * PIECE_BYTES
    assert 0 < in_head <= piece + kept


@pytest.mark.real
def test_the_largest_is_planned_with_an_example_for_1024_ranks_in_3_gib():
    """The bench says how long it takes, too; that depends on the machine."""
    command = [sys.executable, "-m", "tests.bench.largest"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(printed.split()[-2]) < 3
