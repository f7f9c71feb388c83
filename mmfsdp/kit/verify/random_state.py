"""The states of the generators of Python, NumPy and torch: what a forward or a script does to them."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

GENERATORS = ("Python's random", "numpy.random", "torch")
"""Generators of random numbers, in the order in which states and digests are listed."""


def random_states() -> list[Any]:
    """Return the states of all generators."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def restore_random(states: list[Any]) -> None:
    """Give the generators states that `random_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def random_digests() -> list[int]:
    """Return a CRC-32 of each generator's state, in the order of GENERATORS."""
    of_python, (name, keys, *rest), of_torch = random_states()
    parts = (repr(of_python).encode(), repr((name, keys.tolist(), *rest)).encode(), of_torch.numpy().tobytes())
    return [zlib.crc32(part) for part in parts]
