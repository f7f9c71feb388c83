"""The banner of a run: what is wrong with it, why, and what to do, each trouble once; and the tracebacks behind it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..run.state import RankProgress
from ..run.trouble import Trouble

MAX_TRACEBACKS = 24
"""Tracebacks that are shown; the log files have all."""


def banner(found: Sequence[Trouble]) -> str:
    """Return the troubles of a run as HTML: a box for each, with what to do on a line of its own."""
    html = ""
    for trouble in found:
        words = f"<b>{escape(trouble.message)}</b>"
        if trouble.fix:
            words += f"<div>What to do: {escape(trouble.fix)}</div>"
        html += f'<div class="mm-trouble mm-trouble-{trouble.level}" role="alert">{words}</div>'
    return html


def tracebacks(ranks: Sequence[RankProgress], found: Sequence[Trouble] = ()) -> str:
    """Return the tracebacks of ranks that failed, folded but for the first one's; the banner tells that one's error."""
    first = next((trouble.rank for trouble in found if trouble.rank is not None), None)
    failed = [rank for rank in ranks if rank.error or rank.traceback]
    failed.sort(key=lambda rank: rank.rank != first)
    html = ""
    for rank in failed[:MAX_TRACEBACKS]:
        title = f"rank {rank.rank}: {escape(rank.error[:300])}"
        if rank.rank == first:
            title = f"rank {rank.rank} failed first; its last lines:"
        elif first is not None:
            title = f"then rank {rank.rank}: {escape(rank.error[:300])}"
        opened = " open" if rank.rank == first or len(failed) == 1 else ""
        text = f'<pre class="mm-log mm-scroll" tabindex="0">{escape(rank.traceback)}</pre>'
        html += f"<details{opened}><summary><b>{title}</b></summary>{text}</details>"
    return html
