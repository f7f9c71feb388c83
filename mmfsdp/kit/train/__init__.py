"""Training on every rank, and the only place where all parts meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"mmfsdp.kit.train has no {name!r}")
    from .job import run  # a rank imports it as kit/run/ranks/rank_imports.py says

    return run
