"""The true state of a run and of each of its ranks, from any process and after any crash; and a list of all runs."""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.steps import best_of
from ...params.findings import UNKNOWN_WORDS
from .error_kinds import error_words
from .files.folder import LOSS_BYTES, LOSS_TITLE, PathLike, Row, best_words, final_loss
from .files.reasons import NEVER_LAUNCHED, NO_RECORD, Reason
from .files.run_record import RunRecord, RunState, Status, because, replay_words
from .files.snapshot import Snapshot, look_at
from .files.stages import progress_of, quiet_s
from .launchers.registry import launcher_of
from .local import file_age

if TYPE_CHECKING:
    from .launchers.launcher import Launcher

WITHOUT_SENSE = "but the model does not know some words of its data"
"""Note on a run that has learned texts with words that its tokenizer does not know: its captions may look right."""
LAUNCH_TIMEOUT_S = 10.0
"""Seconds that a launch may take to write run.json."""

UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors of a folder whose files hold what no run writes."""

SWEEP_FILE = "sweep.json"
"""The file that makes a folder a sweep: a folder of runs."""


def is_run(folder: PathLike) -> bool:
    """Return True if a folder is a run's, also a run that is still being launched."""
    return any(os.path.isfile(Path(folder) / name) for name in ("run.json", "params.yaml"))


def run_state(run: PathLike | Snapshot) -> RunState:
    """Return the state of a run, from its folder, its processes and its Slurm job.

    run: a look at it, or its folder.
    """
    look = look_at(run)
    record = look.record
    if record is None:
        if (state := look.status).done:
            return state
        if look.job:
            return because(Status.LOST, "its run.json is missing", kind=NO_RECORD)
        age = file_age(look.folder)
        if age is not None and age < LAUNCH_TIMEOUT_S:
            return because(Status.QUEUED, "being launched")
        return because(Status.LOST, "it has no complete run.json: its launch was interrupted", kind=NEVER_LAUNCHED)
    state = launcher_of(look.folder, record).state(look, record)
    newest = look.last_row()
    state = replace(
        state,
        step=newest.get("step", 0),
        steps=record.steps,
        not_finite=not_finite(newest),
        replay_of=record.replay_of,
    )
    if state.done and state.status is not Status.COMPLETED:
        return state  # its own reason says more
    if state.done and not state.why:
        state = replace(state, why=Reason(look.stopped))
    if (state.done or state.not_finite) and (words := skipped_steps(look.rows())):
        state = replace(state, notes=(*state.notes, words))
    if state.status is Status.COMPLETED and any(notice.code == UNKNOWN_WORDS for notice in look.notices):
        state = replace(state, notes=(*state.notes, WITHOUT_SENSE))
    return state


def ask_ahead(folders: Iterable[Path], *, timeout: float = 0.0) -> None:
    """Ask the schedulers of runs once for all of them, before each is looked at.

    timeout: seconds to wait for their answers.
    """
    looks: dict[Launcher, list[Snapshot]] = {}
    for look in map(Snapshot, folders):
        with suppress(*UNREADABLE):  # the look at that run says why
            if look.record and not look.status.done:
                looks.setdefault(launcher_of(look.folder, look.record), []).append(look)
    for launcher in looks:
        launcher.ask_ahead(looks[launcher], timeout)


def not_finite(newest: Row) -> bool:
    """Return True if the newest metrics have a loss that is not finite, or are of several skipped steps.

    With a loss scale (fp16), steps whose gradient alone is not finite are no trouble: skipping them finds the scale.
    """
    if not _finite(newest, "loss"):
        return True
    return newest.get("skipped_in_a_row", 0) > 1 and "loss_scale" not in newest


def skipped_steps(rows: Sequence[Row]) -> str:
    """Return such as `7 of 8 steps skipped: loss not finite since step 2`, of the newest metrics; "" if none were."""
    newest = rows[-1] if rows else {}
    step, skipped, in_a_row = (newest.get(key, 0) for key in ("step", "skipped_steps", "skipped_in_a_row"))
    words = f"{skipped} of {step} steps skipped" if skipped else ""
    if not not_finite(newest):
        return words
    newest_rows = rows[-max(1, in_a_row) :]
    bad_losses = sum(not _finite(row, "loss") for row in newest_rows)
    cause = "loss or gradient norm"
    if bad_losses in (0, len(newest_rows)):
        cause = "loss" if bad_losses else "gradient norm"
    when = f"since step {step - in_a_row + 1}" if in_a_row > 1 else f"in step {step}"
    return f"{words}: {cause} not finite {when}" if words else f"{cause} not finite {when}"


def _finite(row: Row, key: str) -> bool:
    return math.isfinite(row.get(key, 0.0))


@dataclass(frozen=True)
class RankProgress:
    """One rank at one moment."""

    rank: int
    status: str = "waiting"
    """waiting, running, quiet, failed, stopped or done."""
    activity: str = ""
    """The last heartbeat of the rank: what it was about to do."""
    step: int | None = None
    age_s: float | None = None
    """Seconds since its last heartbeat."""
    memory_bytes: int | None = None
    """Peak memory after its last step."""
    first_step: bool = True
    """True if the rank has done no step since its process started."""
    tokens_per_s: float | None = None
    """Label tokens of this rank per second, in its last step."""
    mfu: float | None = None
    """Share of its card's peak that its last step reached, by the FLOPs that it needed."""
    reserved_bytes: int | None = None
    """The most bytes that the allocator of its GPU has reserved."""
    gpu_use: float | None = None
    """Share of time in which its GPU ran a kernel, of the newest sample; then watts, and degrees Celsius."""
    power_w: float | None = None
    temperature_c: float | None = None
    error: str = ""
    traceback: str = ""


def read_ranks(run: PathLike | Snapshot, ranks: int, state: RunState) -> list[RankProgress]:
    """Return every rank of a run as it is now; `state` is the state of the run."""
    look = look_at(run)
    silence_s = look.record.hang_timeout_s if look.record else RunRecord.hang_timeout_s
    return [_rank_progress(look, rank, state, silence_s) for rank in range(ranks)]


def _rank_progress(look: Snapshot, rank: int, state: RunState, silence_s: float) -> RankProgress:
    status, row = look.report(rank), look.last_row(rank)
    activity, at = look.beat(rank) or ("", None)
    age_s = None if state.done or at is None else max(0.0, look.time - at)
    first_step = not row or row.get("time", math.inf) <= status.get("time", 0.0)
    error, traceback = "", ""
    if status.get("state") == "failed":
        error, traceback = status.get("error", ""), status.get("traceback", "")
    elif state.rank == rank:
        error, traceback = state.reason, state.traceback
    if status.get("state") in ("failed", "done"):
        word = status["state"]
    elif state.rank == rank and state.status is Status.FAILED:
        word = "failed"
    elif state.done:
        word = "done" if state.status is Status.COMPLETED else "stopped"
    elif age_s is None or state.status not in (Status.STARTING, Status.RUNNING):
        word = "waiting"  # also one that will be started again: what it has reported is of its earlier life
    else:
        word = "quiet" if age_s > quiet_s(activity, silence_s, None if first_step else row.get("step_s")) else "running"
    return RankProgress(
        rank,
        status=word,
        activity=activity,
        step=progress_of(activity)[1] or row.get("step"),
        age_s=age_s,
        first_step=first_step,
        memory_bytes=row.get("memory_bytes"),
        tokens_per_s=row.get("rank_tokens_per_s"),
        mfu=row.get("mfu"),
        reserved_bytes=row.get("reserved_bytes"),
        gpu_use=row.get("gpu_use"),
        power_w=row.get("power_w"),
        temperature_c=row.get("temperature_c"),
        error=error,
        traceback=traceback,
    )


def find_runs(folder: PathLike) -> dict[str, Path]:
    """Return the runs in a folder and in its sweeps by name, a run of a sweep as SWEEP/NAME."""
    paths = {}
    for path in _subfolders(Path(folder)):
        if is_run(path):
            paths[path.name] = path
        elif (path / SWEEP_FILE).is_file():
            for member in _subfolders(path):
                if is_run(member):
                    paths[f"{path.name}/{member.name}"] = member
    return paths


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that this user may read; not hidden ones, as one that is being made."""
    paths = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]


@dataclass(frozen=True)
class ListedRun:
    """A run in a list of runs."""

    name: str
    """The name of the run's folder; SWEEP/NAME for a run of a sweep."""
    path: str
    status: str = ""
    """QUEUED, PREPARING, STARTING, RUNNING, SUSPENDED, COMPLETED, FAILED, CANCELLED or LOST; empty if unreadable."""
    succeeded: bool = False
    """True if the run completed, and its loss stayed finite."""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    """Mean loss of the last tenth of the steps; None without any."""
    created: float = 0.0
    """Unix seconds; 0 if nobody knows."""
    where: str = ""
    """The host of the run, or its Slurm job."""
    reason: str = ""
    """The reason of its state, in words."""
    best: str = ""
    """The best score in words, if the run keeps it."""

    def cells(self) -> tuple[str, ...]:
        """Return what the table of runs shows: name, state, step of steps, loss, age, where."""
        if not self.status:
            return self.name, "", "", "", "", ""
        loss = "" if self.loss is None else f"{self.loss:.4g}"
        old = age(time.time() - self.created) if self.created else ""
        return self.name, self.status, f"{self.step}/{self.steps}", loss, old, self.where

    def notes(self) -> str:
        """Return what stands below it in the table: the reason of its state, and the best score."""
        return _printable("; ".join(filter(None, (self.reason, f"best: {self.best}" if self.best else ""))))


def list_runs(paths: Mapping[str, Path]) -> list[ListedRun]:
    """Return what a list of runs says of each, oldest first. paths: by name, as `find_runs` gives them."""
    ask_ahead(paths.values())
    runs = []
    for name, path in paths.items():
        try:
            runs.append(_listed(name, path))
        except UNREADABLE as error:
            runs.append(ListedRun(name, str(path), reason=f"cannot be read: {error_words(error)}"))
    return sorted(runs, key=lambda run: (run.created, run.name))


def _listed(name: str, path: Path) -> ListedRun:
    look = Snapshot(path, last_bytes=LOSS_BYTES)
    state, record = run_state(look), look.record
    created, where, about = 0.0, "", ""
    if record is not None:
        created, launcher = record.created, launcher_of(path, record)
        where = launcher.where(look, record)
        about = "" if launcher.has_ranks else replay_words(record.replay_of)
    return ListedRun(
        name,
        str(path),
        status=str(state.status),
        succeeded=state.ok,
        step=state.step,
        steps=state.steps,
        loss=final_loss(look.rows()),
        created=created,
        where=where,
        reason="; ".join(filter(None, (about, state.reason))),
        best=best_words(best_of(path / "checkpoints")),
    )


def runs_table(paths: Mapping[str, Path]) -> str:
    """Return a list of runs as text: name, state, step of steps, loss, age, where; the reason and best score below."""
    runs = list_runs(paths)
    head = ("name", "state", "step", LOSS_TITLE, "age", "where")
    title, *rows = text_table([head] + [run.cells() for run in runs]).splitlines()
    shown = [title]
    for row, run in zip(rows, runs, strict=True):
        shown.append(row)
        shown += textwrap.wrap(run.notes(), 80, initial_indent="  ", subsequent_indent="  ", max_lines=2)
    return "\n".join(shown)


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell, two spaces apart; control characters become spaces."""
    printable_lines = []
    for line in lines:
        printable_lines.append([_printable(cell) for cell in line])
    widths = [max(map(len, column)) for column in zip(*printable_lines, strict=True)]
    rows = []
    for line in printable_lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def _printable(text: str) -> str:
    """Return a text with control characters replaced by spaces: a terminal would obey them."""
    return "".join(c if c.isprintable() else " " for c in text)


def age(seconds: float) -> str:
    """Return a time in its largest whole unit, such as `3 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
