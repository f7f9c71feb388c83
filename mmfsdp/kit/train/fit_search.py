"""Search the largest whole number that fits."""

from __future__ import annotations

from collections.abc import Callable

MOST = 1 << 20
"""A number that fits is not looked for beyond this."""
MAX_GUESSES = 6
"""After so many guesses, the rest is found by halves."""


def search(
    room: Callable[[int], float], first: int, *, guess: Callable[[], int] | None = None, most: int = MOST
) -> tuple[int, int | None]:
    """Return the largest n that fits and the one after it, both looked at; 0 where none fits, None where all do.

    Args:
        room: Returns what n leaves free, less for each more: negative if it does not fit. Infinite where there is no
            such n: inf if it is too small to be, -inf if it is too large.
        first: Where to begin, from 1; the second look is at twice as much.
        guess: Returns the largest n that may fit, after two looks. Default: by doubling, then by halves.
        most: The largest n.
    """
    fits, too_many, looks = 0, most + 1, 0
    n = min(first, most)
    while too_many - fits > 1:
        if room(n) >= 0:
            fits = n
        else:
            too_many = n
        looks += 1
        if guess is not None and 2 <= looks <= MAX_GUESSES:
            n = guess()
        else:
            n = 2 * n if too_many > most else (fits + too_many) // 2
        n = max(fits + 1, min(n, too_many - 1))
    return fits, None if too_many > most else too_many
