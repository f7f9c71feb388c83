"""SVG elements as text. Every word that comes in is escaped, and has the color of the page around it."""

from __future__ import annotations

import math
from html import escape

TEXT = "currentColor"
_NARROW = set("fijlrtI.,:;|!'()[] ")


def svg(width: float, height: float, words: str, *parts: str, role: str = "img") -> str:
    """A picture of so many pixels that scales down with its page. words: what it shows, for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="{role}" style="max-width:100%;height:auto;font-family:system-ui,sans-serif">'
        f"<title>{escape(words)}</title>{''.join(parts)}</svg>"
    )


def text(
    x: float, y: float, words: str, *, size: float = 11, anchor: str = "start", color: str = "currentColor"
) -> str:
    """Words with the end of `anchor` (start, middle, end) at x, their foot at y."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}>{escape(str(words))}</text>"


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    *,
    title: str = "",
    outline: str = "",
    stroke: float = 1.5,
    dash: str = "",
) -> str:
    """A filled rectangle; `title` shows under the mouse. stroke: width of the outline."""
    edge = f' stroke="{outline}" stroke-width="{stroke:g}"' if outline else ""
    edge += f' stroke-dasharray="{dash}"' if dash else ""
    inside = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{max(0, height):.1f}"'
    return f'<rect {place} fill="{color}"{edge}>{inside}</rect>'


def path(
    points: list[tuple[float, float]], color: str, *, width: float = 1.6, dash: str = "", opacity: float = 1
) -> str:
    """A line through points."""
    more = f' stroke-dasharray="{dash}"' if dash else ""
    more += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    look = f'stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round"'
    return f'<path d="{_way(points)}" fill="none" {look}{more}/>'


def dot(x: float, y: float, color: str) -> str:
    """A point of a line."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>'


def area(points: list[tuple[float, float]], color: str) -> str:
    """What lies within a closed line, faintly."""
    return f'<path d="{_way(points)}Z" fill="{color}" fill-opacity=".22"/>'


def _way(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def width_of(words: str, size: float = 11) -> float:
    """About how wide a text is, in pixels."""
    return size * sum(0.32 if c in _NARROW else 0.6 for c in words)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = (high - low) / count
    if not rough > 0:
        return [low]
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * k for k in (1, 2, 2.5, 5, 10) if base * k >= rough * 0.99)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 8.5e-8, 0.25, 12, 3.5k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}" if abs(value) >= 1 or value == 0 else f"{value:.2g}".replace("e-0", "e-")
