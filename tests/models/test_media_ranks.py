"""MultimodalModel on real ranks: one has only text, and all enter every unit; any tower, frozen and trained."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mmfsdp.core.freeze import freeze
from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.models import ModalEncoder, MultimodalModel, build_language, build_vision
from mmfsdp.kit.models.backbones import add_lora
from mmfsdp.params import BackboneParams, FSDPParams
from mmfsdp.planning import make_plan
from tests.bench.peaks import measure_plans
from tests.cover import kept, selected
from tests.models.test_multimodal import TOWERS, Ear
from tests.parity import check_ranks, two_steps
from tests.ranks import WAYS, choices_of, on_ranks
from tests.tiny import KNOWN, LANGUAGE, VISION

pytestmark = pytest.mark.real

CASES = WAYS["media"]
ENCODERS = {"open_clip": BackboneParams(source="open_clip", config=VISION), **TOWERS}
TRAINED = ("open_clip ViT", "CLIP, last but one", "SigLIP", "ViT")
FROZEN = (*TRAINED, "DINOv2")
TOWER_CASES = {f"FSDP2: {tower}": {} for tower in FROZEN}
for backend in ("FSDP1", "FSDP2"):
    TOWER_CASES |= {f"{backend}, trained: {tower}": {"backend": backend} for tower in TRAINED}


def choices_of_towers() -> dict[str, set[str]]:
    """Return the tower of each case, and what is done with it."""
    return {case: set(case.split(": ")) for case in TOWER_CASES}


def build(case: str = "", seed: int = 0) -> MultimodalModel:
    torch.manual_seed(seed)
    language = build_language(BackboneParams(config=LANGUAGE))
    if "lora" in case:
        add_lora(language, 2)
    vision = build_vision(ENCODERS[case.partition(": ")[2] or "open_clip"])
    model = MultimodalModel({"vision": ModalEncoder(vision), "audio": ModalEncoder(Ear(), "linear")}, language)
    recipe = "llava_lora" if "lora" in case else "llava_stage2" if "stage 2" in case else "llava_stage1"
    freeze(model, ["language_model.*"] if "trained" in case else [recipe])
    return model


def batch_of(model: MultimodalModel, rank: int) -> Batch:
    """Rank 0: pictures and sounds, unlike in number. Rank 1: only text."""
    g = torch.Generator().manual_seed(rank)
    n, m = model.num_tokens["vision"], model.num_tokens["audio"]
    ids = torch.randint(1, KNOWN, (2, 2 * n + m + 7), generator=g)
    labels = ids.clone()
    media = {"vision": torch.zeros(2, 1, 1, *model.encoders["vision"].item_shape)}
    if rank == 0:
        for row, start, count, token in ((0, 0, 2 * n, 0), (1, 1, n, 0), (1, 2 + n, m, 1)):
            ids[row, start : start + count] = KNOWN + token
            labels[row, start : start + count] = -100
        media["vision"] = torch.randn(2, 2, 1, *model.encoders["vision"].item_shape, generator=g)
    media["audio"] = torch.randn(2, 1, 8, 10, generator=g)
    return Batch(ids, torch.ones_like(ids), labels, media)


def make(case: str) -> tuple[MultimodalModel, list[Batch]]:
    model = build(case, seed=dist.get_rank())
    return model, [batch_of(model, dist.get_rank())]


def measured(plans: dict[str, str]) -> dict:
    return measure_plans(make, plans) | {"said": generated()}


def generated() -> list:
    model = apply_plan(build(), make_plan(build(), FSDPParams(), world_size=2)).eval()
    assert any(isinstance(p, DTensor) for p in model.parameters())
    batch = batch_of(model, dist.get_rank())
    return model.generate(batch.input_ids, media=batch.media, max_new_tokens=4).tolist()


@pytest.fixture(scope="module")
def plans(request) -> dict[str, WrapPlan]:
    cases = CASES | TOWER_CASES
    return {case: make_plan(build(case), FSDPParams(**cases[case]), world_size=2) for case in selected(request, "case")}


@pytest.fixture(scope="module")
def two_ranks(plans) -> list[dict]:
    return on_ranks(measured, 2, {case: plan.to_json() for case, plan in plans.items()})


@pytest.mark.parametrize("case", kept(choices_of(CASES)) + kept(choices_of_towers()))
def test_a_rank_with_only_text_keeps_step_and_all_equals_one_process_and_the_plan(two_ranks, plans, case):
    model = build(case)
    expected = two_steps(model, [batch_of(model, 0), batch_of(model, 1)])
    check_ranks([rank[case] for rank in two_ranks], plans[case], expected, rel=1e-5 if case in CASES else 1e-4)


def test_sharded_models_generate(two_ranks):
    model = build().eval()
    for rank, found in enumerate(two_ranks):
        batch = batch_of(model, rank)
        assert found["said"] == model.generate(batch.input_ids, media=batch.media, max_new_tokens=4).tolist()
