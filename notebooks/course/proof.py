"""Two ways to shard a model side by side: what it learns, what a rank sends, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.kit.arena.ranks import gradient_norm
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.kit.train.meters import Collectives

STEPS, LEARNING_RATE = 4, 0.01
Model = Callable[[], nn.Module]
Batch = Callable[[int], dict[str, torch.Tensor]]
Shard = Callable[[nn.Module], Any]


def prove(mine: Shard, theirs: Shard, model: Model, batch: Batch) -> dict[str, Any]:
    """Train a model that `mine` shards with the course's FSDP, and `theirs` with torch's; print both, side by side.

    Call it last on each rank: it ends the process group, and measures the peaks in one whose collectives do nothing.

    Returns:
        For "mine" and "theirs": "losses", (steps,); "sent", the bytes of a step by collective and phase; "gradient",
        its norm over all ranks in the first step; "calls", how many collectives those are; "rest", the bytes that the
        parameters hold between steps; "held", the bytes of whole parameters after backward, which is 0 for
        torch; "stale", the same after an evaluation between backward and the optimizer's step; "peak", the most bytes
        during forward and backward, beyond those before.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ways = {"mine": mine, "theirs": theirs}
    found = {name: train(shard, model, batch) for name, shard in ways.items()}
    dist.destroy_process_group()
    # gloo's threads free their tensors a little late, which would count for the peak.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    for name, shard in ways.items():
        found[name]["peak"] = peak(shard, model, batch)
    show(found)
    return found


def train(shard: Shard, model: Model, batch: Batch, *, steps: int = STEPS) -> dict[str, Any]:
    """Train with SGD, in which a factor of the gradient counts. Return all but the peak."""
    net = model()
    units = shard(net)
    inputs = batch(dist.get_rank())
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)
    losses = []
    result: dict[str, Any] = {"rest": bytes_at_rest(net)}
    for step in range(steps):
        with Collectives() as counted:
            loss = net(**inputs)
            loss.backward()
        if step == 0:
            result["held"] = bytes_held(units)
            result["gradient"] = gradient_norm(trainable)
            result["stale"] = held_after_evaluation(net, inputs, units)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result["losses"] = torch.tensor(losses)
    # Of the last step: a hook that is left over from another step has shown by then.
    result["sent"] = {f"{row.kind}, {row.phase}": row.wire_bytes for row in counted.rows()}
    result["calls"] = {f"{row.kind}, {row.phase}": row.count for row in counted.rows()}
    return result


def bytes_at_rest(net: nn.Module) -> int:
    """Return the memory behind a model's parameters: all of it, also where a parameter is a view of a part."""
    storages = {}
    for p in net.parameters():
        shard = p.to_local() if hasattr(p, "to_local") else p
        storages[shard.untyped_storage().data_ptr()] = shard.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_held(units: Any) -> int:
    """Return the memory of whole parameters in the units of the course's FSDP; 0 for torch's, which returns none."""
    held = 0
    for unit in units if isinstance(units, Sequence) else []:
        for piece in unit.pieces if unit else []:
            held += piece.whole.untyped_storage().nbytes()
    return held


def held_after_evaluation(net: nn.Module, inputs: dict[str, torch.Tensor], units: Any) -> int:
    """Return what `bytes_held` does after a forward without gradients. torch's is left alone: its root
    stays whole then, and would train on with old weights."""
    if isinstance(units, Sequence):
        with torch.no_grad():
            net(**inputs)
    return bytes_held(units)


def peak(shard: Shard, model: Model, batch: Batch) -> int:
    """Return the most bytes that a step's forward and backward hold beyond those before."""
    net = model()
    shard(net)
    inputs = batch(dist.get_rank())
    net(**inputs).backward()  # the first step makes what stays
    net.zero_grad()
    with cpu_memory() as memory:
        net(**inputs).backward()
    return memory.peak


def show(found: dict[str, Any]) -> None:
    """Print what was found, torch's beside it."""
    mine, theirs = found["mine"], found["theirs"]
    rows = [(f"loss, step {i}", *losses) for i, losses in enumerate(zip(mine["losses"], theirs["losses"], strict=True))]
    print(f"{'':34}{'mine':>12}{'torch':>12}")
    for name, loss, torchs in rows:
        print(f"{name:34}{loss:12.5f}{torchs:12.5f}")
    for name in sorted({*mine["sent"], *theirs["sent"]}):
        print(f"{name + ': sent':34}{mine['sent'].get(name, 0):12,}{theirs['sent'].get(name, 0):12,}")
    print(f"{'parameters at rest':34}{mine['rest']:12,}{theirs['rest']:12,}")
    print(f"{'whole parameters after backward':34}{mine['held']:12,}{theirs['held']:12,}")
    print(f"{'peak':34}{mine['peak']:12,}{theirs['peak']:12,}")
    print("(bytes)")


def units_of(model: nn.Module, plan: Any) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Yield the units of mmfsdp's plan with their modules, inner ones first, as they must be sharded."""
    from mmfsdp.core.fsdp2 import inner_units_first

    replicated = [unit for unit in plan.units if not unit.sharded]
    for unit in replicated + inner_units_first(plan):
        if unit.params:
            yield unit, [model.get_submodule(name) for name in unit.modules]


def planned_bytes(plan: Any) -> dict[str, int]:
    """Return what mmfsdp predicts that a rank sends in a step, by collective and phase."""
    from mmfsdp import estimate

    return {f"{row.kind}, {row.phase}": row.wire_bytes for row in estimate(plan).wire if row.phase != "control"}


def shard_as_planned(shard: Callable[..., Any], model: nn.Module, plan: Any, *, dtype: Any = None) -> list[Any]:
    """Shard each unit of mmfsdp's plan with the course's `shard`. Return the units, None for a replicated one."""
    units = []
    for unit, modules in units_of(model, plan):
        policy = unit.frozen_policy.name if unit.frozen_policy else "SHARD"
        reshard = unit.reshard_after_forward or policy != "SHARD"  # the others say by their name what they do
        units.append(shard(*modules, reshard=reshard, frozen=policy, dtype=dtype))
    return units
