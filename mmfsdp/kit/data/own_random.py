"""Random numbers of a person's own code: drawn from a seed, and without a trace in the training's own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_generators = threading.RLock()
"""Held while the generators, which all threads of a process share, have states that will be taken back."""


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def own_random(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch, and give them back their states at the end.

    One thread at a time: of two that overlap, the one that ends last would leave the seeds of the other in the process.
    """
    with _generators:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices=devices):
                if devices:
                    seed_all(seed)
                else:
                    # torch.manual_seed would leave its seed for the GPU to be taken up later, and is slow.
                    random.seed(seed)
                    np.random.seed(seed % 2**32)
                    torch.default_generator.manual_seed(seed)
                yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
