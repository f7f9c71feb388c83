"""The random states of one rank (torch, CUDA, Python, NumPy) as tensors, and back."""

from __future__ import annotations

import random

import numpy as np
import torch


def random_state() -> dict[str, torch.Tensor]:
    """Every random generator of this process that training may draw from."""
    version, words, spare = random.getstate()
    assert version == 3
    _, keys, place, has_spare, normal = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_spare": torch.tensor([float("nan") if spare is None else spare], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(keys, [place, has_spare]).astype(np.int64)),
        "numpy_spare": torch.tensor([normal], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Go on where `random_state` was."""
    torch.set_rng_state(state["torch"])
    spare = state["python_spare"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if spare != spare else spare))
    *keys, place, has_spare = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_spare, state["numpy_spare"].item()))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
