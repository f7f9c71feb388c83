"""The ranks of a run as a grid: who is where, and who is not well. Plain HTML, so that it works while the kernel does
something else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..watch import Rank

SIGNS = {"waiting": "○", "running": "●", "quiet": "▲", "failed": "✖", "stopped": "■", "done": "✓"}
"""So that nobody needs to see colors."""
FEW = 24
"""Ranks up to which each has its figures in view; of more, the mouse shows them."""


def grid(ranks: Sequence[Rank], *, key: str) -> str:
    """One cell a rank. A cell of a rank with a traceback opens it (see `tracebacks`), by mouse and by keyboard."""
    cells = "".join(_cell(rank, key, few=len(ranks) <= FEW) for rank in ranks)
    counts = {status: sum(r.status == status for r in ranks) for status in SIGNS}
    words = ", ".join(f"{SIGNS[status]} {n} {status}" for status, n in counts.items() if n)
    return f'<div class="mm-quiet">ranks: {words}</div><div class="mm-ranks">{cells}</div>'


def tracebacks(ranks: Sequence[Rank], *, key: str) -> str:
    """What the ranks that failed have to say, each behind its name; the cells of `grid` open and close them."""
    told = [rank for rank in ranks if rank.error or rank.traceback]
    return "".join(
        f'<div><input type="checkbox" class="mm-fold" id="{_id(key, rank)}"{" checked" if len(told) == 1 else ""}>'
        f'<label for="{_id(key, rank)}"><b class="mm-is-error">rank {rank.rank}: {escape(rank.error[:300])}</b></label>'
        f'<pre class="mm-log mm-scroll">{escape(rank.traceback)}</pre></div>'
        for rank in told[:FEW]
    )


def _cell(rank: Rank, key: str, *, few: bool) -> str:
    age = "" if rank.age is None or rank.age < 3 else f"{rank.age:.0f} s ago"
    memory = "" if rank.memory is None else f"{rank.memory / 2**20:,.0f} MiB"
    step = "" if rank.step is None else f"step {rank.step}"
    facts = [f"rank {rank.rank}", rank.status, rank.doing, age, memory, rank.error[:300]]
    inside = f"{SIGNS[rank.status]} {rank.rank}"
    if few:
        inside = f"<b>{SIGNS[rank.status]} rank {rank.rank}</b> " + " · ".join(x for x in (step, age, memory) if x)
    look = f'class="mm-rank mm-rank-{rank.status}" title="{escape(", ".join(x for x in facts if x))}"'
    told = f' for="{_id(key, rank)}"' if rank.error or rank.traceback else ""
    return f"<label {look}{told}>{inside}</label>"


def _id(key: str, rank: Rank) -> str:
    return f"mm-{key}-{rank.rank}"
