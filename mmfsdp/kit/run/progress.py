"""Tell how far a run is: its part, such as its imports, what it does there, and the share that is done, if known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .files.folder import PathLike
from .files.run_record import TRAIN_AND_CAPTION, RunRecord, RunState, Status
from .files.snapshot import Snapshot, look_at
from .files.stages import BACKBONES, CAPTIONS, FIRST_STEP, PARTS, parsed, progress_of
from .pretraining import backbones_progress
from .state import RankProgress, age, read_ranks


class PartProgress(NamedTuple):
    """The part of a run that it is in."""

    parts: tuple[str, ...]
    """All parts of this run, in order."""
    part: str
    """The one that it is in."""
    words: str
    """The activity there, by the rank that is the furthest behind."""
    share: float | None = None
    """The share of that which is done; None while unknown."""
    left_s: float | None = None
    """Seconds until that is done; None while unknown."""


def part_of(
    run: PathLike | Snapshot, state: RunState, *, ranks: Sequence[RankProgress] | None = None
) -> PartProgress | None:
    """Return the part that a run in this state is in; None if it waits to be started, or is done.

    run: a look at it, or its folder. ranks: what `read_ranks` gives, where it was called already.
    """
    look = look_at(run)
    record = look.record
    if record is None or state.done or state.status is Status.QUEUED:
        return None
    if state.status is Status.PREPARING:
        made = backbones_progress(look.folder)
        words = "starting the pretraining, or waiting for another run's"
        share: float | None = None
        if made.label:
            words, share = f"pretraining the {made.label}, once for all runs", made.share
        return PartProgress(_parts(record, BACKBONES), BACKBONES, words, share, made.left_s)
    if ranks is None:
        ranks = read_ranks(look, record.ranks, state)
    working = [rank for rank in ranks if rank.status not in ("done", "failed", "stopped")]
    if not working:
        return None
    last = min(working, key=lambda rank: progress_of(rank.activity))
    part, words = _part_and_words(last, alone=len(ranks) == 1)
    return PartProgress(_parts(record, part), part, words)


def _parts(record: RunRecord, now: str) -> tuple[str, ...]:
    """Return the parts of a run; the one that it is in is among them, whatever its files say."""
    has = {BACKBONES: record.pretrains, CAPTIONS: record.entry == TRAIN_AND_CAPTION, now: True}
    return tuple(part for part in PARTS if has.get(part, True))


def _part_and_words(last: RankProgress, *, alone: bool) -> tuple[str, str]:
    """Return the part that the rank furthest behind is in, and what it does."""
    told = parsed(last.activity)
    part, words = told.stage.part, told.stage.words
    if told.step:
        words = f"step {told.step} {told.part}"
        if last.first_step:
            part = FIRST_STEP
    if told.detail:
        words += f", {told.detail}"
    if not alone and last.activity:
        words += f" (rank {last.rank})"
    if last.age_s is not None and last.age_s >= 1:
        words += f", for {age(last.age_s)}"
    return part, words
