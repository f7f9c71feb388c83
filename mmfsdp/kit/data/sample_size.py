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
