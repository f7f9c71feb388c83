"""exchange_classes: give modules another forward, and leave their parameters, names and all else as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def exchange_classes(
    model: nn.Module, forward: type[nn.Module], attributes_of: Callable[[nn.Module], dict[str, Any] | None]
) -> list[str]:
    """Give modules of a model the forward of another class, in place.

    Args:
        model: The model, with or without weights.
        forward: The class with the forward. It comes before a module's own class among the bases of its new one.
        attributes_of: Returns what the forward reads of a module, by name; None for a module that stays as it is.

    Returns:
        The names of the modules that were changed.
    """
    changed = []
    for name, module in model.named_modules():
        attributes = None if isinstance(module, forward) else attributes_of(module)
        if attributes is not None:
            # The object stays, so references to it hold.
            module.__class__ = _with_forward(forward, type(module))  # type: ignore[arg-type]
            vars(module).update(attributes)
            changed.append(name)
    return changed


@cache
def _with_forward(forward: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{original.__name__}", (forward, original), {})
