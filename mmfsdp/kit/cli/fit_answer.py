"""fit_answer: what fits as the object that `mmfsdp fit --json` prints."""

from __future__ import annotations

from typing import Any

from ..train.fit_answers import Answer, Fit, Way, plain
from .answers import CurveFigures, FitAnswer, FitFigures, WayFigures


def fit_answer(solved: Fit) -> FitAnswer:
    """Return what fits, for programs."""
    curve = solved.curve
    return FitAnswer(
        ok=solved.all_fit,
        machine=solved.machine.name,
        capacity_bytes=int(solved.machine.capacity),
        context_bytes=int(solved.machine.context),
        fragmentation=solved.machine.fragmentation,
        answers=[_figures(answer, solved) for answer in solved.answers],
        curve=CurveFigures(base_bytes=curve.base, bytes_per_token=curve.slope) if curve else None,
    )


def _figures(answer: Answer, solved: Fit) -> FitFigures:
    def needed(peak: int | None) -> int | None:
        return None if peak is None else solved.machine.needed_bytes(peak)

    return FitFigures(
        asked=answer.asked,
        value=answer.value or None,
        unit=answer.unit,
        now=answer.now,
        change=_plain(answer.change),
        peak_bytes=answer.peak,
        needed_bytes=needed(answer.peak),
        further=answer.further,
        further_needed_bytes=needed(answer.further_peak),
        why_not=answer.why_not,
        traced=not answer.read_off,
        ways=[_way(way, solved) for way in answer.ways if not way.why_not],
    )


def _way(way: Way, solved: Fit) -> WayFigures:
    needed = solved.machine.needed_bytes(way.peak)
    return WayFigures(change=_plain(way.change), needed_bytes=needed, sent_bytes=way.wire, fits=way.fits)


def _plain(change: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in change.items()}
