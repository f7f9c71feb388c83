"""Numbers and bytes as people read them, and the width of what is printed."""

from __future__ import annotations

WIDTH = 80
"""Columns of what is printed."""


def count(n: float) -> str:
    """Return a number of things in at most 6 characters: 512, 1.23K, 45.6M."""
    return _scale(n, 1000, ("", "K", "M", "B"), ".3g")


def size(n: float) -> str:
    """Return bytes for people, in powers of 1024: 512 B, 1.2 KiB, 3.4 GiB."""
    return _scale(n, 1024, (" B", " KiB", " MiB", " GiB"), ".1f")


def _scale(n: float, base: int, suffixes: tuple[str, ...], digits: str) -> str:
    for suffix in suffixes:
        # What would be rounded to the base gets the next suffix.
        if n < base - 0.5 or suffix == suffixes[-1]:
            break
        n /= base
    if n >= 100 or float(n).is_integer():
        digits = ".0f"
    return f"{n:{digits}}{suffix}"
