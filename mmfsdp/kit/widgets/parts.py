"""The parts of a run in a line: those that are done, the one that it is in with what it does there, those to come."""

from __future__ import annotations

from html import escape

from ..run.progress import PartProgress
from ..run.watch import clock

DONE, NOW, TO_COME = "✓", "●", "○"
"""Signs in addition to the weight of the text."""


def parts_line(progress: PartProgress | None) -> str:
    """Return the parts of a run as HTML, with a bar where the share that is done is known; empty for None."""
    if progress is None:
        return ""
    now = progress.parts.index(progress.part)
    items = []
    for index, part in enumerate(progress.parts):
        if index == now:
            items.append(f'<b aria-current="step">{NOW} {escape(part)}</b>')
        else:
            items.append(f"<span>{DONE if index < now else TO_COME} {escape(part)}</span>")
    words = escape(progress.words)
    bar = ""
    if progress.share is not None:
        words += f", {progress.share:.0%}"
        if progress.left_s is not None:
            words += f", {clock(progress.left_s)} left"
        bar = f'<progress aria-label="{escape(progress.part)} done" value="{progress.share:.3f}" max="1"></progress>'
    return f'<div class="mm-parts">{"".join(items)}</div><div class="mm-quiet">{words}</div>{bar}'
