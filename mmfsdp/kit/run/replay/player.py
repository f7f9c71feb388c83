"""The player of a recording: writes a run folder at the recorded times, faster if it is told so.

Whoever reads the folder sees what a reader of the recorded run saw: states, heartbeats, metrics, events and logs. A
row of metrics tells in which step its rank then is. All times that are shown are those of the recording. The state of a
replay is what its player has written: nobody asks for processes, and nobody asks Slurm.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..files.folder import Row, heartbeat_path, last_line, metrics_path, open_own, put_heartbeat, touch, write_json
from ..files.reasons import PLAYER_GONE
from ..files.run_record import BEING_CANCELLED, RunRecord, RunState, Status, because, state_of_values, values_of_state
from ..files.snapshot import Snapshot
from ..files.stages import progress_of
from ..pretraining import FILE as BACKBONES_FILE
from .recording import AGAIN, BACKBONES, BEAT, EVENT, LOG, RANK, RESULT, ROW, STATE, Moment, Recording

TICK_S = 0.1
ALIVE_INTERVAL_S = 2.0
"""Seconds between two writings of status.json, by which others know that the player lives."""
PLAYER_LOG = "player.log"
"""The file in logs/ into which the player prints."""
GONE_AFTER_S = 60.0
"""Seconds after which a player that has written nothing is gone: a laptop was closed, or somebody has killed it."""
FULL_BYTES = 1 << 16
CANCELLED = because(Status.CANCELLED, "the replay was cancelled")


def replay_state(look: Snapshot, record: RunRecord) -> RunState:
    """Return the state of a replay, from its folder alone."""
    state = look.status
    if state.done:
        return state
    silence_s = abs(look.time - look.values.get("alive", record.created))
    is_gone = not silence_s <= GONE_AFTER_S  # also if the time is not a number
    if look.cancelled:
        return CANCELLED if is_gone else replace(state, why=BEING_CANCELLED)
    if is_gone:
        words = last_line(look.folder / "logs" / PLAYER_LOG)
        if not words and shutil.disk_usage(look.folder).free < FULL_BYTES:  # then it could not even write why it ended
            words = "the disk is full"
        return because(Status.LOST, "its player has ended" + (f" ({words})" if words else ""), kind=PLAYER_GONE)
    if state.status is Status.STARTING and look.last_row():  # a row is written before the state
        state = replace(state, status=Status.RUNNING)
    return state


class Player:
    """Writes a recording into a run folder, up to a moment of the recorded run."""

    def __init__(self, folder: Path, recording: Recording):
        self.folder, self.recording = folder, recording
        self.state = RunState(Status.QUEUED)
        self._next = 0
        self._beats: dict[int, int] = {}
        """The newest heartbeat or step of each rank that runs, as its number among the moments."""
        self._later_beats = _later_beats(recording.moments)
        self._alive = 0.0

    @property
    def ended(self) -> bool:
        """Return True if all moments are written."""
        return self._next == len(self.recording.moments)

    def play(self, speed: float) -> None:
        """Write all moments, this many times as fast as they were recorded; stop where the file `cancel` is seen."""
        start = time.monotonic()
        while not self.ended:
            if (self.folder / "cancel").exists():
                return self._write_state(CANCELLED)
            self.advance(speed * (time.monotonic() - start))
            time.sleep(TICK_S)

    def advance(self, seconds: float) -> None:
        """Write what the folder held so many seconds after the launch of the recorded run."""
        moments, before = self.recording.moments, self.state
        while not self.ended and moments[self._next].at <= seconds:
            self._next += 1
            self._take(self._next - 1)
        if not self.ended:
            self._write_beats(seconds)
        # The state comes last: what is read after the end is all there is.
        if self.state != before or abs(time.time() - self._alive) > ALIVE_INTERVAL_S:
            self._write_state(self.state)

    def _write_state(self, state: RunState) -> None:
        self._alive = time.time()  # not monotonic: a laptop that wakes up shows at once that the replay goes on
        times = {"finished": self._alive} if state.done else {}
        write_json(self.folder / "status.json", values_of_state(state) | {"alive": self._alive} | times)

    def _take(self, number: int) -> None:
        """Write one moment; of states and heartbeats, keep the newest, which `advance` writes."""
        moment = self.recording.moments[number]
        logs, rank, value = self.folder / "logs", moment.rank, moment.value
        time_of_it = self.recording.created + moment.at
        if moment.kind == STATE:
            self.state = state_of_values(value)
        elif moment.kind == AGAIN:
            self._beats.clear()
            for path in logs.glob("rank*"):  # as before a requeued job starts its ranks
                path.unlink()
        elif moment.kind == BACKBONES:
            write_json(logs / BACKBONES_FILE, value)
        elif moment.kind == RANK:
            if value.get("state") != "running":
                self._beats.pop(rank, None)
            write_json(logs / f"rank{rank}.json", {"rank": rank, "pid": 0, "start": 0.0, "time": time_of_it} | value)
        elif moment.kind == BEAT:
            self._beats[rank] = number
        elif moment.kind == ROW:
            self._beats[rank] = number
            self._append(metrics_path(self.folder, rank), value | {"time": time_of_it})
        elif moment.kind == EVENT:
            self._append(self.folder / "events.jsonl", value | {"time": time_of_it})
        elif moment.kind == LOG:
            with open_own(logs / f"replay_{rank}_log.out", "ab") as file:
                file.write(value.encode("utf-8", "replace") + b"\n")
        elif moment.kind == RESULT:
            write_json(self.folder / "result.json", value)

    def _append(self, path: Path, row: Row) -> None:
        with open_own(path, "ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def _write_beats(self, seconds: float) -> None:
        """Write each rank's heartbeat as old as it was then, whatever the speed."""
        now, moments = time.time(), self.recording.moments
        for rank, number in self._beats.items():
            activity, at = activity_at(moments[number], self._later_beats.get(number), seconds)
            path = heartbeat_path(self.folder, rank)
            touch(path)
            with open_own(path, "r+b") as file:
                put_heartbeat(file, activity, now - (seconds - at))


def _later_beats(moments: Sequence[Moment]) -> dict[int, Moment]:
    """Return the next heartbeat or step of the same rank, by the number of such a moment."""
    later: dict[int, Moment] = {}
    newest: dict[int, int] = {}
    for number, moment in enumerate(moments):
        if moment.kind in (BEAT, ROW):
            if moment.rank in newest:
                later[newest[moment.rank]] = moment
            newest[moment.rank] = number
        elif moment.kind == AGAIN:
            newest.clear()
    return later


def activity_of(moment: Moment) -> str:
    """Return what a rank does from a heartbeat or a finished step on."""
    return moment.value if moment.kind == BEAT else f"step {moment.value.get('step', 0) + 1} compute"


def activity_at(beat: Moment, later: Moment | None, seconds: float) -> tuple[str, float]:
    """Return what a rank does at a time of the recorded run, and since when, by the heartbeats before and after it.

    The recording of a long run leaves steps out. The rank went on meanwhile, so it must not seem to hang.
    """
    activity = activity_of(beat)
    if later is None:
        return activity, beat.at
    first, last = progress_of(activity)[1], progress_of(activity_of(later))[1]
    if not first or last < first + 2 or later.at <= beat.at:
        return activity, beat.at
    step_s = (later.at - beat.at) / (last - first)
    steps = math.floor((seconds - beat.at) / step_s)
    if steps < 1:
        return activity, beat.at
    return f"step {first + steps} compute", beat.at + steps * step_s
