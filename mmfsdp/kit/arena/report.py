"""A file's result as text, and its step as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from ...params.base import without_controls
from ...params.in_words import size
from ..widgets.markup import rect, svg, text, ticks
from ..widgets.style import FILL, INK
from .clock import MACHINE, PARAMETERS, RANKS, Played
from .result import LEVELS, Result
from .step_log import calls

WIDTH, ROW, LEFT, TOP = 900, 26, 170, 46
COLORS = {"forward": FILL["frozen"], "backward": FILL["activations"], "all-gather": FILL["gathered"]}


def table(result: Result, best: float | None = None) -> str:
    """Return the figures of a file beside torch's, and its levels. best: milliseconds of the best earlier result."""
    mine, torchs = result.played(), result.torchs_played()
    both = result.mine, result.torchs
    rows = [
        ("a step", _ms(mine.seconds), _ms(torchs.seconds)),
        ("  of it without compute", _ms(mine.waited), _ms(torchs.waited)),
        ("largest model that fits", *(billions(counts.memory.largest) for counts in both)),
        ("collectives of a step", *(str(calls(counts.events)) for counts in both)),
        ("a rank of 3 sends", *(size(sum(counts.sent.values())) for counts in both)),
        ("a rank of 3 keeps at rest", *(size(counts.rest) for counts in both)),
        ("the most beyond that in a step", *(size(counts.peak) for counts in both)),
    ]
    lines = [f"{without_controls(result.file)} in the arena: {billions(PARAMETERS)} parameters, {RANKS} x {MACHINE}"]
    lines.append(f"{'':34}{'yours':>12}{'fully_shard':>14}")
    lines += [f"{name:34}{own:>12}{other:>14}" for name, own, other in rows]
    reached = result.levels
    for level in LEVELS:
        mark = "x" if level.name in reached else " "
        lines.append(f"[{mark}] {level.name:14} {level.about} ({_where(level.lesson)})")
    if result.number is None:
        lines.append(f"no number: {billions(PARAMETERS)} parameters do not fit; keep less whole")
    else:
        lines.append(f"your number: {result.number:.1f} ms" + (f"; best so far {best:.1f} ms" if best else ""))
    return "\n".join(lines)


def billions(parameters: float) -> str:
    """Return a number of parameters as a person says it."""
    return f"{parameters / 1e9:.3g} billion"


def _where(lesson: str) -> str:
    return f"lesson {lesson}" if lesson.isdigit() else lesson


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def picture(result: Result) -> str:
    """Return both steps as an SVG: what computes and what is sent, over time."""
    steps = [("yours", result.played()), ("fully_shard", result.torchs_played())]
    longest = max(step.seconds for _, step in steps)
    scale = (WIDTH - LEFT - 40) / longest
    parts: list[str] = []
    for number, (name, step) in enumerate(steps):
        top = TOP + number * 3 * ROW
        parts += _rows(name, step, top, scale)
    axis = TOP + 6 * ROW - 6
    for tick in ticks(0, 1e3 * longest):
        x = LEFT + tick / 1e3 * scale
        parts.append(rect(x, TOP - 6, 1, axis - TOP, INK))
        parts.append(text(x, axis + 14, f"{tick:g} ms", size=12, anchor="middle"))
    title = f"A step on {RANKS} GPUs: {_ms(steps[0][1].seconds)}, and {_ms(steps[1][1].seconds)} of fully_shard"
    parts.append(text(10, 22, title, size=15))
    return svg(WIDTH, axis + 50, title, *parts, _legend(axis + 38))


def _rows(name: str, step: Played, top: float, scale: float) -> Sequence[str]:
    parts = []
    for line, row in enumerate(("compute", "network")):
        y = top + line * ROW
        if line == 0:
            parts.append(text(10, y + 15, name, size=13))
        parts.append(text(LEFT - 12, y + 15, row, size=13, anchor="end"))
        for span in step.spans:
            if span.row == row:
                kind = span.name.partition(",")[0]
                color = COLORS.get(kind, FILL["gradients"])
                parts.append(rect(LEFT + span.start * scale, y, (span.end - span.start) * scale, ROW - 6, color))
    return parts


def _legend(y: float) -> str:
    parts, x = [], float(LEFT)
    for words, color in (*COLORS.items(), ("gradients", FILL["gradients"])):
        parts += [rect(x, y - 10, 12, 12, color), text(x + 18, y, words, size=12)]
        x += 120
    return "".join(parts)
