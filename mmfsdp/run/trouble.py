"""Find what is wrong with a run: each trouble once, with its likely cause and what to do. Reads its folder alone.

The panel, `mmfsdp watch`, `mmfsdp status` and the report show the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ..params.base import without_controls
from .folder import PathLike, Row, read_metrics
from .record import ADVICE, CANCELLING, RunRecord, RunState, Status, first_failure, rank_statuses
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


FIXES = {
    r"the process of rank \d+ .* waits? for it": "find out who stopped that process (`kill -CONT` lets it go on), or "
    "what it waits for; then resume",
    "came to the end before the others": "give all ranks the same number of steps: look at the length of their data, "
    "such as a last batch that only some have, and at code that ends on one rank only; then resume",
    "in different orders": "call the collectives of both process groups on all their ranks, in one order; then resume",
    "which other ranks belong to that group is not known": "look at what the other ranks do, in logs/ of the run; in a "
    "loop of your own call mmfsdp.name_hang after all process groups are made; then resume",
    "and it does not end": "look at the network between the nodes, and at the GPUs; then resume",
    "never entered .* instead": "run forward and backward of the same units on all ranks, in one order: look for a "
    "batch without a picture, a skipped backward, and a call that only some ranks make, such as an evaluation",
    "never entered": "look at the line where it is: slow or broken data, a lock, or code that only some ranks run; if "
    "it is slow by nature, raise launch.silence_s; then resume",
    "does not answer .*: it hangs": "read its stack below; if this work is slow by nature, raise launch.silence_s; "
    "then resume",
    "crashed": "look at the line that is named, and at the packages in C or C++ that it calls; then resume",
    "was ended by a library": "read its last lines below, correct what they name, then resume",
    "its processes are gone": "free some disk space if the disk is full, then resume",
    "train.max_skipped": "lower train.lr, or use bf16 rather than fp16",
    "its launch was interrupted": "launch it again",
    "its run.json is missing": "cancel it, in case that it still runs; then launch again",
    "no sign of life": "look at that machine: it is down, or does not see this folder",
}
"""Pattern of a reason -> what to do. The first that matches counts."""
OF_A_RANK = "its last lines are below: correct what they name, then resume"
"""What to do about any other error of a rank."""


OF_THE_SITE = re.compile(
    "no rank reaches|has no address on|nobody answers at|the job left no log|can its node see|before it started"
    "|NCCL error|ncclSystemError|ncclRemoteError|DistNetworkError|DistStoreError|Unable to find address for"
)
"""Reasons that lie in a machine or a cluster rather than in a training."""


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
    text, fix = cause_and_fix(failure.reason, failure.rank)
    if not text:
        text = "it failed without a reason"
    if OF_THE_SITE.search(failure.reason):
        fix = (
            f"{fix}; `mmfsdp check --config {quote(str(folder / 'params.yaml'))}` looks for what is wrong with the site"
        )
    return Trouble(FAILED, failure.rank, text, fix)


def cause_and_fix(reason: str, rank: int | None) -> tuple[str, str]:
    """Return the first cause and what to do, of the reason of a state. rank: the one that failed first, if known."""
    cause = without_controls(reason).partition("; then rank ")[0]  # the others failed because of it
    for words in ADVICE:
        if words in cause:
            return cause.replace(words, ""), f"{words.removeprefix('; ')}; then resume"
    for pattern, fix in FIXES.items():
        if re.search(pattern, cause):
            return cause.partition("; ")[0] if rank is None else cause, fix
    if rank is None:  # our own words, with what to do at their end
        cause, _, fix = cause.partition("; ")
        return cause, fix
    return cause, OF_A_RANK


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
