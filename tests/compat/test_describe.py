"""What accelerate makes of a model, and others by hand, is read back as it would have been planned."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny import tiny_batch, tiny_flamingo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.step import train_step
from mmfsdp.kit.compat.describe import describe
from mmfsdp.kit.models.cross_attention import FlamingoLayer
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate
from tests.parity import wire
from tests.ranks import fake_group

LAYER = {"transformer_layer_cls": "FlamingoLayer"}


@pytest.fixture(autouse=True)
def eight_ranks():
    with fake_group(8):
        yield


def mesh_of(*, hybrid: bool = False) -> DeviceMesh:
    if hybrid:
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (8,))


def check_traffic(plan: WrapPlan, backward: Callable[[], object]) -> None:
    """What a forward and backward sends is what the plan says."""
    with Collectives() as counted:
        backward()
        sent = wire(counted.rows())
    assert sent == wire(estimate(plan).wire, control=False)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp2(model: nn.Module, *, hybrid: bool = False, reshard: bool = True, dtypes=None) -> nn.Module:
    more: dict = {"mesh": mesh_of(hybrid=hybrid), "mp_policy": dtypes or MixedPrecisionPolicy()}
    for layer in [m for m in model.modules() if isinstance(m, FlamingoLayer)]:
        fully_shard(layer, reshard_after_forward=reshard, **more)
    return fully_shard(model, **more)


def fsdp1(model: nn.Module, strategy: str = "FULL_SHARD", **more) -> nn.Module:
    layers = partial(transformer_auto_wrap_policy, transformer_layer_cls={FlamingoLayer})
    where = {"device_mesh": mesh_of(hybrid="HYBRID" in strategy), "device_id": torch.device("cpu")}
    kind = ShardingStrategy[strategy]
    return FullyShardedDataParallel(
        model, sharding_strategy=kind, auto_wrap_policy=layers, use_orig_params=True, **where, **more
    )


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, init_sync=False)  # a fake group has no replies to compare


FLAT_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "DDP": (ddp, 8, 1),
    "FSDP1": (fsdp1, 1, 8),
    "FSDP1 bf16": (partial(fsdp1, mixed_precision=FLAT_BF16), 1, 8),
    "FSDP1 hybrid": (partial(fsdp1, strategy="HYBRID_SHARD"), 2, 4),
    "FSDP1 hybrid, kept": (partial(fsdp1, strategy="_HYBRID_SHARD_ZERO2"), 2, 4),
    "FSDP1 not sharded": (partial(fsdp1, strategy="NO_SHARD"), 8, 1),
    "FSDP2": (fsdp2, 1, 8),
    "FSDP2 bf16": (partial(fsdp2, dtypes=BF16), 1, 8),
    "FSDP2 kept": (partial(fsdp2, reshard=False), 1, 8),
    "FSDP2 hybrid": (partial(fsdp2, hybrid=True), 2, 4),
    "FSDP2 hybrid, kept": (partial(fsdp2, hybrid=True, reshard=False), 2, 4),
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
    assert ("mixed-unit" in [finding.code for finding in back.lint]) == ("FSDP1" in case), "the lint is for these, too"
    if case == "DDP":
        return  # its reducer takes no reply from a fake group
    optimizer, _ = build_optimizer(model, TrainParams())
    with Collectives() as counted:
        train_step(model, [tiny_batch()] * 2, optimizer, max_grad_norm=1.0)
        sent = wire(counted.rows())
    assert sent == wire(estimate(back, TrainParams(accumulation=2)).wire)


def test_compiling_changes_no_plan():
    plain = describe(fsdp2(tiny_flamingo())).to_dict()
    assert describe(torch.compile(fsdp2(tiny_flamingo()))).to_dict() == plain
    assert describe(fsdp2(torch.compile(tiny_flamingo()))).to_dict() == plain


@pytest.fixture
def accelerated(monkeypatch):
    """Wraps a model as `Accelerator.prepare` does with FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))

    def prepare(model: nn.Module, layer: str) -> nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer]
        )
        # By itself it does so on GPUs only.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        accelerator.state.device = torch.device("cpu")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return accelerator.prepare(model, optimizer)[0]

    yield prepare
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_wraps_our_models_with_new_tokens(accelerated):
    model, batch = tiny_flamingo(), tiny_batch()
    planned, before = make_plan(model, world_size=8), model.state_dict()
    model.language_model.tie_weights()
    assert all(now is before[name] or torch.equal(now, before[name]) for name, now in model.state_dict().items())
    wrapped = accelerated(model, "FlamingoLayer")
    back = describe(wrapped)
    assert back.backend == "FSDP2" and set(back.by_name) == set(planned.by_name)
    assert {p.name for p in back.params if p.trainable} == {p.name for p in planned.params if p.trainable}
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels, "media": batch.media}
    check_traffic(back, lambda: wrapped(**inputs).loss.backward())


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


def test_what_is_not_wrapped_or_only_in_part_is_refused():
    with pytest.raises(ValueError, match="not wrapped by DDP, FSDP1 or FSDP2; call make_plan"):
        describe(tiny_flamingo())
    partly = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh_of()), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="1.weight: is in no unit; call fully_shard on the whole model"):
        describe(partly)


class Captioner(nn.Module):
    """A frozen encoder and layer, a projector, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector, self.words, self.layer = (nn.Linear(4, 4) for _ in range(4))
        for module in (self.encoder, self.words):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(x) + self.projector(self.encoder(x)))


def by_hand(*, frozen: bool = True) -> nn.Module:
    """Return a model with a unit for its layer, and a replicated encoder."""
    model = Captioner() if frozen else Captioner().requires_grad_(True)
    fully_shard(model.layer, mesh=mesh_of())
    return fully_shard(model, mesh=mesh_of(), ignored_params=set(model.encoder.parameters()) if frozen else None)


def test_frozen_parameters_that_fully_shard_ignores_are_replicated():
    model = by_hand()
    back = describe(model)
    (encoder,) = [unit for unit in back.units if not unit.sharded]
    assert [p.name for p in encoder.params] == ["encoder.weight", "encoder.bias"]
    assert encoder.frozen_policy == "REPLICATE"
    check_traffic(back, lambda: model(torch.randn(2, 4)).sum().backward())
    for p in model.encoder.parameters():
        p.requires_grad_(True)
    with pytest.raises(ValueError, match="encoder.weight: is in no unit"):
        describe(model)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 has it")
def test_torchs_switch_for_unused_parameters_is_named_where_it_swaps_gradients():
    model, everything_trains = by_hand(), by_hand(frozen=False)
    assert not switch_findings(model)
    for wrapped in (model, everything_trains):
        wrapped.set_reduce_scatter_unused_params(True)
    (message,) = switch_findings(model)
    assert "(of those here: (root), layer)" in message
    assert not switch_findings(everything_trains)


def switch_findings(model: nn.Module) -> list[str]:
    return [finding.message for finding in describe(model).lint if finding.code == "reduces-unused"]
