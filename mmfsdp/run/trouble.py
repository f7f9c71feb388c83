"""Find what is wrong with a run: each trouble once, with its likely cause and what to do. Reads its folder alone.

The panel, `mmfsdp watch`, `mmfsdp status` and the report show the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ..params.base import without_controls
from .causes import FIXES, OF_A_RANK, OF_THE_SITE
from .folder import PathLike, Row, read_metrics
from .record import CANCELLING, RunRecord, RunState, Status, first_failure, rank_statuses
from .stages import progress_of
from .state import LAST_ROWS_BYTES, RankProgress, age, not_finite, read_ranks, skipped_steps

FAILED, NOT_FINITE, SKIPPED, STALLED = "failed", "not finite", "skipped", "stalled"
"""Kinds of trouble, the worst first."""
IN_REASON = (FAILED, NOT_FINITE, SKIPPED)
"""Kinds that the reason of a state tells, too."""


class Trouble(NamedTuple):
    """Something that is wrong with a run."""

    kind: str
    rank: int | None
    """The rank that it began with; None where it is all of them, or nobody knows."""
    text: str
    """What happened, with the likely cause."""
    fix: str = ""
    """What to do; empty where the text says all that is known."""

    def __str__(self) -> str:
        return f"{self.text}. What to do: {self.fix}" if self.fix else self.text


def troubles(folder: PathLike, state: RunState, *, ranks: Sequence[RankProgress] | None = None) -> list[Trouble]:
    """Return what is wrong with a run in this state, the worst first; [] if nothing is.

    ranks: what `read_ranks` gives, where it was called already.
    """
    folder = Path(folder)
    record = RunRecord.read(folder)
    rows = read_metrics(folder, last_bytes=LAST_ROWS_BYTES)
    if ranks is None:
        ranks = read_ranks(folder, record.ranks if record else 0, state)
    found = [_failure(folder, record, state), _bad_steps(rows), _stall(ranks, state, record)]
    present = [trouble for trouble in found if trouble is not None]
    if len(present) > 1 and present[0].kind == FAILED and "not finite" in present[0].text:
        present = [trouble for trouble in present if trouble.kind not in (NOT_FINITE, SKIPPED)]
    return present


def headline(state: RunState, found: Sequence[Trouble]) -> str:
    """Return the state of a run in a line, without the reason where a trouble tells it."""
    if any(trouble.kind in IN_REASON for trouble in found):
        return str(replace(state, reason=""))
    return str(state)


def is_ending(state: RunState, found: Sequence[Trouble]) -> bool:
    """Return True if nobody can say when the run will be done: it is, it is being stopped, or it stalls."""
    if state.done or state.rank is not None or state.reason == CANCELLING:
        return True
    return any(trouble.kind in (FAILED, STALLED) for trouble in found)


def _failure(folder: Path, record: RunRecord | None, state: RunState) -> Trouble | None:
    """Return why a run has failed, or is about to: a rank has, and the others are being stopped."""
    if state.done and state.status not in (Status.FAILED, Status.LOST):
        return None
    failure = state
    if not state.done and state.rank is None:
        failure = (first_failure(rank_statuses(folder, record)) if record else None) or state
        if failure is state:
            return None
    text, fix = cause_and_fix(failure)
    if not text:
        text = "it failed without a reason"
    if failure.kind in OF_THE_SITE:
        command = f"`mmfsdp check --config {quote(str(folder / 'params.yaml'))}`"
        fix = "; ".join(filter(None, (fix, f"{command} looks for what is wrong with the site")))
    return Trouble(FAILED, failure.rank, text, fix)


def cause_and_fix(state: RunState) -> tuple[str, str]:
    """Return the first cause in the reason of a state, and what to do; "" where nobody knows that."""
    cause = without_controls(state.cause or state.reason)
    fix = state.fix or FIXES.get(state.kind, "")
    if not fix and state.rank is not None:
        fix = OF_A_RANK
    return cause, without_controls(fix)


def _bad_steps(rows: Sequence[Row]) -> Trouble | None:
    """Return what is wrong with the loss and the gradient in the newest metrics."""
    newest = rows[-1] if rows else {}
    words, is_fp16 = skipped_steps(rows), "loss_scale" in newest
    if not words or (is_fp16 and not not_finite(rows)):  # to skip steps is how fp16 finds its loss scale
        return None
    if not not_finite(rows):
        fix = "none if it was few steps; else lower train.lr, or raise train.warmup_steps"
        return Trouble(SKIPPED, None, f"{words}: their loss or gradient norm was not finite", fix)
    if newest.get("skipped_in_a_row", 0) >= newest.get("step", 1):  # since the first step
        fix = "look for values that are not finite in the data and in the weights"
        if is_fp16:
            fix += ", or use bf16 (fsdp.mixed_precision)"
        return Trouble(NOT_FINITE, None, f"{words}; no step was ever finite, so the learning rate is not to blame", fix)
    fix = "lower train.lr, or raise train.warmup_steps"
    if is_fp16:
        fix = "use bf16 rather than fp16 (fsdp.mixed_precision), or lower train.lr"
    return Trouble(NOT_FINITE, None, f"{words}; the likely cause is a learning rate that is too high", fix)


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
    fix = "wait, or cancel it; if it goes on like this it is stopped, with the stack of that rank"
    return Trouble(STALLED, first.rank, text, fix)
