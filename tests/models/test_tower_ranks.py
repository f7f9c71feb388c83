"""Every kind of tower, frozen and trained, sharded over two ranks = one process."""

import pytest
import torch
import torch.distributed as dist

from mmfsdp.core.collectives import Collectives
from mmfsdp.core.freeze import freeze
from mmfsdp.core.optimizer import build_optimizer
from mmfsdp.core.planner import make_plan
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.data.batch import Batch
from mmfsdp.estimate import estimate
from mmfsdp.models import ModalEncoder, MultimodalModel, build_language, build_vision
from mmfsdp.params import BackboneParams, FSDPParams, TrainParams
from tests.ranks import on_ranks
from tests.tiny import KNOWN, LANGUAGE

TRAIN = TrainParams(steps=3, lr=1e-3, warmup_steps=1)
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
WIDE = {**SMALL, "intermediate_size": 48}
TIMM = {"image_size": 160, "timm_pool": "avg", "timm_proj": "linear"}
VIT = {"image_size": 16, "layers": 2, "width": 24, "patch_size": 8, "head_width": 12}
RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8}
TOWERS = {
    "open_clip ViT": {"source": "open_clip", "config": {"embed_dim": 16, "vision_cfg": VIT}},
    "open_clip ResNet": {"source": "open_clip", "config": {"embed_dim": 16, "vision_cfg": RESNET}},
    "timm ViT": {
        "source": "open_clip",
        "config": {"embed_dim": 16, "vision_cfg": {"timm_model_name": "test_vit", **TIMM}},
    },
    "CLIP, last but one": {"config": {"model_type": "clip_vision_model", **WIDE}, "feature_layer": -2},
    "SigLIP": {"config": {"model_type": "siglip_vision_model", **WIDE}},
    "DINOv2": {"config": {"model_type": "dinov2", **SMALL}},
    "ViT": {"config": {"model_type": "vit", **WIDE}},
}
TRAINED = ("open_clip ViT", "open_clip ResNet", "timm ViT", "CLIP, last but one", "SigLIP", "ViT")
BACKENDS = ("DDP", "FSDP1", "FSDP2")
CASES = [f"{b}, {t}" for b in BACKENDS for t in TOWERS] + [f"{b}, {t}, trained" for b in BACKENDS for t in TRAINED]


def build(case: str) -> MultimodalModel:
    torch.manual_seed(0)
    tower = next(t for t in TOWERS if f", {t}" in case)
    vision = build_vision(BackboneParams(**TOWERS[tower]))
    model = MultimodalModel({"vision": ModalEncoder(vision)}, build_language(BackboneParams(config=LANGUAGE)))
    freeze(model, ["language_model.*"] if case.endswith("trained") else ["llava_stage1"])
    return model


def batch(model: MultimodalModel, rank: int) -> Batch:
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, KNOWN, (1, model.num_tokens["vision"] + 4), generator=g)
    labels = ids.clone()
    if rank == 0:
        ids[:, 1:-3] = model.placeholders["vision"]
        labels[:, 1:-3] = -100
    pictures = torch.randn(1, 1, 1, *model.encoders["vision"].item_shape, generator=g)
    return Batch(ids, torch.ones_like(ids), labels, {"vision": pictures})


def train(model, batches: list[Batch]) -> tuple[list[float], int]:
    optimizer, schedule = build_optimizer(model, TRAIN)
    model.train()
    seen = []
    with Collectives() as counted:
        for _ in range(3):
            counted.reset()
            row = train_step(model, batches, optimizer, schedule=schedule)
            seen += [row.loss, row.grad_norm]
        return seen, counted.wire_bytes


def wrapped() -> dict:
    found = {}
    for case in CASES:
        model = build(case)
        batches = [batch(model, dist.get_rank())]
        plan = make_plan(model, FSDPParams(backend=case.split(",")[0]), world_size=2)
        found[case] = (*train(apply_plan(model, plan), batches), estimate(plan, TRAIN).wire_bytes)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return on_ranks(wrapped, 2)


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_tower_equals_one_process_and_sends_what_was_predicted(two_ranks, case):
    model = build(case)
    single, _ = train(model, [batch(model, 0), batch(model, 1)])
    for found in two_ranks:
        seen, measured, predicted = found[case]
        assert seen == pytest.approx(single, rel=1e-4)
        assert measured == predicted > 0
