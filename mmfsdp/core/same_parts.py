"""Find ranks that use different parts of a model in one step, such as the heads of different tasks.

A collective pairs what each rank sends next. If rank 0 gathers or reduces one unit and rank 1 another one, the weights
or the gradients of both are mixed, without an error where their sizes agree. So `train_step` notes what each rank
gathers and reduces, and which parameters have a gradient. One number made from that travels in the all-reduce of the
step's figures: its sum over ranks is 0 if they used the same parts. Else every rank learns it from that sum, and none
changes its weights.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..params import ParamError
from .collectives import answering_ranks, gather_through_store, rank, world_size
from .guards import list_all
from .model_record import record_of
from .names import parameters_of, plain_name
from .reshard import parameter_groups
from .units import unit_name

WAYS_OUT = (
    "Let every rank use every part that trains in each micro-batch, in the same order: add 0 * part(x).sum() to the "
    "loss for each part that a batch does not need; or give all ranks batches of the same kind at the same time"
)
STEPS_AHEAD = 2
"""A GPU's step is checked this many steps later, when its figures have long arrived, so that the host does not wait."""
LISTS = {"with_gradient": "the gradient of", "gathered": "the all-gather of", "reduced": "the reduction of"}
"""Words for an entry of each list of `UsedParts`."""
DIGEST_BYTES = 4
"""Sums of numbers of 32 bits over half a million ranks are exact in float64. Ranks that differ are missed once in
4 billion steps."""


@dataclass
class UsedParts:
    """Hold what one rank used in a step."""

    gathered: list[str] = field(default_factory=list)
    """Names of units, in the order of their all-gathers."""
    reduced: list[str] = field(default_factory=list)
    """Names of units, in the order of their reductions."""
    with_gradient: list[str] = field(default_factory=list)
    """Names of the parameters that have a gradient after backward; of FSDP1's units."""
    replica: int = 0
    """The group of ranks of a hybrid mesh with which this one gathers."""
    problem: str = ""
    """The difference between the ranks, once it is known."""

    def stop(self) -> None:
        """Raise ParamError that names how this step differs between ranks. Every rank must call it."""
        if not self.problem:
            of_ranks = gather_through_store([self.gathered, self.reduced, self.with_gradient, self.replica])
            self.problem = difference([UsedParts(*lists) for lists in of_ranks])
        raise ParamError("model", self.problem)

    def forget(self) -> None:
        """Drop the names, once ranks agreed: a script may keep the figures of many steps."""
        self.gathered.clear()
        self.reduced.clear()
        self.with_gradient.clear()


class ShardGroup(NamedTuple):
    """Describe the ranks that gather a model's units together, as one of them sees it."""

    replica: int
    """The number of this group among those of a hybrid mesh."""
    place: int
    """This rank's, from 0."""
    ranks: int


class PartsWatch:
    """Note which parts of a wrapped model a step uses, and compare them with the other ranks'."""

    def __init__(self, model: nn.Module) -> None:
        self.shard_group = shard_group_of(model)
        self.used = UsedParts(replica=self.shard_group.replica)
        self.unchecked: deque[Callable[[], object]] = deque()
        """Checks of the newest steps on a GPU: each reads a step's figures, and raises if ranks differed in it."""
        self.filled: set[Any] = set()
        """Parameters of FSDP2 without a gradient in this step, which were reduced as zeros with their unit."""
        self.handles: dict[str, Any] = {}
        """FSDP1's flat parameters, by the name of their unit."""
        modules_of: dict[Any, list[str]] = {}  # by FSDP2's group of parameters
        for full_name, module in model.named_modules():
            name = plain_name(full_name, model)
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    modules_of.setdefault(group, []).append(name)
            elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                self.handles[unit_name((name,))] = module._handle
                self.note_unshards(module._handle, unit_name((name,)))
        for group, names in modules_of.items():
            self.note_gathers(group, unit_name(tuple(names)))
            self.note_reductions(group, unit_name(tuple(names)))

    def note_gathers(self, group: Any, name: str) -> None:
        """Note the all-gathers of a unit of FSDP2: in forward, in backward, and ahead of need."""
        if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
            return  # every rank holds all of it
        unshard = group.unshard

        def noted(*args: Any, **kwargs: Any) -> None:
            pending = group._all_gather_result
            unshard(*args, **kwargs)
            if group._all_gather_result is not pending:
                self.used.gathered.append(name)

        group.unshard = noted

    def note_reductions(self, group: Any, name: str) -> None:
        """Note the reductions of a unit of FSDP2, and have it reduce all that trains in it.

        FSDP2 reduces those parameters of a unit that have a gradient. Where they differ between ranks, so would the
        sizes of the reduction, and gloo would end the process before ranks can compare what they used.
        """
        post_backward = group.post_backward

        def noted(*args: Any) -> None:
            if not group.reduce_grads and not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
                # No micro-batch has used the unit so far, so there is nothing to accumulate; FSDP2 fails there.
                return
            if group.reduce_grads and any(has_gradient(p) for p in group.fsdp_params):
                self.used.reduced.append(name)
                self.fill_with_zeros(group.fsdp_params)
            post_backward(*args)

        group.post_backward = noted

    def fill_with_zeros(self, parameters: Sequence[Any]) -> None:
        """Give zeros to the parameters of a unit of FSDP2 that train without one. `check_number` removes them."""
        # After several micro-batches gradients are in the dtype of the reduction, and all must be in one.
        accumulated = next((p.unsharded_accumulated_grad for p in parameters if accumulates(p)), None)
        for parameter in parameters:
            if has_gradient(parameter):
                self.filled.discard(parameter)
            elif parameter.sharded_param.requires_grad:
                if parameter.sharded_param.grad is None:
                    self.filled.add(parameter)
                if accumulated is None:
                    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                else:
                    zeros = torch.zeros_like(parameter.unsharded_param, dtype=accumulated.dtype)
                    parameter.unsharded_accumulated_grad = zeros

    def note_unshards(self, handle: Any, name: str) -> None:
        """Note the all-gathers of a unit of FSDP1."""
        unshard = handle.unshard

        def noted() -> None:
            if handle.needs_unshard():
                self.used.gathered.append(name)
            unshard()

        handle.unshard = noted

    def begin(self) -> None:
        """Begin a step. Raises ParamError if ranks differed in an earlier step that has not been checked yet."""
        while len(self.unchecked) >= STEPS_AHEAD:
            self.unchecked.popleft()()
        self.used = UsedParts(replica=self.shard_group.replica)
        self.filled.clear()

    def check_later(self, check: Callable[[], object], *, waited: bool) -> None:
        """Check a step in a later one, or at once if the host has waited for the device anyway."""
        self.unchecked.append(check)
        while waited and self.unchecked:
            self.unchecked.popleft()()

    def check_number(self, model: nn.Module) -> float:
        """Return a whole number for this rank's step. Over all ranks they add up to 0 if all used the same parts.

        Raises ParamError if DDP still waits for a gradient.
        """
        for parameter in self.filled:
            parameter.sharded_param.grad = None  # as in one process: the optimizer leaves it alone
        self.filled.clear()  # it must not keep the model in memory
        self.used.with_gradient += self.names_with_gradient(model)
        if isinstance(model, DistributedDataParallel):
            stop_if_ddp_waits(model)
        if answering_ranks() == 1:
            return 0.0
        # The replicas of a hybrid mesh gather apart from each other, and reduce together. Their numbers differ, so that
        # a difference in one replica cannot cancel the opposite one in another.
        group = self.shard_group
        gathers = digest([str(group.replica), *self.used.gathered])
        gradients = digest([*self.used.reduced, "", *self.used.with_gradient])
        return balanced(gathers, group.place, group.ranks) + balanced(gradients, rank(), world_size())

    def names_with_gradient(self, model: nn.Module) -> list[str]:
        """Return the parameters of this rank that have a gradient; of FSDP1 the units."""
        if self.handles:
            # A rank may hold no element of a parameter, so FSDP1's units tell, and not the parameters.
            return [name for name, handle in self.handles.items() if handle.flat_param.grad is not None]
        with_gradient = [p for p in parameters_of(model) if p.grad is not None]
        checked = record_of(model).checked
        names = checked.names if checked else {}
        if not all(id(p) in names for p in with_gradient):  # put in its place since the step began
            names = {id(p): plain_name(name, model) for name, p in model.named_parameters()}
        return [names[id(p)] for p in with_gradient]


def watch_parts(model: nn.Module) -> PartsWatch:
    """Return the watch of a wrapped model; the first call puts it on."""
    record = record_of(model)
    if record.parts_watch is None:
        record.parts_watch = PartsWatch(model)
    return record.parts_watch


def shard_group_of(model: nn.Module) -> ShardGroup:
    """Return the ranks with which this one gathers the units of a wrapped model; all of them, but on a hybrid mesh."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                mesh = group.mesh_info
                if getattr(mesh, "shard_mesh_size", 1) > 1 and hasattr(mesh, "replicate_mesh_rank"):
                    return ShardGroup(mesh.replicate_mesh_rank, mesh.shard_mesh_rank, mesh.shard_mesh_size)
        elif isinstance(module, FullyShardedDataParallel) and hasattr(module, "_inter_node_pg"):
            shards = module.process_group
            return ShardGroup(dist.get_rank(module._inter_node_pg), dist.get_rank(shards), dist.get_world_size(shards))
    return ShardGroup(0, rank(), world_size())


def stop_if_ddp_waits(model: DistributedDataParallel) -> None:
    """Raise ParamError if DDP waits for a gradient after backward: what came is not reduced, or only in part.

    DDP itself would say so in the next forward, when each rank has changed its weights by its own gradients. It cannot
    be told with the step's figures: their all-reduce would be paired with one of DDP that another rank waits in.
    """
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        missing = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        names = list_all(missing) if missing else "parameters that only an earlier micro-batch used"
        problem = f"DDP has no gradient on rank {rank()} of {names}, and waits for it; no rank changed its weights"
        raise ParamError("model", f"{problem}. {WAYS_OUT}; or freeze what no batch uses") from error


def has_gradient(parameter: Any) -> bool:
    """Return True if a whole parameter of FSDP2 has a gradient that waits for its reduction."""
    whole = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    return whole is not None and (whole.grad is not None or accumulates(parameter))


def accumulates(parameter: Any) -> bool:
    """Return True if a parameter of FSDP2 holds a gradient of earlier micro-batches."""
    return parameter.unsharded_accumulated_grad is not None


def digest(names: Iterable[str]) -> int:
    """Return a digest of names, their order included."""
    return int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=DIGEST_BYTES).digest(), "big")


def balanced(number: int, place: int, ranks: int) -> float:
    """Return what the rank at this place adds to a sum that is 0 if so many ranks have the same number."""
    return float(number * (ranks - 1) if place == 0 else -number)


def difference(of_ranks: Sequence[UsedParts]) -> str:
    """Return how a rank differs from those that it must agree with, and what to do."""
    return (
        f"ranks used different parts of the model in one step: {first_difference(of_ranks)}. Their collectives do not "
        f"fit together, so no rank changed its weights. {WAYS_OUT}"
    )


def first_difference(of_ranks: Sequence[UsedParts]) -> str:
    """Return how the first rank that differs from an earlier one does.

    All ranks must have the same gradients and reductions; those of one replica must also gather the same units.
    """
    for what in ("with_gradient", "gathered", "reduced"):
        first_of: dict[int, int] = {}  # the rank that others are compared with, by replica
        for index, used in enumerate(of_ranks):
            replica = used.replica if what == "gathered" else 0
            first = first_of.setdefault(replica, index)
            ours, theirs = getattr(of_ranks[first], what), getattr(used, what)
            if ours != theirs:
                return two_ranks_differ(first, ours, index, theirs, LISTS[what])
    return "a rank called another collective than train_step's at the end of the step"


def two_ranks_differ(first: int, ours: Sequence[str], second: int, theirs: Sequence[str], what: str) -> str:
    """Return which names only one of two ranks has; else the first place in which their lists differ."""
    alone = []
    for owner, names, others in ((first, ours, theirs), (second, theirs, ours)):
        only_here = [name for name in dict.fromkeys(names) if name not in others]
        if only_here:
            alone.append(f"only rank {owner} has {what} {list_all(only_here)}")
    if alone:
        return "; ".join(alone)
    place = 0
    while place < min(len(ours), len(theirs)) and ours[place] == theirs[place]:
        place += 1
    for owner, names, other in ((first, ours, second), (second, theirs, first)):
        if place == len(names):
            return f"rank {other} has {what} some parts more often than rank {owner}"
    return f"where rank {first} has {what} {ours[place]}, rank {second} has {what} {theirs[place]}"
