"""Find what is wrong with a run: each trouble once, with its likely cause and what to do. Reads its folder alone.

The panel, `mmfsdp watch`, `mmfsdp status` and the report show the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from ...params.base import without_controls
from ...params.findings import Finding
from .files.folder import PathLike, Row
from .files.reasons import (
    ADVICE,
    CANCELLING,
    NEVER_FINITE,
    NEVER_FINITE_FP16,
    NOT_FINITE,
    NOT_FINITE_FP16,
    SKIPPED,
    SKIPPED_STEPS,
    STALLED,
    Reason,
)
from .files.run_record import RunRecord, RunState, Status, first_failure
from .files.snapshot import Snapshot, look_at
from .files.stages import progress_of
from .state import RankProgress, age, not_finite, read_ranks, skipped_steps

FAILED = "failed"
"""A kind of trouble; the others, NOT_FINITE, SKIPPED and STALLED, are kinds of reasons, too."""
IN_REASON = (FAILED, NOT_FINITE, SKIPPED)
"""Kinds that the reason of a state tells, too."""


@dataclass(frozen=True)
class Trouble(Finding):
    """Say what is wrong with a run that goes on, or has ended."""

    rank: int | None = None
    """The rank that it began with; None where it is all of them, or nobody knows."""


def troubles(
    run: PathLike | Snapshot, state: RunState, *, ranks: Sequence[RankProgress] | None = None
) -> list[Trouble]:
    """Return what is wrong with a run in this state, the worst first; [] if nothing is.

    What its launch said of its data comes last.

    run: a look at it, or its folder. ranks: what `read_ranks` gives, where it was called already.
    """
    look = look_at(run)
    rows = look.rows()
    if ranks is None:
        ranks = read_ranks(look, len(look.reports), state)
    found = []
    why = _failure(look, state)
    if why is not None:
        found.append(_trouble_of(look.folder, why))
    others = [_stall(ranks, state, look.record)]
    if why is None or why.kind != SKIPPED_STEPS:  # which is about the same steps
        others.insert(0, _bad_steps(rows))
    of_data = [Trouble("warning", notice.code, notice.message) for notice in look.notices]
    return found + [trouble for trouble in others if trouble is not None] + of_data


def headline(state: RunState, found: Sequence[Trouble]) -> str:
    """Return the state of a run in a line, without the reason where a trouble tells it."""
    if any(trouble.code in IN_REASON for trouble in found):
        return str(replace(state, why=Reason(), notes=()))
    return str(state)


def is_ending(state: RunState, found: Sequence[Trouble]) -> bool:
    """Return True if nobody can say when the run will be done: it is, it is being stopped, or it stalls."""
    if state.done or state.rank is not None or state.why.kind == CANCELLING:
        return True
    return any(trouble.code in (FAILED, STALLED) for trouble in found)


def _failure(look: Snapshot, state: RunState) -> Reason | None:
    """Return why a run has failed, or is about to: a rank has, and the others are being stopped."""
    if state.done:
        return state.why if state.status in (Status.FAILED, Status.LOST) else None
    if state.rank is not None:
        return state.why
    reported = first_failure(look.reports)
    return reported.why if reported else None


def _trouble_of(folder: Path, why: Reason) -> Trouble:
    """Return that a run has failed, as a trouble."""
    fix = why.what_to_do
    if why.of_site:
        command = f"`mmfsdp check --config {quote(str(folder / 'params.yaml'))}`"
        fix = "; ".join(filter(None, (fix, f"{command} looks for what is wrong with the site")))
    text = without_controls(why.text) or "it failed without a reason"
    return Trouble("error", FAILED, text, without_controls(fix), why.rank)


def _bad_steps(rows: Sequence[Row]) -> Trouble | None:
    """Return what is wrong with the loss and the gradient in the newest metrics."""
    newest = rows[-1] if rows else {}
    words, is_fp16 = skipped_steps(rows), "loss_scale" in newest
    if not words or (is_fp16 and not not_finite(newest)):  # to skip steps is how fp16 finds its loss scale
        return None
    if not not_finite(newest):
        words += ": their loss or gradient norm was not finite"
        return Trouble("warning", SKIPPED, words, ADVICE[SKIPPED].fix)
    if newest.get("skipped_in_a_row", 0) >= newest.get("step", 1):  # since the first step
        words += "; no step was ever finite, so the learning rate is not to blame"
        cause = NEVER_FINITE_FP16 if is_fp16 else NEVER_FINITE
    else:
        words += "; the likely cause is a learning rate that is too high"
        cause = NOT_FINITE_FP16 if is_fp16 else NOT_FINITE
    return Trouble("error", NOT_FINITE, words, ADVICE[cause].fix)


def _stall(ranks: Sequence[RankProgress], state: RunState, record: RunRecord | None) -> Trouble | None:
    """Return that no rank has reported anything for long, and which one the others wait for."""
    working = [rank for rank in ranks if rank.status not in ("done", "failed", "stopped")]
    if state.status not in (Status.STARTING, Status.RUNNING) or not working or record is None:
        return None
    if any(rank.status != "quiet" for rank in working):
        return None  # as long as one rank goes on, so do the others: they meet in every step
    first = min(working, key=lambda rank: progress_of(rank.activity))
    newest = min(rank.age_s or 0.0 for rank in working)
    text = f"rank {first.rank} has reported nothing for {age(newest)}, in {first.activity}"
    if len(working) > 1:
        text += "; the other ranks wait for it"
    return Trouble("error", STALLED, text, ADVICE[STALLED].fix, first.rank)
