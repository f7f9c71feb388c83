"""The widgets of notebooks: `from mmfsdp.widgets import Cockpit`. Each is defined in mmfsdp.kit.widgets."""

from __future__ import annotations

from typing import Any

from .kit import widgets

__all__ = list(widgets.__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"mmfsdp.widgets has no {name!r}; it has {', '.join(__all__)}")
    return getattr(widgets, name)


def __dir__() -> list[str]:
    return sorted(__all__)
