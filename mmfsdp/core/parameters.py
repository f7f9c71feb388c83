"""Keep the hooks and attributes of a parameter where another object is put in its place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from .reshard import parameter_groups


def new_parameter(tensor: torch.Tensor, *, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter to put in the place of another of that shape, with what hangs on it."""
    # A new Parameter is trainable by default; frozen ones must stay frozen.
    parameter = nn.Parameter(tensor, requires_grad=like.requires_grad)
    copy_attributes(vars(like), parameter)
    if like.requires_grad:  # else no hook is ever called, and torch registers none
        # The same objects, so that a handle of the old parameter's hook removes it here, too.
        parameter._backward_hooks = like._backward_hooks
        parameter._post_accumulate_grad_hooks = like._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return parameter


def copy_attributes(attributes: Mapping[str, Any], p: nn.Parameter) -> None:
    """Set attributes of a parameter that it does not have."""
    for key, value in attributes.items():
        if key not in vars(p):
            setattr(p, key, value)


def hook_names(p: torch.Tensor) -> list[str]:
    """Return how the hooks of a parameter were registered, and their names."""
    names = []
    for method, key in (
        ("register_hook", "_backward_hooks"),
        ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
    ):
        for hook in (getattr(p, key, None) or {}).values():
            names.append(f"{method}({getattr(hook, '__qualname__', type(hook).__name__)})")
    return names


def attributes_by_name(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of each parameter that has some, by its first name."""
    return {name: dict(vars(p)) for name, p in model.named_parameters() if vars(p)}


def keep_attributes(wrapped: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the parameters that FSDP2 has made the attributes of those that it has replaced.

    attributes: by name, from before wrapping. A forward uses the unsharded parameters, which are other objects; they
    are made in the first forward.
    """
    by_owner = {}
    for name, p in wrapped.named_parameters():
        if name in attributes:
            copy_attributes(attributes[name], p)
            owner, _, key = name.rpartition(".")
            by_owner[wrapped.get_submodule(owner), key] = attributes[name]
    for module in wrapped.modules():
        if by_owner and isinstance(module, FSDPModule):
            handles: list[RemovableHandle] = []
            # It runs after FSDP's own hook, which gathers.
            handles.append(module.register_forward_pre_hook(partial(_copy_to_unsharded, by_owner, handles)))


def _copy_to_unsharded(
    by_owner: Mapping[tuple[nn.Module, str], Mapping[str, Any]],
    handles: list[RemovableHandle],
    module: FSDPModule,
    _: Any,
) -> None:
    for group in parameter_groups(module):
        for p in group.fsdp_params:
            owner = p._module_info.module, p._module_info.param_name
            copy_attributes(by_owner.get(owner, {}), p._unsharded_param)
    for handle in handles:  # once is enough: FSDP2 keeps the object
        handle.remove()
