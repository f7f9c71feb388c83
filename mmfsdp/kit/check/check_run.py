"""CheckRun: the ranks of a check, started as those of a run are, watched to their end, and what they have found."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mmfsdp

from ...params import RunParams
from ...params.run import with_cluster
from ..run.files.folder import make_inner_folder, touch, write_json
from ..run.files.reasons import BATCH_SCRIPT, NO_PYTHON
from ..run.files.run_record import SITE_CHECK, RunState
from ..run.handle import Run
from ..run.launchers.registry import launcher_for, launcher_named
from ..run.rank_count import count_gpus
from ..run.slurm.site import settled, time_limit, with_defaults
from ..run.start import start
from ..verify.lines import OK, WRONG, Line
from .judge import Asked, Ranks, missing_ranks, nodes_of, rank_lines, where
from .rank_facts import DONE, FACTS, REQUEUE, RESTARTED, TOKEN, read_facts
from .this_machine import version_of

TIME_LIMIT_MIN = 5
"""Time limit of the job: a minute's work, and slow imports. A short job also starts sooner."""
SILENCE_S = 300.0
"""Seconds in which a rank may say nothing: it ends by limits of its own."""
POLL_S = 0.2
LOCAL_WAIT_S = 240.0
IF_SILENT = "if their nodes do not see launch.folder, put it on a file system that all nodes share; else read the log"
"""The fix where ranks have written nothing."""

Tell = Callable[[str], object]
"""Called with what takes the next seconds."""


class CheckRun:
    """The ranks of a check in a run folder of their own."""

    def __init__(self, params: RunParams, is_stopped: Callable[[], bool]):
        """is_stopped: asked whether to end, while the ranks are waited for. Raises ParamError as a launch does."""
        self.is_stopped = is_stopped
        name = f"check-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        # A person may have asked for less, which a partition for tests may require.
        limit = min(TIME_LIMIT_MIN, time_limit(with_cluster(with_defaults(params).launch)))
        changes: dict[str, Any] = {"launch.name": name, "launch.timeout_min": limit, "train.trackers": ()}
        changes |= {"launch.replace": False, "launch.silence_s": SILENCE_S}
        self.launcher = launcher_named(params.launch.executor)
        if self.launcher.here:
            changes["launch.ranks"] = max(2, count_gpus())
        self.params = settled(params.change(**changes))
        self.token = secrets.token_hex(8)
        self.run: Run | None = None
        versions = {"torch": version_of("torch"), "transformers": version_of("transformers")}
        versions["mmfsdp"] = mmfsdp.__version__
        self.asked = Asked(self.params, self.params.launch.world_size, self.token, versions)

    @property
    def place(self) -> str:
        """Return where the ranks are, in words."""
        launch = self.params.launch
        if self.launcher.here:
            return f"{self.asked.ranks} ranks on {self.launcher.place}"
        ranks = f"{self.asked.ranks} ranks" if self.asked.ranks > 1 else "1 rank"
        nodes = f"{launch.nodes} nodes" if launch.nodes > 1 else "1 node"
        return f"{ranks} on {nodes}, {self.launcher.place}"

    def check(self) -> None:
        """Raise ParamError for parameters that no job can be submitted with, or where there is no job for a step."""
        if not self.launcher.here:  # ranks here say themselves what is wrong
            launcher_for(self.params).check(self.params)

    def start(self) -> None:
        """Start the ranks, and return. Raises ParamError if the run folder cannot be made."""
        self.asks_requeue = self.launcher.requeues(with_cluster(self.params.launch))
        # To leave nothing behind: see `remove`.
        self.made_parent = not Path(self.params.launch.folder).expanduser().exists()
        self.run = Run(start(self.params, SITE_CHECK, pretrain=False))
        make_inner_folder(self.run.path / FACTS)
        write_json(self.run.path / FACTS / TOKEN, {"token": self.token})
        if self.asks_requeue:
            touch(self.run.path / FACTS / REQUEUE)

    @property
    def is_restarted(self) -> bool:
        """Return True if Slurm has started the job once more."""
        return self.run is not None and (self.run.path / FACTS / RESTARTED).exists()

    def facts(self) -> Ranks:
        """Return what the ranks have written down so far."""
        assert self.run is not None
        found = {}
        for rank in range(self.asked.ranks):
            facts = read_facts(self.run.path, rank)
            if facts is not None:
                found[rank] = facts
        return found

    def wait(self, tell: Tell, limit_s: float, *, until: Callable[[RunState], bool] = lambda _: False) -> RunState:
        """Wait until the ranks have ended, until a condition, or for `limit_s` seconds; return the state then.

        tell: gets each new state in words. Raises KeyboardInterrupt if the check is stopped.
        """
        assert self.run is not None
        end, words = time.monotonic() + limit_s, ""
        while True:
            state = self.run.state()
            if state.done or until(state) or time.monotonic() > end:
                return state
            if self.is_stopped():
                raise KeyboardInterrupt
            if state.reason and state.reason != words:
                words = state.reason
                tell(words)
            time.sleep(POLL_S)

    def lines(self, state: RunState) -> Iterator[Line]:
        """Yield what became of the ranks, and what they have found. state: after the wait."""
        ranks = self.facts()
        yield self._ranks_line(state, ranks)
        if ranks:
            yield from rank_lines(self.asked, ranks)

    def _ranks_line(self, state: RunState, ranks: Ranks) -> Line:
        """Return whether all ranks have started and ended."""
        missing = missing_ranks(self.asked, ranks)
        nodes = ", ".join(f"{name}: {len(members)}" for name, members in nodes_of(ranks).items())
        if not missing and all(of.get("doing") == DONE for of in ranks.values()):
            return Line(OK, "ranks", f"{self.asked.ranks} have started and ended ({nodes})")
        cause, fix = state.why.text, state.why.what_to_do
        if state.why.kind == BATCH_SCRIPT:
            return Line(WRONG, "batch script", cause, fix)
        if not state.done:
            cause = f"they have not ended in time ({state.reason or state.status})"
            fix = "run the check again; if it fails again, read the logs of the ranks"
        # Facts are written part by part, so the part at which a rank stopped is known.
        busy = [rank for rank, of in ranks.items() if of.get("doing") not in ("", DONE)]
        if busy and not missing:
            cause = f"{where(ranks, busy[0])} did not get past its check of {ranks[busy[0]]['doing']}: {cause}"
        if missing:
            cause = f"no report from rank {', '.join(map(str, missing))}: {cause}"
            if state.why.kind != NO_PYTHON:
                fix = IF_SILENT
        return Line(WRONG, "ranks", cause, fix)

    def remove(self) -> None:
        """Delete the run folder, and the folder of runs if the check has made it."""
        assert self.run is not None
        shutil.rmtree(self.run.path, ignore_errors=True)
        if self.made_parent:
            with suppress(OSError):  # there are runs in it meanwhile
                self.run.path.parent.rmdir()
