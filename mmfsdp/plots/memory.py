"""What a rank's memory is filled with, beside what there is of it."""

from __future__ import annotations

from collections.abc import Mapping

from .style import ACTIVATIONS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE
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
    parts: Mapping[str, int], *, capacity: float, label: str, of: str, full: float | None = None, width: float = WIDTH
) -> str:
    """Bytes by kind, one after the other; under them, how much of the memory there is they fill.

    parts: bytes by a name of KINDS. capacity: bytes. label: what is shown; of: whose
    capacity it is. full: bytes that are as long as the
    picture is wide, for bars to be compared; else all of them.
    """
    from ..plan.table import size

    total = sum(parts.values())
    scale = width / max(full or total, 1)
    drawn, x, row, keys, top = [], 0.0, 0, 0.0, 37.0
    for name in (name for name in KINDS if parts.get(name)):
        words = f"{name} {size(parts[name])}"
        drawn.append(rect(x, top, parts[name] * scale, BAR, KINDS[name], title=words))
        x += parts[name] * scale
        if keys + width_of(words, 12) + 20 > width:
            row, keys = row + 1, 0.0
        line = top + BAR + GAUGE + 12 + 18 * row
        drawn += [rect(keys, line, 12, 12, KINDS[name]), text(keys + 17, line + 10, words, size=12)]
        keys += width_of(words, 12) + 46
    share = total / max(capacity, 1)
    percent = "less than 1%" if share < 0.01 else f"{share:.0%}"
    words = f"{size(total)} of {size(capacity)} ({of}), {percent}"
    words = words if share <= 1 else f"{size(total)} DO NOT FIT into {size(capacity)} ({of})"
    drawn.append(rect(0, top + BAR + 2, width * min(1, share), GAUGE, TRAINABLE if share > 1 else "currentColor"))
    drawn.append(rect(0.5, top + BAR + 2, width - 1, GAUGE, "none", outline="currentColor", stroke=1))
    said = [text(0, 13, label, size=13), text(0, 30, words, size=13)]
    return svg(width, top + BAR + GAUGE + 16 + 18 * (row + 1), f"{label}: {words}", *said, *drawn)
