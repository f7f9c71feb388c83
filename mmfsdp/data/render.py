"""Draws scenes: anti-aliased shapes with a darker rim on a soft background, at any size."""

from __future__ import annotations

import math
from functools import cache

from PIL import Image, ImageDraw

from .scenes import Group, Scene

_OVERSAMPLING = 4
_RIM = 0.86
"""The inside of a shape, as a share of it; the rest is its rim."""


def render(scene: Scene, size: int) -> Image.Image:
    """The picture of a scene, RGB, `size` x `size` pixels. The same scene always gives the same pixels."""
    corners = Image.new("RGB", (2, 2))
    corners.putdata(scene.corners)
    picture = corners.resize((size, size), Image.Resampling.BILINEAR)
    for group in scene.groups:
        picture.paste(tuple(int(0.72 * c) for c in group.tint), mask=_mask(group, size, 1.0))
        picture.paste(group.tint, mask=_mask(group, size, _RIM))
    return picture


def _mask(group: Group, size: int, scale: float) -> Image.Image:
    """Where the shapes of a group are, each shrunk to `scale`: 0 to 255, L, `size` x `size`."""
    side = size * _OVERSAMPLING
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    outline = _outline(group.combination.shape)
    for place in group.places:
        cos, sin = (f(place.turn) * place.radius * scale * side for f in (math.cos, math.sin))
        x, y = place.x * side, place.y * side
        draw.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in outline], fill=255)
    return mask.reduce(_OVERSAMPLING)


@cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corners of a shape within the unit circle, y pointing down."""
    if shape == "circle":
        return _regular(48, 0.95)
    if shape == "square":
        return _regular(4, 1.0, turn=math.pi / 4)
    if shape == "triangle":
        return _regular(3, 1.0)
    if shape == "star":
        return tuple(
            p for pair in zip(_regular(5, 1.0), _regular(5, 0.45, turn=math.pi / 5), strict=True) for p in pair
        )
    if shape == "cross":
        arm = ((-0.3, -0.95), (0.3, -0.95), (0.3, -0.3))
        return tuple((x * c - y * s, x * s + y * c) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1)) for x, y in arm)
    assert shape == "heart", shape
    turns = [2 * math.pi * i / 48 for i in range(48)]
    curve = [
        (16 * math.sin(t) ** 3, -13 * math.cos(t) + 5 * math.cos(2 * t) + 2 * math.cos(3 * t) + math.cos(4 * t))
        for t in turns
    ]
    return tuple((x / 17, (y - 2.5) / 17) for x, y in curve)


def _regular(corners: int, radius: float, turn: float = 0.0) -> tuple[tuple[float, float], ...]:
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    return tuple((radius * math.sin(a), -radius * math.cos(a)) for a in angles)
