"""Draws a scene: its colored shapes as a picture of any size."""

from __future__ import annotations

import math
from functools import cache

from PIL import Image, ImageDraw

from .scenes import Group, Scene

OVERSAMPLING = 4
RIM_START = 0.86
"""The inside of a shape, as a share of its radius; the darker rim is around it."""
RIM_BRIGHTNESS = 0.72
Corner = tuple[float, float]


def render(scene: Scene, size: int) -> Image.Image:
    """Return the picture of a scene, RGB, `size` x `size` pixels. The same scene always gives the same pixels."""
    corners = Image.new("RGB", (2, 2))
    corners.putdata(scene.corners)
    picture = corners.resize((size, size), Image.Resampling.BILINEAR)
    for group in scene.groups:
        rim = tuple(int(RIM_BRIGHTNESS * c) for c in group.tint)
        picture.paste(rim, mask=_mask(group, size, 1.0))
        picture.paste(group.tint, mask=_mask(group, size, RIM_START))
    return picture


def _mask(group: Group, size: int, scale: float) -> Image.Image:
    """Return the anti-aliased area of a group's shapes, shrunk to `scale`: 0 to 255, mode L, `size` x `size`."""
    side = size * OVERSAMPLING
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    outline = _outline(group.combination.shape)
    for place in group.places:
        cos = math.cos(place.turn) * place.radius * scale * side
        sin = math.sin(place.turn) * place.radius * scale * side
        x, y = place.x * side, place.y * side
        draw.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in outline], fill=255)
    return mask.reduce(OVERSAMPLING)


@cache
def _outline(shape: str) -> tuple[Corner, ...]:
    """Return the corners of a shape within the unit circle, y pointing down."""
    if shape == "circle":
        return _polygon(48, 0.95)
    if shape == "square":
        return _polygon(4, 1.0, turn=math.pi / 4)
    if shape == "triangle":
        return _polygon(3, 1.0)
    corners: list[Corner] = []
    if shape == "star":
        for outer, inner in zip(_polygon(5, 1.0), _polygon(5, 0.45, turn=math.pi / 5), strict=True):
            corners += [outer, inner]
    elif shape == "cross":
        for cos, sin in ((1, 0), (0, 1), (-1, 0), (0, -1)):  # four quarter turns of one arm
            for x, y in ((-0.3, -0.95), (0.3, -0.95), (0.3, -0.3)):
                corners.append((x * cos - y * sin, x * sin + y * cos))
    else:
        assert shape == "heart", shape
        for i in range(48):  # the heart curve, mathworld.wolfram.com/HeartCurve.html
            t = 2 * math.pi * i / 48
            x = 16 * math.sin(t) ** 3
            y = -13 * math.cos(t) + 5 * math.cos(2 * t) + 2 * math.cos(3 * t) + math.cos(4 * t)
            corners.append((x / 17, (y - 2.5) / 17))
    return tuple(corners)


def _polygon(corners: int, radius: float, turn: float = 0.0) -> tuple[Corner, ...]:
    """Return a regular polygon's corners."""
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    return tuple((radius * math.sin(a), -radius * math.cos(a)) for a in angles)
