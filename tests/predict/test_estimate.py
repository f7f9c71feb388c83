"""Predicted traffic is the known floor of each policy."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.cli import main
from mmfsdp.kit.train.prepare import preview
from mmfsdp.kit.widgets.plan_page import PlannedRun, plan_page
from mmfsdp.params import FSDPParams, TrainParams, load
from mmfsdp.params.in_words import size
from mmfsdp.planning import make_plan
from mmfsdp.predict import (
    MACHINES,
    Estimate,
    Machine,
    estimate,
    machine_of,
    mesh_table,
    meshes,
    on_mesh,
    step_time,
    workload,
)
from mmfsdp.predict.cost import ON_A_GPU
from mmfsdp.predict.seconds import copied_bytes, seconds
from mmfsdp.predict.wire import CONTROL_BYTES, CONTROL_CALLS

DIM, WORLD = 64, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.inner(x)


class Mostly(nn.Module):
    """4 frozen layers, 1 trainable, 3 frozen ones that backward passes through, and a trainable one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(9))
        freeze(self, ["*", "!layers.4.*", "!layers.8.*"])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


LAYER = DIM * DIM
F_E, F_B, T = 4 * LAYER, 3 * LAYER, 2 * LAYER


def made(world: int = WORLD, accumulation: int = 1, **fields) -> tuple[WrapPlan, Estimate]:
    fields = {"mixed_precision": "bf16", **fields}
    plan = make_plan(Mostly(), FSDPParams(**fields), world_size=world)
    return plan, estimate(plan, TrainParams(accumulation=accumulation))


def without_control(cost: Estimate) -> int:
    return sum(w.wire_bytes for w in cost.wire if w.phase != "control")


def test_the_floor_of_each_policy():
    g = (WORLD - 1) / WORLD
    kept = {"sharding_strategy": "SHARD_GRAD_OP"}
    last = 2 * LAYER  # the last layer of forward, first in backward, need not be gathered twice
    assert without_control(made(frozen_policy="SHARD")[1]) == g * (2 * F_E + 4 * F_B + 8 * T - last)
    assert without_control(made(frozen_policy="KEEP", **kept)[1]) == g * (2 * F_E + 2 * F_B + 6 * T)
    assert without_control(made(frozen_policy="REPLICATE", **kept)[1]) == g * 6 * T
    assert without_control(made(backend="DDP")[1]) == g * 8 * T


def test_accumulation_costs_a_kept_plan_nothing():
    kept = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_policy": "KEEP"}
    assert made(accumulation=4, **kept)[1].wire_bytes == made(**kept)[1].wire_bytes
    assert made(accumulation=4, backend="DDP")[1].wire_bytes == made(backend="DDP")[1].wire_bytes
    once, often = made()[1], made(accumulation=4)[1]
    gathers = sum(w.wire_bytes for w in once.wire if w.kind == "all-gather")
    assert often.wire_bytes == once.wire_bytes + 3 * gathers


def test_control_is_two_small_reductions():
    (row,) = [w for w in made()[1].wire if w.phase == "control"]
    assert (row.count, row.bytes) == (CONTROL_CALLS, CONTROL_BYTES)


def test_one_rank_sends_nothing():
    assert made(world=1)[1].wire_bytes == 0


@pytest.mark.parametrize("policy, parts", [("SHARD", 1 / WORLD), ("REPLICATE", 1)])
def test_memory_at_rest(policy, parts):
    plan, cost = made(frozen_policy=policy, frozen_dtype="bf16")
    assert cost.memory.parameters == (F_E + F_B) * 2 * parts + T * 4 / WORLD
    assert cost.memory.gradients == T * 4 / WORLD and cost.memory.optimizer == 2 * T * 4 / WORLD
    assert cost.memory_bytes == sum(value for name, value in vars(cost.memory).items() if name != "when")
    assert max(map(len, str(cost).splitlines())) <= 80


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_printed_has_both_memories_the_traffic_and_on_a_gpu_what_is_left_out(device):
    plan = make_plan(Mostly(), FSDPParams(), world_size=WORLD, example={"x": torch.ones(2, DIM)})
    cost = estimate(plan, TrainParams(device=device))
    text = " ".join(str(cost).split())
    assert text.startswith(f"peak memory without activations: {size(cost.memory_bytes)} in {cost.memory.when} ")
    assert f" peak memory with activations: {size(cost.peak_bytes)} in {cost.peak_when} " in text
    assert f" a rank sends in an optimizer step: {size(cost.wire_bytes)} ({cost.wire_bytes:,} bytes) " in text
    for row in cost.wire:
        assert f" {row.kind} {row.phase} {row.count} x, {size(row.wire_bytes)} sent" in text
    assert (ON_A_GPU in text) == (device == "cuda")


def test_offloaded_shards_lie_with_the_host():
    for device, frozen in (("cuda", "SHARD"), ("cuda", "REPLICATE"), ("cpu", "SHARD")):
        fields = {"mixed_precision": "bf16", "frozen_policy": frozen}
        plans = [
            make_plan(Mostly(), FSDPParams(**fields, **more), world_size=WORLD, example={"x": torch.ones(2, DIM)})
            for more in ({}, {"cpu_offload": True})
        ]
        near, far = (estimate(plan, TrainParams(device=device)) for plan in plans)
        assert near.host is None and near.memory_bytes <= near.peak_bytes
        if device == "cpu":
            assert far.host is None and far.peak == near.peak
            continue
        whole = sum(u.bytes_at_rest for u in plans[1].units if not u.sharded)
        assert far.host.parameters == near.memory.parameters - whole and far.host.optimizer == near.memory.optimizer
        assert 0 < far.host.bytes < far.memory_bytes <= far.host.bytes + far.peak_bytes
        assert far.peak.parameters == whole and far.peak.optimizer == 0 and far.peak_bytes < near.peak_bytes
        assert far.to_dict()["host"]["gradients"] == T * 4 / WORLD and "offloaded to the host" in str(far)


def test_what_holds_a_step():
    plan, cost = made()
    fast, slow = (step_time(plan, machine=name, tokens=10**9) for name in ("h100-nvlink", "a100-ethernet"))
    assert fast.spread == 1 and fast.bound == "compute"
    assert fast.compute == pytest.approx(2 * (F_E + 2 * F_B + 3 * T) * 1e9 / 989e12 / 0.4)
    wide = replace(plan, units=tuple(replace(u, compute_dtype="float32") for u in plan.units))
    in_fp32 = step_time(wide, machine="h100-nvlink", tokens=10**9).compute
    assert in_fp32 == pytest.approx(fast.compute * 989 / 67)
    assert slow.network > fast.network and max(fast.compute, fast.memory) <= fast.overlapped <= fast.serial
    assert step_time(plan, machine="a100-ethernet", tokens=1).bound == "network"
    link = Machine(flops=1e12, memory=1e12, bandwidth=1e9, latency=0)
    assert step_time(plan, machine=link, tokens=1).network == pytest.approx(cost.wire_bytes / 1e9)
    twice = step_time(plan, TrainParams(accumulation=2), machine=link, tokens=1)
    assert twice.compute == 2 * step_time(plan, machine=link, tokens=1).compute
    with pytest.raises(ValueError, match="a100-nvlink"):
        step_time(plan, machine="a100", tokens=1)


def test_an_example_counts_the_work_of_a_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    plan = make_plan(model, FSDPParams(), world_size=2, example={"input": torch.ones(8, 64)})
    assert plan.flops == 3 * 2 * 8 * 64 * 64, "two products in forward, that of a weight's gradient in backward"
    assert WrapPlan.from_json(plan.to_json()) == plan
    machine = Machine(flops=1e9, memory=1e9, bandwidth=1e9, latency=0, efficiency=0.5, name="slow")
    times = step_time(plan, machine=machine)
    assert times.compute == plan.flops / 5e8 and times.bound == "compute" and "slow" in str(times)
    assert times.overlapped < times.serial == times.network + times.local
    # Compute is longer than reading the weights; what else is moved comes on top.
    assert times.local == pytest.approx(
        times.compute + (plan.moved_bytes + copied_bytes(plan, 1) + 9 * 64 * 65 * 2) / 1e9
    )
    unclipped = step_time(plan, TrainParams(max_grad_norm=None), machine=machine)
    assert times.local - unclipped.local == pytest.approx(64 * 65 * 2 / 1e9)
    assert times.expected == seconds(times.overlapped)
    kernels = replace(machine, products=0.25, launch=1.0, spread=1.5)
    slower = step_time(plan, machine=kernels)
    assert slower.compute == 2 * times.compute and slower.local == plan.kernels and " to " in slower.expected
    assert slower.slowest == 1.5 * slower.overlapped + plan.kernels and not slower.usual
    usual = step_time(plan, machine=replace(kernels, products_factor=2, bytes_factor=3, operator=0.5))
    moved = times.local - times.compute
    hidden = usual.overlapped - usual.local  # the exposed part of the network
    assert usual.usual == pytest.approx(2 * slower.compute + 3 * moved + plan.kernels / 2 + hidden)
    assert usual.expected.startswith(f"about {seconds(usual.usual)} (")
    launched = step_time(plan, machine=replace(kernels, products_factor=1, bytes_factor=1, operator=7))
    assert launched.slowest == launched.usual > 1.5 * launched.overlapped + plan.kernels, "the range holds its number"
    fused = replace(plan, fusable_bytes=plan.moved_bytes // 2, fusable_kernels=1, fsdp=FSDPParams(compile_units=True))
    compiled = step_time(fused, machine=replace(kernels, products_factor=2, bytes_factor=3, operator=0.5))
    assert compiled.eager == usual.usual
    assert usual.gaps - compiled.gaps == 1, "one kernel fewer to launch"
    assert compiled.usual == pytest.approx(usual.usual - 3 * fused.fusable_bytes / 1e9 - 0.5)
    quantized = FSDPParams(frozen_dtype="int8", mixed_precision="bf16")
    int8 = step_time(make_plan(model, quantized, world_size=2, example={"input": torch.ones(8, 64)}), machine=machine)
    # Forward alone passes through the frozen matrix: its codes and bf16 scales are read, and it is written in bf16.
    assert int8.compute == pytest.approx(times.compute + (64 * 64 + 64 * 2 + 2 * 64 * 64) / 1e9)
    with pytest.raises(ValueError, match="tokens: is needed"):
        step_time(make_plan(model, FSDPParams(), world_size=2), machine=machine)


def test_traffic_within_and_between_nodes():
    plan, _ = made(world=64)
    machine = Machine(flops=1e15, memory=1e12, bandwidth=1e9, latency=0, inside=1e10, gpus_per_node=8)
    found = {(m.replicate, m.shard): m for m in meshes(plan, machine=machine, tokens=1)}
    assert sorted(found) == [(64 // n, n) for n in (64, 32, 16, 8, 4, 2)]
    for mesh in found.values():
        assert mesh.times.inside + mesh.times.between == mesh.cost.wire_bytes
    same, _ = made(world=64, sharding_strategy="HYBRID_SHARD", dp_replicate=8, dp_shard=8)
    assert on_mesh(plan, 8, 8).units == same.units and estimate(same).wire == found[8, 8].cost.wire
    across = sum(w.wire_bytes for w in estimate(same).wire if w.kind == "all-reduce")
    assert 0 < found[8, 8].times.between <= across  # gathers stay within nodes
    whole = sum(w.bytes for w in estimate(plan).wire if w.phase != "control")
    assert found[1, 64].times.between == pytest.approx(
        whole * 7 / 8 / 8, rel=0.01
    )  # each node takes in 7/8, by 8 cards
    assert found[4, 16].times.between > found[8, 8].times.between  # now gathers leave their node, too


def test_replicas_that_shard_nothing_reduce_between_nodes():
    plan, cost = made(world=64, sharding_strategy="HYBRID_SHARD", dp_replicate=64, dp_shard=1)
    machine = Machine(flops=1e15, memory=1e12, bandwidth=1e9, latency=0, inside=1e10, gpus_per_node=8)
    reduced = sum(w.bytes for w in cost.wire if w.phase != "control")
    assert {w.kind for w in cost.wire} == {"all-reduce"}
    # Each of 8 nodes takes in twice 7/8 of the gradients, by 8 cards.
    assert step_time(plan, machine=machine, tokens=1).between == pytest.approx(2 * reduced * 7 / 8 / 8, rel=0.01)


def test_a_plan_is_its_own_on_its_own_mesh():
    for strategy, hybrid in (("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")):
        plan, _ = made(world=64, sharding_strategy=strategy)
        assert on_mesh(plan, 1, 64) == plan
        both, _ = made(world=64, sharding_strategy=hybrid, dp_replicate=8, dp_shard=8)
        assert on_mesh(both, 8, 8) == both
        assert on_mesh(plan, 8, 8).fsdp == both.fsdp
        assert on_mesh(both, 1, 64).fsdp == plan.fsdp


@pytest.mark.parametrize("flops", [1e9, 5e9])
def test_the_first_gather_and_the_last_reduction_overlap_with_nothing(flops):
    plan, _ = made()
    times = step_time(plan, machine=Machine(flops=flops, memory=1e15, bandwidth=1e9, latency=0), tokens=1)
    assert (times.local > times.network) == (flops == 1e9)
    first = plan.gathered_units[0]
    exposed = (first.unsharded_bytes + first.reduced_bytes) / 1e9
    assert times.overlapped == pytest.approx(max(times.local, times.network) + exposed)
    assert exposed > 0 and times.overlapped < times.serial == times.local + times.network


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_fsdp2_copies_what_it_gathers_and_reduces(micro_steps):
    """Once out of the buffer, or into it: each byte is read and written."""
    for policy in ("SHARD", "REPLICATE"):
        plan, cost = made(accumulation=micro_steps, frozen_policy=policy)
        sent = sum(w.bytes for w in cost.wire if w.kind in ("all-gather", "reduce-scatter"))
        assert copied_bytes(plan, micro_steps) == 2 * sent > 0
    for backend in ("FSDP1", "DDP"):
        assert copied_bytes(made(backend=backend)[0], micro_steps) == 0


def test_the_best_mesh_fits():
    plan, _ = made(world=64)
    roomy = Machine(flops=1e15, memory=1e12, bandwidth=1e9, latency=0, inside=1e12)
    best = meshes(plan, machine=roomy, tokens=1)[0]
    assert best.fits and best.shard <= 8
    least = min(m.cost.memory_bytes for m in meshes(plan, machine=roomy, tokens=1))
    tight = Machine(1e15, 1e12, 1e9, 0, inside=1e10, capacity=least)
    assert [m.shard for m in meshes(plan, machine=tight, tokens=1) if m.fits] == [64]
    text = mesh_table(meshes(plan, machine=tight, tokens=1), tight)
    assert max(map(len, text.splitlines())) <= 80 and text.endswith("best: dp_replicate 1, dp_shard 64")
    nothing = Machine(1e15, 1e12, 1e9, 0, capacity=1)
    assert "none fits" in mesh_table(meshes(plan, machine=nothing, tokens=1), nothing)
    with pytest.raises(ValueError, match="DDP has no mesh"):
        meshes(made(backend="DDP")[0], machine=roomy, tokens=1)
    in_use = replace(tight, context=1.0)  # what is outside of the tensors leaves too little
    assert not any(m.fits for m in meshes(plan, machine=in_use, tokens=1))
    h100 = MACHINES["h100-nvlink"]
    assert h100.needed_bytes(10**10) == int((10**10 + 96 * 2**20) * 1.15 + 1.5e9)
    a100 = machine_of("a100-nvlink", {"capacity": 1})
    assert a100.capacity == 1 and a100.flops == MACHINES["a100-nvlink"].flops
    with pytest.raises(ValueError, match="bandwidth"):
        machine_of("a100-nvlink", {"speed": 1})
    with pytest.raises(ValueError, match="'laptop' is not one of"):  # no seconds are predicted on CPUs
        machine_of("laptop")


def test_the_chapter_on_scaling_shows_what_its_code_prints(capsys):
    page = (Path(__file__).parent.parent.parent / "notebooks" / "reference" / "scaling.md").read_text()
    (code,), (shown,) = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.S) for kind in ("python", "text"))
    exec(code, {})
    assert capsys.readouterr().out == shown


PLACES = {"data.more": [{"source": "shapes"}, {"source": "shapes"}]}
"""Two more sources of data."""


@pytest.mark.parametrize("changes", [PLACES, {"model.picture": {}}], ids=["three sources", "without an example"])
def test_page_and_command_tell_the_same_seconds_and_room(changes, tmp_path, capsys):
    params = load("tiny" if changes is PLACES else "smolvlm2_2b").change(**changes)
    params.to_yaml(tmp_path / "run.yaml")
    planned = PlannedRun(params, *preview(params))
    assert bool(planned.plan.flops) == (changes is PLACES)
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), "--machine", "h100-infiniband"]) == 0
    told = capsys.readouterr().out
    times = step_time(planned.plan, machine="h100-infiniband", **workload(planned.plan, params))
    assert f"a step on h100-infiniband: {times.expected};" in told
    assert max(map(len, told.splitlines())) <= 80
    page = plan_page(planned, machine="h100-infiniband")
    assert times.expected in page
    room = size(MACHINES["h100-infiniband"].capacity)
    assert f" of {room} (h100-infiniband)" in page and f"holds, of {room}," in told


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frozen_policy": "REPLICATE"},
        {"backend": "DDP"},
        {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2, "dp_shard": 4},
    ],
)
def test_what_units_send_is_what_a_step_sends_but_for_its_control(fields):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    freeze(model, ("0.*",))
    plan = make_plan(model, FSDPParams(**fields), world_size=8)
    control = sum(wire.wire_bytes for wire in estimate(plan, TrainParams()).wire if wire.phase == "control")
    sent = sum(plan.wire_bytes(unit) for unit in plan.units)
    assert sent > 0 and estimate(plan, TrainParams()).wire_bytes == sent + control
