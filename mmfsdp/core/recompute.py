"""Activation checkpointing: modules that keep only their inputs, and run forward again in backward (Chen et al. 2016).

What is frozen inside them is needed in backward even where it has no grad flow: the part of a layer before what trains
in it runs again, too.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..params import FSDPParams, ParamError
from .group import is_layer_list, outermost
from .trace import Trace, has_forward


def checkpoint_activations(model: nn.Module, fsdp: FSDPParams, *, preserve_rng_state: bool = True) -> None:
    """Checkpoint the modules that `activation_checkpointing` names, in place.

    Only `forward` is replaced, so names stay, and FSDP's hooks of the module itself stay outside of what runs again.
    preserve_rng_state: what runs again draws the same random numbers. For that, torch's generator is set back, which
    other threads draw from, too. False for fake tensors, which draw none.
    """
    for name in checkpointed_modules(model, fsdp):
        module = model.get_submodule(name)
        module.forward = partial(_call, module.forward, preserve_rng_state)  # type: ignore[method-assign]


def call_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward that runs again in backward instead of keeping its activations."""
    return _call(forward, True, *args, **kwargs)


def _call(forward: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        # A cache of transformers would keep keys and values of the first run, and change the second.
        args = tuple(None if is_cache(value) else value for value in args)
        kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
    # An input that is given twice is kept once. Inside another checkpoint (torch 2.14) it would come back as two
    # tensors, and torch's attention computes otherwise if its query and key are not the same tensor. Lists and dicts
    # are handed on as they are, since a layer may write into them.
    values = [*args, *kwargs.values()]
    unique: list[Any] = []
    place_of: dict[int, int] = {}
    for value in values:
        if id(value) not in place_of:
            place_of[id(value)] = len(unique)
            unique.append(value)
    places = [place_of[id(value)] for value in values]

    def run(*inputs: Any) -> Any:
        given = [inputs[place] for place in places]
        return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    # Reentrant checkpointing needs an input that requires a gradient; a frozen encoder's first layer has none.
    return checkpoint(run, *unique, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def is_cache(value: Any) -> bool:
    """Return True for a cache of transformers, which core does not import."""
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers") for c in type(value).__mro__)


def checkpointed_modules(model: nn.Module, fsdp: FSDPParams) -> list[str]:
    """Return the names of the modules to checkpoint. Raises ParamError for a pattern that matches none."""
    choice = fsdp.activation_checkpointing
    if choice == "none":
        return []
    names: list[str] = []
    if choice == "all" or choice.startswith("every:"):
        for name, module in model.named_modules():
            parent = name.rpartition(".")[0]
            if name and has_forward(module) and is_layer_list(model.get_submodule(parent)):
                names.append(name)
        every = 1 if choice == "all" else int(choice.removeprefix("every:"))
        return outermost(names)[::every]
    for name, module in model.named_modules():
        if name and fnmatchcase(name, choice) and has_forward(module):
            names.append(name)
    if not names:
        raise ParamError("activation_checkpointing", f"{choice!r} matches no module that has a forward")
    return outermost(names)


def recomputed_modules(model: nn.Module, fsdp: FSDPParams, trace: Trace) -> list[str]:
    """Return the names of the checkpointed modules that backward runs again: those whose output needs a gradient."""
    names = checkpointed_modules(model, fsdp)
    names += [name for name, module in model.named_modules() if checkpoints_itself(module)]
    return [name for name in names if name in trace.returns_gradient]


def checkpoints_itself(module: nn.Module) -> bool:
    """Return True for a layer of transformers that its own switch (`gradient_checkpointing_enable`) checkpoints."""
    # core does not import transformers, which sets the attribute on modules around the layers, too, without effect.
    is_layer = any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def in_backward() -> bool:
    """Return True while backward runs, so a forward that is called now runs again."""
    return torch._C._current_graph_task_id() != -1
