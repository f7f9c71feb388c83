"""Arrange records by their lengths: those of similar length follow each other, and ranks get about as many tokens.

Each order is a function of the seed, the epoch and the lengths: a resumed run goes on exactly, on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WINDOW = 50
"""Groups of records that are sorted together. Transformers' `group_by_length` takes 50 batches, too."""


@dataclass(frozen=True)
class Arrange:
    """Arrangement of a source's records by their lengths."""

    by_length: int = 0
    """Records of similar length that follow each other; 0: none do."""
    longest_first: bool = False
    """The group with the longest record begins the first epoch."""
    even_ranks: bool = False
    """The records of a micro-step are dealt so that each rank has about as many tokens."""

    def order(self, order: np.ndarray, lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return an epoch's order (N,) in groups of records of similar length.

        The order is cut into windows, each window is sorted, and the groups of a window are shuffled. Groups begin at
        multiples of `by_length` in the whole stream, so that a batch is of one group in every epoch.
        """
        size = self.by_length
        if not size:
            return order
        rng = np.random.default_rng((seed, epoch, size))
        head = -epoch * len(order) % size  # ends the group that the epoch before began
        groups = []
        for start in range(head, len(order), size * WINDOW):
            window = order[start : start + size * WINDOW]
            window = window[np.argsort(-lengths[window], kind="stable")]
            whole = len(window) // size
            for group in rng.permutation(whole).tolist():
                groups.append(window[group * size : (group + 1) * size])
            groups.append(window[whole * size :])
        if self.longest_first and epoch == 0:
            # Only whole groups move, so that the others stay where groups begin.
            longest = max(range(len(groups)), key=lambda i: _longest(lengths, groups[i], size))
            groups.insert(0, groups.pop(longest))
        return np.concatenate([order[:head], *groups])


def _longest(lengths: np.ndarray, group: np.ndarray, size: int) -> int:
    """Return the length of the longest record of a group of this size; -1 for a smaller group."""
    return int(lengths[group].max()) if len(group) == size else -1


def deal_evenly(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Return (..., W, B) the places in `lengths` (..., W * B) of the records that each rank gets.

    The longest W go to the ranks in order, the next W in reverse order, and so on.
    """
    longest_first = np.argsort(-lengths, axis=-1, kind="stable")
    rounds = longest_first.reshape(*lengths.shape[:-1], -1, ranks).copy()
    rounds[..., 1::2, :] = rounds[..., 1::2, ::-1]
    return np.sort(np.swapaxes(rounds, -1, -2), axis=-1)
