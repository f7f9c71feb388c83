"""Importing torch and its friends makes a million objects, none of them garbage."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(*, for_good: bool = False) -> Iterator[None]:
    """Python's collector does not look through everything again and again while libraries are imported and models are
    planned: a fifth of the time of it. for_good: nor ever again through what is there at the end, as befits a process
    of our own. Threads may be within at once."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
            atexit.register(gc.unfreeze)  # else triton says at the end that it leaks
        if collects:
            gc.enable()
