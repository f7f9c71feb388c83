"""Collect garbage between two steps, on all ranks between the same two.

Python collects by itself when enough objects were made, which is in the middle of a forward, at another step on each
rank. All other ranks wait then for that one in the next collective. torchtitan does so as well (tools/utils.py).
"""

from __future__ import annotations

import gc
from typing import Any

from .callbacks import Callback, Training

COLLECT_ALL_EVERY = 100
"""Steps between two collections of all objects; each step collects those that are new."""


class GarbageCollection(Callback):
    """Turns Python's own collections off during a training, and collects after each step."""

    def __init__(self, training: Training) -> None:
        self._was_on = gc.isenabled()

    def on_train_begin(self) -> None:
        """Collect what building and wrapping have left."""
        gc.collect()
        gc.disable()

    def after_step(self, step: int) -> dict[str, Any]:
        """Collect. On a GPU the step has been issued, so that it has work meanwhile."""
        gc.collect(2 if step % COLLECT_ALL_EVERY == 0 else 1)
        return {}

    def close(self) -> None:
        """Turn Python's own collections on again."""
        if self._was_on:
            gc.enable()
