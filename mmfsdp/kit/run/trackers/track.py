"""Hand the metrics of runs to trackers (TensorBoard, Weights & Biases) while they are written.

A process beside the run reads its folder as `watch` does: no line stands in the training loop, and a compute node needs
no network. A tracker is a class in a file of its own and a line in `params.TrackerKind`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ....params import ParamError, RunParams, TrackerKind
from ..files.folder import (
    MAX_FILE_BYTES,
    GrowingFile,
    PathLike,
    Types,
    check_links,
    metrics_path,
    of_types,
    parse_rows,
    read_events,
    read_json,
    read_params_yaml,
    read_result,
    write_json,
)
from ..files.run_record import RunState
from ..launchers.registry import check_no_replay
from ..state import SWEEP_FILE, is_run, run_state

POLL_S = 2.0
NOT_METRICS = ("step", "time")
"""Columns of a row that say which step it is."""
KEPT_TYPES: Types = {"state": dict, "sent": int, "inode": int, "resumes": int, "result": dict}
State = dict[str, Any]
"""Values that a tracker keeps of a run between two processes that track it, as JSON."""


class Tracker(ABC):
    """Takes the metrics of one run."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Take the metrics of a step; at: unix seconds."""

    def go_back(self, step: int) -> None:  # noqa: B027 (not all can)
        """Forget what was logged after a step: the run does the steps after it again."""

    def close(self) -> None:  # noqa: B027
        """Write what is left."""


OpenTracker = Callable[[Path, RunParams, State], Tracker]
"""(run folder, parameters, state) -> the tracker. It may change the state, which is kept: {} at first."""


class Tracked:
    """A run and one tracker: which rows it has, and what it must take again after a resume."""

    def __init__(self, folder: Path, kind: TrackerKind) -> None:
        self.folder, self.path = folder, folder / f"tracked-{kind}.json"
        kept = of_types(read_json(self.path) or {}, KEPT_TYPES)
        self.state: State = kept.get("state", {})
        self.sent, self.inode, self.resumes = (kept.get(key, 0) for key in ("sent", "inode", "resumes"))
        self.result = kept.get("result", {})
        params = RunParams.from_dict(read_params_yaml(folder))
        open_tracker: OpenTracker = kind.load()
        self.tracker = open_tracker(folder, params, self.state)
        self._file, self._partial = GrowingFile(metrics_path(folder)), b""

    def poll(self) -> None:
        """Hand over the rows that were written since the last call."""
        data = self._file.read(MAX_FILE_BYTES)
        if self._file.restarted:
            self._partial = b""  # of the file before
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._file.inode and self._file.inode != self.inode:  # the resumed run has cut its file
            resumed = [event["step"] for event in read_events(self.folder) if event["kind"] == "resumed"]
            first = min([self.sent, *resumed[self.resumes :]])
            if first < self.sent:
                self.sent = first
                self.tracker.go_back(first)
            self.inode, self.resumes = self._file.inode, len(resumed)
            self.keep()
        sent = self.sent
        for row in parse_rows(b"\n".join(lines)):
            step = row.get("step")
            if isinstance(step, int) and step > self.sent:
                at = row.get("time")
                self.tracker.log(step, numbers(row), at if isinstance(at, (int, float)) else time.time())
                self.sent = step
        if self.sent != sent:
            self.keep()

    def keep(self) -> None:
        """Write what the next process must know."""
        values = {"state": self.state, "sent": self.sent, "inode": self.inode, "resumes": self.resumes}
        write_json(self.path, values | {"result": self.result})

    def close(self) -> None:
        """Hand over what stands in result.json, and close the tracker."""
        result = {f"result/{name}": value for name, value in numbers(read_result(self.folder)).items()}
        if result != self.result:
            self.tracker.log(self.sent, result, time.time())
            self.result = result
        self.tracker.close()
        self.keep()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns of a row that hold numbers, also those that are not finite, and own scores."""
    values = {}
    scores = row.get("scores")
    own = {f"scores/{name}": value for name, value in scores.items()} if isinstance(scores, dict) else {}
    for name, value in (dict(row) | own).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NOT_METRICS:
            values[name] = float(value)
    return values


def check_trackers(kinds: Iterable[TrackerKind]) -> None:
    """Raise ParamError for a tracker whose package is not installed here."""
    for kind in kinds:
        if find_spec(kind.package) is None:
            words = f"{kind} needs the package {kind.package}, which is not installed; pip install 'mmfsdp[{kind}]'"
            raise ParamError("train.trackers", words)


def runs_in(folder: PathLike) -> list[Path]:
    """Return the run of a folder, or the members of a sweep that have begun. Raises ParamError if it is neither."""
    folder = Path(folder)
    if is_run(folder):
        return [folder]
    if not (folder / SWEEP_FILE).exists():
        raise ParamError("run", f"{str(folder)!r} is neither a run nor a sweep")
    return sorted(path for path in folder.glob("*/") if is_run(path))


def track(folder: PathLike, kinds: Sequence[TrackerKind]) -> None:
    """Hand the metrics of a run, or of all runs of a sweep, to trackers until they are done.

    What a tracker has it does not get again: a run that is resumed goes on as the same tracked run. Raises ParamError
    where a package is missing, where another process tracks the run, for a replay, and for a link out of the folder.
    """
    check_trackers(kinds)
    folder = Path(folder).absolute()
    check_no_replay(folder, "tracked")
    check_links(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(folder / "tracked.lock", timeout=0))
        except Timeout:
            raise ParamError("run", f"{folder} is tracked by another process already") from None
        tracked: dict[Path, list[Tracked]] = {}
        while True:
            runs = runs_in(folder)
            states = {run: run_state(run) for run in runs}  # before the rows are read: those of a finished run are all
            for run in runs:
                if run not in tracked:
                    tracked[run] = [Tracked(run, kind) for kind in kinds]
                    for each in tracked[run]:
                        stack.callback(each.close)
                for each in tracked[run]:
                    each.poll()
            if _all_done(folder, states):
                return
            time.sleep(POLL_S)


def _all_done(folder: Path, states: Mapping[Path, RunState]) -> bool:
    """Return True if a run is done, or all members of a sweep are; of a cancelled one, those that have begun."""
    members = (read_json(folder / SWEEP_FILE) or {}).get("members", [None])
    all_begun = len(states) >= len(members) or (folder / "cancel").exists()
    return all_begun and all(state.done for state in states.values())
