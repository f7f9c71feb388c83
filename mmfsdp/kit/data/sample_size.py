"""SampleSize: how large a record is in a batch, from its text and the headers of its pictures."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import Sample


@dataclass(frozen=True)
class SampleSize:
    """The size of a sample, as its processor encodes it."""

    tokens: int
    """Length of its row, cut at max_length; tokens of pictures included where they stand among the text."""
    visual: int
    """Tokens of its pictures; of a model that keeps them out of the text, the pictures themselves."""
    label: str = ""
    """See `Sample.label`."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Width and height of each picture, as its file has it."""


def picture_sizes(sample: Sample) -> tuple[tuple[int, int], ...]:
    """Return width and height of each picture of a sample."""
    return tuple(image.size for image in sample.images)


def pictures_beyond(max_length: int, length: int) -> str:
    """Return why a sample is skipped whose pictures lie beyond max_length."""
    words = f"has pictures beyond the first {max_length} of {length} tokens"
    return f"{words}; raise max_length or shrink the pictures"


def nothing_to_learn(max_length: int, length: int) -> str:
    """Return why a sample is skipped whose whole answer lies beyond max_length."""
    words = f"has no token to learn from in its first {max_length} of {length}"
    return f"{words}; raise max_length or shorten the prompt"
