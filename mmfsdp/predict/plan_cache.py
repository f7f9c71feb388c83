"""Recordings of one model that are kept, so that another policy or number of ranks needs no new run on fake tensors.

Tracing and recording run the model; all else of a plan is arithmetic on them, and takes a hundredth of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.plan import WrapPlan
from ..core.planner import Grouped, trace_and_group
from ..params import FSDPParams
from .memory_events import Recording, record_memory

MAX_KEPT = 32
"""Number of kept results of each kind. A recording of hundreds of units takes less than a MiB."""
NOT_RECORDED = {
    *("frozen_policy", "memory_budget_gib", "frozen_unit_mib", "sharding_strategy", "enable_fsdp"),
    *("dp_replicate", "dp_shard", "reduce_dtype", "cpu_offload", "backward_prefetch", "forward_prefetch"),
    *("sync_module_states", "state_dict_type", "compile_units"),
}
"""Fields of FSDPParams that change neither what is computed nor which modules are a unit, other than by the backend
that runs: they say how the units' weights are stored and sent."""


class PlanCache:
    """Keep what was traced and recorded of one model, whose forward must not change between plans.

    What is kept is found by all else that it depends on: which parameters train, the example, the backend that runs,
    the fields of FSDPParams without NOT_RECORDED, and the units with their parameters and dtypes. Several threads may
    ask: one of them makes what is missing, and the others wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[Hashable, Grouped] = {}
        self._recordings: dict[Hashable, Recording] = {}
        self._others: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, such as a batch of the run's data, from an earlier call with an equal key."""
        return self._kept(self._others, key, make)

    def group(self, model: nn.Module, params: FSDPParams, example: dict[str, Any] | None) -> Grouped:
        """Return what `trace_and_group` gives, from an earlier call if there was one like it."""
        key = (_choices(params), _content(example), _parameters(model))
        return self._kept(self._groups, key, lambda: trace_and_group(model, params, example))

    def record(self, model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> Recording:
        """Return what `record_memory` gives, from an earlier call if there was one like it. Raises as that."""
        units: list[Hashable] = []
        for unit in plan.units:
            params = tuple((p.name, p.shape, p.trainable, unit.computed_dtype(p)) for p in unit.params)
            units.append((unit.modules, unit.compute_dtype, params))
        key = (_choices(plan.fsdp), tuple(units), _content(example), _parameters(model))
        return self._kept(self._recordings, key, lambda: record_memory(model, plan, example))

    def _kept(self, kept: dict[Hashable, Any], key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made if there is none; the oldest ones are dropped."""
        with self._lock:
            if key not in kept:
                kept[key] = make()
                while len(kept) > MAX_KEPT:
                    del kept[next(iter(kept))]
            return kept[key]


def _choices(params: FSDPParams) -> Hashable:
    return str(params.effective_backend), params.model_dump_json(exclude=NOT_RECORDED)


def _parameters(model: nn.Module) -> str:
    """Return a hash of the model's parameters: their names, shapes and dtypes, and which of them train."""
    digest = sha256()
    for name, p in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
    return digest.hexdigest()


def _content(example: dict[str, Any] | None) -> str:
    """Return a hash of the inputs: of their shapes and dtypes, and of values where a model may read them as numbers."""
    digest = sha256()
    for leaf in tree_leaves(example):
        if not isinstance(leaf, torch.Tensor):
            digest.update(repr(leaf).encode())
            continue
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}".encode())
        if not (leaf.is_meta or leaf.is_floating_point()):
            digest.update(leaf.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
