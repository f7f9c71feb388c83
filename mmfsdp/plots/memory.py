"""What a rank's memory is filled with, beside what there is of it."""

from __future__ import annotations

from collections.abc import Mapping

from ..style import ACTIVATIONS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE
from .svg import rect, svg, text, width_of

WIDTH, BAR, GAUGE = 920, 24, 8
KINDS = {
    "frozen weights": FROZEN,
    "trainable weights": TRAINABLE,
    "gathered": GATHERED,
    "gradients": REDUCED,
    "optimizer": OPTIMIZER,
    "activations": ACTIVATIONS,
    "buffers": INK,
    "model's buffers": "#A6761D",
}


def memory_bar(
    parts: Mapping[str, int], *, capacity: float, label: str, full: float | None = None, width: float = WIDTH
) -> str:
    """Bytes by kind, one after the other; under them, how much of the memory there is they fill.

    parts: bytes by a name of KINDS. capacity: bytes. label: whose memory it is. full: bytes that are as long as the
    picture is wide, for bars to be compared; else all of them.
    """
    from ..plan.table import size

    total = sum(parts.values())
    scale = width / max(full or total, 1)
    drawn, x, row, keys = [], 0.0, 0, 0.0
    for name in (name for name in KINDS if parts.get(name)):
        words = f"{name} {size(parts[name])}"
        drawn.append(rect(x, 20, parts[name] * scale, BAR, KINDS[name], title=words))
        x += parts[name] * scale
        if keys + width_of(words, 12) + 20 > width:
            row, keys = row + 1, 0.0
        top = 20 + BAR + GAUGE + 12 + 18 * row
        drawn += [rect(keys, top, 12, 12, KINDS[name]), text(keys + 17, top + 10, words, size=12)]
        keys += width_of(words, 12) + 34
    share = total / max(capacity, 1)
    percent = "less than 1%" if share < 0.01 else f"{share:.0%}"
    fits = f"{size(total)} of {size(capacity)}, {percent}"
    words = f"{label}: " + (fits if share <= 1 else f"{size(total)} DO NOT FIT into {size(capacity)}")
    drawn.append(rect(0, 22 + BAR, width * min(1, share), GAUGE, TRAINABLE if share > 1 else "currentColor"))
    drawn.append(rect(0.5, 22 + BAR, width - 1, GAUGE, "none", outline="currentColor", stroke=1))
    return svg(width, 20 + BAR + GAUGE + 16 + 18 * (row + 1), words, text(0, 13, words, size=13), *drawn)
