"""Notebook widgets: they draw what the parameters, the plan and the run folder say, and hold nothing of their own.

Names are resolved when first used: the processes of `%%ranks` start from here without ipywidgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Captioner": "captioner",
    "Cockpit": "cockpit",
    "RunForm": "form",
    "RunPanel": "panel",
    "show_captions": "report",
    "show_comparison": "compare",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"mmfsdp.widgets has no {name!r}; it has {', '.join(_HOME)}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
