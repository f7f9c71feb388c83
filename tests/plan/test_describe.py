"""What accelerate makes of a model, and others by hand, is read back as it would have been planned."""

import random
from collections.abc import Callable
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_batch, tiny_flamingo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.compat.describe import describe
from mmfsdp.core.collectives import Collectives
from mmfsdp.core.freeze import freeze
from mmfsdp.core.optimizer import build_optimizer
from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.planner import make_plan
from mmfsdp.core.step import train_step
from mmfsdp.estimate import estimate
from mmfsdp.models.cross_attention import FlamingoLayer
from mmfsdp.params import FSDPParams, TrainParams

LAYER = {"transformer_layer_cls": "FlamingoLayer"}


@pytest.fixture(autouse=True)
def eight_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def in_fp32(model: nn.Module) -> nn.Module:
    """Its forward as accelerate's mixed precision leaves it: an attribute of the instance, around the class's own."""
    model._original_forward = model.forward

    @wraps(model.forward)
    def forward(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model._original_forward(*args, **kwargs)

    model.forward = forward
    return model


def mesh_of(*, hybrid: bool = False) -> DeviceMesh:
    if hybrid:
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (8,))


def check_traffic(plan: WrapPlan, backward: Callable[[], object]) -> None:
    """What a forward and backward sends is what the plan says."""
    with Collectives() as counted:
        backward()
        found = sorted((r.kind, r.phase, r.count, r.wire_bytes) for r in counted.rows())
    wire = [w for w in estimate(plan).wire if w.phase != "control"]
    assert found == sorted((w.kind, w.phase, w.count, w.wire_bytes) for w in wire)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, init_sync=False)  # a fake group has no replies to compare


def fsdp1(model: nn.Module, strategy: str = "FULL_SHARD", **more) -> nn.Module:
    mesh = mesh_of(hybrid="HYBRID" in strategy)
    layers = partial(transformer_auto_wrap_policy, transformer_layer_cls={FlamingoLayer})
    kind = ShardingStrategy[strategy]
    where = torch.device("cpu")
    return FullyShardedDataParallel(
        model, sharding_strategy=kind, auto_wrap_policy=layers, device_mesh=mesh, device_id=where, **more
    )


def fsdp2(model: nn.Module, *, hybrid: bool = False, reshard: bool = True) -> nn.Module:
    mesh = mesh_of(hybrid=hybrid)
    for layer in [m for m in model.modules() if isinstance(m, FlamingoLayer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "DDP": (ddp, 8, 1),
    "FSDP1": (partial(fsdp1, use_orig_params=True), 1, 8),
    "FSDP1 bf16": (partial(fsdp1, use_orig_params=True, mixed_precision=BF16), 1, 8),
    "FSDP1 hybrid": (partial(fsdp1, strategy="HYBRID_SHARD", use_orig_params=True), 2, 4),
    "FSDP1 hybrid, kept": (partial(fsdp1, strategy="_HYBRID_SHARD_ZERO2", use_orig_params=True), 2, 4),
    "FSDP1 not sharded": (partial(fsdp1, strategy="NO_SHARD", use_orig_params=True), 8, 1),
    "FSDP2": (fsdp2, 1, 8),
    "FSDP2 kept": (partial(fsdp2, reshard=False), 1, 8),
    "FSDP2 hybrid": (partial(fsdp2, hybrid=True), 2, 4),
    "FSDP2 hybrid, kept": (partial(fsdp2, hybrid=True, reshard=False), 2, 4),
}
DRESS = {
    "accelerate": lambda wrap, model: wrap(in_fp32(model)),
    "accelerate, compiled": lambda wrap, model: torch.compile(wrap(in_fp32(model))),
    "compiled within": lambda wrap, model: wrap(torch.compile(model)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_others_wrapped_is_read_back(case):
    wrap, replicate, shard = CASES[case]
    model, layers = wrap(tiny_flamingo()), {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | LAYER
    back = describe(model)
    assert (back.backend, back.world_size, back.replicate, back.shard) == (case.split()[0], 8, replicate, shard)
    layers |= {"mixed_precision": "bf16"} if "bf16" in case else {}
    planned = make_plan(tiny_flamingo(), FSDPParams(backend=case.split()[0], **layers), world_size=8)
    assert set(back.by_name) == set(planned.by_name)
    assert [p.trainable for p in back.params] == [back.by_name[p.name].trainable for p in back.params]
    if shard == 8:
        assert sum(u.bytes_at_rest for u in back.units) == sum(u.bytes_at_rest for u in planned.units)
    assert ("mixed-unit" in [f.code for f in back.lint]) == ("FSDP1" in case), "the lint is for these, too"
    if case == "DDP":
        return  # its reducer takes no reply from a fake group
    optimizer, _ = build_optimizer(model, TrainParams())
    with Collectives() as counted:
        train_step(model, [tiny_batch()] * 2, optimizer, max_grad_norm=1.0)
        found = sorted((r.kind, r.phase, r.count, r.wire_bytes) for r in counted.rows())
    wire = estimate(back, TrainParams(accumulation=2)).wire
    assert found == sorted((w.kind, w.phase, w.count, w.wire_bytes) for w in wire)


@pytest.mark.parametrize("dress", DRESS)
def test_what_accelerate_adds_changes_no_plan(dress):
    for case in ("DDP", "FSDP1", "FSDP2 hybrid"):
        wrap, *_ = CASES[case]
        dressed = describe(DRESS[dress](wrap, tiny_flamingo()))
        assert dressed.to_dict() == describe(wrap(tiny_flamingo())).to_dict(), case


@pytest.fixture
def accelerated(monkeypatch):
    """Wraps a model as `Accelerator.prepare` does: by DDP (0), FSDP1 or FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))

    def prepare(model: nn.Module, version: int, layer: str) -> nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        if not version:
            return accelerator.prepare(model)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            use_orig_params=True if version == 1 else None,
        )
        # By itself it does so on GPUs only.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        accelerator.state.device = torch.device("cpu")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return accelerator.prepare(model, optimizer)[0]

    yield prepare
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("tied", [False, True])
def test_accelerate_wraps_our_models_with_new_tokens(accelerated, tied):
    model, batch = tiny_flamingo(tied=tied), tiny_batch()
    names, before = set(make_plan(model, world_size=8).by_name), model.state_dict()
    model.language_model.tie_weights()
    assert all(now is before[name] or torch.equal(now, before[name]) for name, now in model.state_dict().items())
    wrapped = accelerated(model, 1, "FlamingoLayer")
    back = describe(wrapped)
    assert back.backend == "FSDP1" and set(back.by_name) == names
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels, "media": batch.media}
    check_traffic(back, lambda: wrapped(**inputs).loss.backward())


@pytest.mark.parametrize("version, backend", [(0, "DDP"), (1, "FSDP1"), (2, "FSDP2")])
def test_what_accelerate_itself_wrapped_is_read_back(accelerated, version, backend):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, tie_word_embeddings=False, **sizes))
    freeze(model, ["*", "!*.layers.1.*"])
    names = {n for n, _ in model.named_parameters()}
    wrapped = accelerated(model, version, "LlamaDecoderLayer")
    back = describe(wrapped)
    assert (back.backend, back.world_size, set(back.by_name)) == (backend, 8, names)
    assert {p.name for p in back.params if p.trainable} == {n for n in names if "layers.1." in n}
    if version:
        layers = [f"model.layers.{i}" for i in range(3)]
        assert {u.name: u.kind for u in back.units if u.name in layers} == dict(
            zip(layers, ["frozen", "trainable", "frozen"], strict=True)
        )
        ids = torch.zeros(1, 4, dtype=torch.long)
        check_traffic(back, lambda: wrapped(input_ids=ids, labels=ids).loss.backward())


class Tower(nn.Module):
    """A layer, three of a list, and a head; what trains is drawn."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)
        for p in self.parameters():
            p.requires_grad = rng.random() < 0.3
        self.layers[rng.randrange(3)].requires_grad_(True)

    def forward(self, x):
        for layer in (self.stem, *self.layers, self.head):
            x = layer(x)
        return x


@pytest.mark.parametrize("version", [1, 2])
def test_any_mixture_that_others_wrapped_gathers_as_it_is_read_back(version):
    mesh = mesh_of()
    for seed in range(12):
        rng = random.Random(seed)
        model = Tower(rng)
        chosen = [m for m in (model.stem, *model.layers, model.head) if rng.random() < 0.6]
        if version == 1:
            wrapped = FullyShardedDataParallel(
                model,
                auto_wrap_policy=CustomPolicy(lambda m, chosen=chosen: any(m is one for one in chosen)),
                device_mesh=mesh,
                device_id=torch.device("cpu"),
                use_orig_params=True,
                backward_prefetch=rng.choice([None, *BackwardPrefetch]),
            )
        else:
            for m in chosen:
                fully_shard(m, mesh=mesh, reshard_after_forward=rng.random() < 0.7)
            wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=rng.choice([None, True, False]))
        back = describe(wrapped)
        check_traffic(back, lambda wrapped=wrapped: wrapped(torch.randn(2, 8)).sum().backward())
