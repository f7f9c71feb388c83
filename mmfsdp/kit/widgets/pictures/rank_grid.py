"""The ranks of a run as they are now: a cell each, and from many ranks on a map of colored squares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import median

from ....params.in_words import size
from ...run.state import RankProgress
from ...run.trouble import Trouble
from ..style import INK, RUN_COLORS

RANK_SIGNS = {"waiting": "○", "running": "●", "quiet": "▲", "failed": "✖", "stopped": "■", "done": "✓"}
"""Signs in addition to the colors, so that nobody needs to tell colors apart."""
MAP_FROM = 16
"""Ranks from which on they are drawn as a map."""
SLOW = 0.5
"""Share of the median throughput at which a square is as faint as it gets."""


def rank_grid(ranks: Sequence[RankProgress], found: Sequence[Trouble] = ()) -> str:
    """Return a cell for each rank. The one that a trouble began with says so."""
    first = {trouble.rank: trouble.code for trouble in found}
    counts = Counter(rank.status for rank in ranks)
    summary = ", ".join(f"{sign} {counts[status]} {status}" for status, sign in RANK_SIGNS.items() if counts[status])
    head = f'<div class="mm-quiet">ranks: {summary}</div>'
    if len(ranks) >= MAP_FROM:
        return head + _rank_map(ranks, first)
    cells = "".join(_rank_cell(rank, first.get(rank.rank, "")) for rank in ranks)
    return f'{head}<div class="mm-ranks">{cells}</div>'


def _rank_map(ranks: Sequence[RankProgress], first: dict[int | None, str]) -> str:
    """Return a square for each rank, the fainter the slower, with its facts as its title; a cell for each odd one.

    Only what nobody should overlook has a cell: ranks that failed or are quiet.
    """
    rates = [rank.tokens_per_s for rank in ranks if rank.tokens_per_s]
    usual = median(rates) if rates else 0.0
    squares = cells = ""
    for rank in ranks:
        odd = rank.status in ("quiet", "failed")
        sign = RANK_SIGNS[rank.status] if odd else ""
        title = f"rank {rank.rank}: {rank.status}, {', '.join(_facts(rank))}"
        look = f"background:{_shade(rank, usual)}"
        squares += f'<i class="mm-rank-{rank.status}" style="{look}" title="{escape(title)}">{sign}</i>'
        if odd:
            cells += _rank_cell(rank, first.get(rank.rank, ""))
    words, about = f"{len(ranks)} ranks", "A square is a rank"
    if usual:
        slowest = f"the slowest has {min(rates) / usual:.0%} of the median throughput"
        words += f"; {slowest}"
        about += f": the fainter, the slower; {slowest}"
    html = f'<div class="mm-rank-map" role="img" aria-label="{words}">{squares}</div>'
    html += f'<span class="mm-quiet">{about}.</span>'
    return html + (f'<div class="mm-ranks">{cells}</div>' if cells else "")


def _shade(rank: RankProgress, usual: float) -> str:
    """Return the color of a rank's square, by its share of the usual throughput."""
    if not rank.tokens_per_s or not usual:
        return f"{INK}44"
    strength = (min(1.0, rank.tokens_per_s / usual) - SLOW) / (1 - SLOW)
    return f"{RUN_COLORS[0]}{round(40 + 215 * min(1.0, max(0.0, strength))):02x}"


def _rank_cell(rank: RankProgress, first: str) -> str:
    facts = [f"{first} first"] if first else []
    label = f"<b>{RANK_SIGNS[rank.status]} rank {rank.rank}</b> {' · '.join([*facts, *map(escape, _facts(rank))])}"
    return f'<span class="mm-rank mm-rank-{rank.status}">{label}</span>'


def _facts(rank: RankProgress) -> list[str]:
    """Return what is known of a rank, in words."""
    facts = []
    if rank.step is not None:
        facts.append(f"step {rank.step}")
    if rank.tokens_per_s is not None:
        facts.append(f"{rank.tokens_per_s:,.0f} tokens/s")
    if rank.mfu is not None:
        facts.append(f"MFU {rank.mfu:.0%}")
    if rank.status == "quiet":
        facts.append(f"{rank.activity} {rank.age_s:.0f} s ago")
    if rank.memory_bytes is not None:
        facts.append(size(rank.memory_bytes))
    if rank.reserved_bytes is not None:
        facts.append(f"{size(rank.reserved_bytes)} reserved")
    if rank.gpu_use is not None:
        facts.append(f"GPU {rank.gpu_use:.0%}")
    if rank.power_w is not None:
        facts.append(f"{rank.power_w:,.0f} W")
    if rank.temperature_c is not None:
        facts.append(f"{rank.temperature_c:.0f} °C")
    return facts
