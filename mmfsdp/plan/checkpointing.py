"""Activation checkpointing: forward runs again in backward instead of keeping what it computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..params import Backend, ParamError
from .trace import Trace
from .units import Unit, WrapPlan

FEW = 3
"""Units that a layer may hold inside (adapters, say) and still be one layer."""


def checkpoint_activations(model: nn.Module, plan: WrapPlan, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Checkpoint the modules that the plan's `activation_checkpointing` names, in place. contexts: see torch's
    `context_fn`; asked at each call for what forward and its repetition run in.

    Only `forward` is replaced, so names stay, and FSDP's hooks stay outside: recomputing gathers nothing anew.
    """
    for name in checkpointed(model, plan):
        module = model.get_submodule(name)
        module.forward = functools.partial(_without_cache, module.forward, contexts)  # type: ignore[method-assign]


def _without_cache(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpointed: what a cache of transformers' keeps of the first run would change the second."""
    if torch.is_grad_enabled():
        args, kwargs = tuple(map(_uncached, args)), {name: _uncached(value) for name, value in kwargs.items()}
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _uncached(value: Any) -> Any:
    return None if any(c.__name__ == "Cache" and "transformers" in c.__module__ for c in type(value).__mro__) else value


def checkpointed(model: nn.Module, plan: WrapPlan) -> list[str]:
    """Names of the modules to checkpoint. Raises ParamError for a pattern that matches none."""
    choice = plan.fsdp.activation_checkpointing
    if choice == "none":
        return []
    if choice == "all" or choice.startswith("every:"):
        units = [u.modules for u in plan.units if u.grad_flow and u.params and u.modules != ("",)]
        names = _layers([name for modules in units for name in modules])
        return names[:: int(choice[6:]) if choice != "all" else 1]
    names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, choice)]
    names = [n for n in names if type(model.get_submodule(n)).forward is not nn.Module.forward]
    if not names:
        raise ParamError("activation_checkpointing", f"{choice!r} matches no module that has a forward")
    return _outermost(names)


def with_recomputed(model: nn.Module, plan: WrapPlan, seen: Trace) -> tuple[Unit, ...]:
    """The plan's units with what is gathered because a checkpointed module around them runs again in backward: up to
    the last that it had kept. FSDP1 frees them once more after that, but one of which backward has begun by then.
    Raises ParamError for a pattern that matches none."""
    until = {name: t for name in checkpointed(model, plan) if (t := _last_kept(model, name, seen)) >= 0}

    def again(unit: Unit) -> bool:
        twice = unit.grad_flow and plan.backend is Backend.FSDP1 and unit.reshard_after_forward
        return any(
            m.startswith(f"{around}.") and seen.enter.get(m, 0) < t and not (twice and t < seen.leave.get(m, 0))
            for m in unit.modules
            for around, t in until.items()
            if twice or not unit.grad_flow
        )

    return tuple(replace(u, gathers_backward=u.gathers_backward + u.gathers_forward * again(u)) for u in plan.units)


def _last_kept(model: nn.Module, name: str, seen: Trace) -> float:
    """When a module last kept something for backward, below 0 for never; without an example, in the last inside it."""
    if seen.calls is not None:
        return seen.saves.get(name, -1.0)
    first = {id(p): name for name, p in model.named_parameters()}
    moved = any(p.requires_grad or first[id(p)] in seen.flow for p in model.get_submodule(name).parameters())
    return max(seen.enter[m] for m in seen.enter if f"{m}.".startswith(f"{name}.")) + 0.01 if moved else -1.0


def _layers(names: list[str]) -> list[str]:
    """Without the modules that hold many others of the list (a tower checkpointed whole saves little), nor what is
    inside another."""
    return _outermost([n for n in names if sum(other.startswith(f"{n}.") for other in names) <= FEW])


def _outermost(names: list[str]) -> list[str]:
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
