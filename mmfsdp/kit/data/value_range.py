"""Map pictures of more than 8 bits to 8 bits, and say where they use little of the range that becomes black to white.

Scanners and microscopes write 12 bits into 16, CT writes Hounsfield units from -1000 to 3000, and some programs write
8 bits into 16. Their files do not say so: only `data.picture_range` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from .batch import Sample
from .corrupt import CorruptRecord

VALUES = "values before 8 bits"
"""Key of a picture's `info` that holds its `Values`."""
LITTLE = 0.25
"""Share of the range below which a note tells of it: a picture is then nearly black."""
LOOKED_AT = 8
"""Pictures of a source that are looked at, and records in which they are searched for."""
DEPTHS = (255, 1023, 4095, 16383, 65535)
"""The largest values of 8, 10, 12, 14 and 16 bits."""


@dataclass(frozen=True)
class Values:
    """Holds the values that a picture had, and the range of them that became black to white."""

    low: float
    high: float
    black: float
    white: float
    is_color: bool = False
    """It has 16 bits for each color, of which PIL reads the upper 8."""


def is_deep(image: Image.Image) -> bool:
    """Return whether a picture of one channel has more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


def is_deep_color(image: Image.Image) -> bool:
    """Return whether a picture that is not decoded yet has 16 bits for each of several channels, as a PNG may have."""
    return not is_deep(image) and any(";16" in str(tile) for tile in getattr(image, "tile", ()))


def to_8_bits(image: Image.Image, value_range: Sequence[float] = ()) -> Image.Image:
    """Return a picture of one channel of more than 8 bits with 8 bits (mode L), and its `Values` in its `info`.

    value_range: the values that become black and white. Default: 0 and 65535 for 16 bits, 0 and 1 for floats of this
    range, else 0 and 255, or 65535 if a value is larger than 255. A value that is no number counts as 0.
    """
    values: np.ndarray = np.array(image, dtype=np.float32)
    # NaN marks pixels without a value, as outside of a scan; one would make all of the range NaN.
    values[~np.isfinite(values)] = 0
    low, high = float(values.min()), float(values.max())
    black, white = value_range or (0, _white(image.mode, low, high))
    scaled = (values - black) * (255 / (white - black))
    result = Image.fromarray(scaled.clip(0, 255).round().astype(np.uint8))
    result.info[VALUES] = Values(low, high, black, white)
    return result


def _white(mode: str, low: float, high: float) -> float:
    if mode == "F" and low >= 0 and high <= 1:
        return 1
    return 65535 if mode.startswith("I;16") or high > 255 else 255


def note_color(image: Image.Image) -> None:
    """Put the `Values` of a picture of 16 bits for each color, of which 8 were read, into its `info`."""
    extrema: Any = image.getextrema()
    low, high = min(band[0] for band in extrema[:3]), max(band[1] for band in extrema[:3])
    # Of 16 bits, 8 were read: 255 stands for 65535.
    image.info[VALUES] = Values(low * 257, high * 257, 0, 65535, is_color=True)


def range_notes(loaded: Iterable[Any], value_range: Sequence[float]) -> list[str]:
    """Return what a person should know of the values of a source's pictures, by the first of them.

    loaded: what the source holds, of which no more is read than is needed: a first picture of 8 bits says all.
    """
    deep: list[Values] = []
    for image in islice(_first_pictures(islice(loaded, LOOKED_AT)), LOOKED_AT):
        values = image.info.get(VALUES)
        if values is None and not deep:
            words = "has no effect on pictures of 8 bits, such as the first one here"
            return [f"picture_range {words}"] if value_range else []
        if values is not None:
            deep.append(values)
    return _notes_of(deep) if deep else []


def _first_pictures(loaded: Iterable[Any]) -> Iterator[Image.Image]:
    for item in loaded:
        if isinstance(item, Sample):
            yield from item.images
        elif not isinstance(item, CorruptRecord):
            return  # a row as a person's reader gave it


def _notes_of(deep: Sequence[Values]) -> list[str]:
    low, high = min(values.low for values in deep), max(values.high for values in deep)
    black, white = deep[0].black, deep[0].white
    has = f"pictures have values from {low:,.4g} to {high:,.4g}"
    if len({(values.black, values.white) for values in deep}) > 1:
        words = "some are scaled by another range than the others"
        return [f"{has}, and {words}; set picture_range to the values of black and white, such as {_range(low, high)}"]
    share = (min(high, white) - max(low, black)) / (white - black)
    if low < black:
        words = f"those below {black:,g} become black"
    elif high > white:
        words = f"those above {white:,g} become white"
    elif share < LITTLE:
        words = f"they use {100 * share:.2g} % of their range of {black:,g} to {white:,g}"
    else:
        return []
    if deep[0].is_color:
        return [
            f"{has}: {words}, and only the upper 8 of their 16 bits are read; write them with 8 bits for each color"
        ]
    return [f"{has}: {words}; set picture_range to the values of black and white, such as {_range(low, high)}"]


def _range(low: float, high: float) -> str:
    """Return a range for these values as a person writes it."""
    if low < 0:
        return f"[{low:.4g}, {high:.4g}]"
    if high <= 1:
        return "[0, 1]"
    white = next((depth for depth in DEPTHS if high <= depth), None)
    return f"[0, {white}]" if white else f"[0, {high:.6g}]"
