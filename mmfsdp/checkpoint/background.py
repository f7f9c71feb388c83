"""Checkpoints written beside the training: copied to CPU memory, then a thread of every rank writes, over a process
group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .ranks import distributed
from .tensors import Snapshot


class Background:
    """Writes one checkpoint at a time. Every rank must make one, and call `begin` for the same checkpoints."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if distributed() else None
        self._thread: threading.Thread | None = None
        self._failed: tuple[int, BaseException] | None = None

    def begin(self, write: Callable[[Snapshot, Any], None], kept: Snapshot, step: int) -> None:
        """Copy what is kept, and have it written with this group; first wait for the one before, if it still is."""
        self.settle(wait=True)
        kept = kept.copied()

        def work() -> None:
            try:
                write(kept, self._group)
            except BaseException as error:
                self._failed = step, error

        self._thread = threading.Thread(target=work, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def settle(self, *, wait: bool) -> None:
        """Raise RuntimeError where writing failed; with `wait`, return when the checkpoint is complete."""
        if self._thread and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._failed:
            step, error = self._failed
            raise RuntimeError(
                f"the checkpoint of step {step}, written while training went on (train.async_save), failed: {error}"
            ) from error
