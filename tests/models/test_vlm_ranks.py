"""Vision-language models of transformers on two ranks, one with text only: no hang, and the step of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.data import Sample
from mmfsdp.kit.data.batch import QUESTION
from mmfsdp.kit.models.build import freeze_model, open_model
from mmfsdp.params import FSDPParams, ModelParams
from mmfsdp.planning import make_plan
from tests.models.test_from_transformers import ONE, TEXT, TURNS
from tests.parity import two_steps
from tests.ranks import on_ranks
from tests.tiny_vlms import FAMILIES, save_vlm

pytestmark = pytest.mark.real

SAMPLES = [[ONE, TURNS], [TEXT, Sample.of(QUESTION.format("what is two ?"), "an answer", (), "text")]]
"""Of each rank: the second has no picture."""
BACKENDS = {
    "FSDP2": FSDPParams(),
    "FSDP2 keep": FSDPParams(frozen_policy="KEEP"),
    "FSDP1": FSDPParams(backend="FSDP1"),
    "DDP": FSDPParams(backend="DDP"),
}


def open_frozen(family: str, folder: str):
    torch.manual_seed(0)  # of the new adapters
    params = ModelParams(kind="transformers", name=str(Path(folder, family)), lora_rank=2)
    model, processor, weights = open_model(params)
    freeze_model(model, params)
    processor = replace(processor, max_length=400)
    return model, weights, [processor(samples) for samples in SAMPLES]


def on_rank(folder: str, plans: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    rows = {}
    for case, text in plans.items():
        model, weights, batches = open_frozen(case.partition(":")[0], folder)
        model = apply_plan(model, WrapPlan.from_json(text), weights=weights)
        rows[case] = two_steps(model, [batches[dist.get_rank()]])
    return rows


def test_a_rank_with_text_only_takes_part_in_the_step_of_one_process(tmp_path):
    expected, plans = {}, {}
    for family in FAMILIES:
        save_vlm(family, tmp_path / family)
        model, weights, batches = open_frozen(family, str(tmp_path))
        for backend, fsdp in BACKENDS.items():
            if backend == "FSDP2" or family == "qwen2_5_vl":
                plan = make_plan(model, fsdp, world_size=2, example=batches[0].inputs())
                plans[f"{family}: {backend}"] = plan.to_json()
        model = model.to_empty(device="cpu")
        model.tie_weights()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data.copy_(weights.read(name))
        expected[family] = torch.tensor(two_steps(model, batches))
    first, second = on_ranks(on_rank, 2, str(tmp_path), plans)
    assert first == second
    for case, rows in first.items():
        same = torch.allclose(torch.tensor(rows), expected[case.partition(":")[0]], rtol=1e-5)
        assert same, (case, rows, expected[case.partition(":")[0]])
