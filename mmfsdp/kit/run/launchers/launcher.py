"""Launcher: a way to start the ranks of runs, and what the rest of the package asks of it.

By default a *supervisor*, a process on the machine that launches, asks the launcher to start the ranks, watches them by
the files of the run folder, names the rank that hangs, and ends them. A scheduler of somebody else's then needs `start`
alone. A launcher without a supervisor (`has_supervisor`), as of Slurm, hands the run to a scheduler that keeps it while
the machine that launches is off, and says itself in which state it is.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ....params import Device, LaunchParams, ParamError, RunParams
from ....params.own import path_of
from ....params.run import with_cluster
from ..files.reasons import Reason
from ..files.run_record import RunRecord, RunState, rank_status, rank_statuses
from ..files.snapshot import Snapshot
from ..local import (
    FOLDER_VARIABLE,
    LOOPBACK,
    RUN_VARIABLE,
    available_cores,
    is_here,
    is_supervised,
    processes_of,
    signal_rank,
    stop_processes,
)
from ..local_state import local_state
from ..ranks.address import check_answers, set_address

RANKS_WITHOUT_GPUS = 2
"""Ranks where there is no GPU and nobody says how many: the fewest that shard."""
DEFAULT_LIMIT_MIN = 720
"""The time limit of a run where nobody says one, and its scheduler allows as much."""


class Place(Protocol):
    """Say who a rank is among all ranks of its run; submitit's JobEnvironment does."""

    @property
    def global_rank(self) -> int:
        """Return the number of the rank."""

    @property
    def local_rank(self) -> int:
        """Return its number among the ranks of its node."""

    @property
    def num_tasks(self) -> int:
        """Return the number of ranks."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes that they are on, evenly."""

    @property
    def hostnames(self) -> Sequence[str]:
        """Return the names of the nodes, the one of rank 0 first."""


@dataclass(frozen=True)
class RankPlace:
    """A rank that knows who it is from the environment variables of torch.distributed."""

    global_rank: int
    local_rank: int
    num_tasks: int
    num_nodes: int
    hostnames: Sequence[str]

    @classmethod
    def from_environment(cls) -> RankPlace:
        """Return the place that RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE say, as torchrun sets them."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, ranks, local_ranks = (int(os.environ[name]) for name in names)
        hosts = [os.environ.get("MASTER_ADDR") or socket.gethostname()]
        return cls(rank, local_rank, ranks, ranks // local_ranks, hosts)


class StartedRanks(ABC):
    """The ranks that a launcher has started, as their supervisor has them in hand."""

    job_id: str
    """The name that the scheduler has for them."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if all ranks have ended."""

    def end(self) -> None:  # noqa: B027 (those here end with the supervisor)
        """End the ranks that the supervisor does not reach, on all machines. Called also where all have ended."""

    def ended_place(self) -> Reason:
        """Return that what the ranks are in has ended, such as the job that they are a step of; else an empty reason.

        Called where ranks have ended: they cannot be started again there.
        """
        return Reason()

    def waits_for(self) -> str:
        """Return for what the ranks wait before they start, such as a place in a queue; "" once they have started."""
        return ""


class Launcher(ABC):
    """A way to start the ranks of runs. Holds nothing of one run: each method is told which."""

    here: ClassVar[bool] = False
    """All ranks are child processes of the supervisor."""
    has_ranks: ClassVar[bool] = True
    """False for what only plays the recording of a run."""
    has_supervisor: ClassVar[bool] = True
    """A process on the machine that launches watches the ranks. Else `submit` is called, and rank 0 has a watchdog."""
    place: ClassVar[str] = "a scheduler of your own"
    """The place of the ranks, in words."""
    checks: ClassVar[str] = "this machine"
    """The place that `mmfsdp check` looks at, in words."""
    fields: ClassVar[tuple[str, ...]] = ()
    """The launch fields of params.launching.SLURM_FIELDS that it uses; of those in the registry, FIELDS_OF tells."""
    array: ClassVar[str] = ""
    """Import path of what submits all members of a sweep as one; empty where each member is launched by itself."""
    command_lines: ClassVar[str] = ""
    """Import path of what `mmfsdp check` looks at before it starts ranks; empty for nothing."""
    rank_lines: ClassVar[str] = ""
    """Import path of what `mmfsdp check` says of the ranks, in place of what it says of those of a supervisor."""

    # ---- before a run: nothing is started ----

    def gpus(self, params: RunParams) -> int:
        """Return how many GPUs all nodes have for the ranks, as far as the parameters say."""
        launch = with_cluster(params.launch)
        return 0 if params.train.device is Device.CPU else launch.nodes * (launch.gpu_count or 0)

    def ranks(self, params: RunParams) -> int:
        """Return the number of ranks where launch.ranks is unset: one for each GPU, else 2, or one for each node."""
        return self.gpus(params) or max(RANKS_WITHOUT_GPUS, with_cluster(params.launch).nodes)

    def why_no_gpu(self, gpus: int) -> str:
        """Return why the ranks are on the CPU though GPUs are allowed. gpus: as many as there are."""
        return "the job asks for no GPU"

    def threads(self, launch: LaunchParams) -> int:
        """Return the CPU threads of a rank; 0 where each rank finds out on its node."""
        return launch.threads or 0

    def time_limit(self, launch: LaunchParams) -> int:
        """Return the time limit of a run in minutes."""
        return launch.timeout_min or DEFAULT_LIMIT_MIN

    def with_defaults(self, params: RunParams) -> RunParams:
        """Return the parameters with what the scheduler or its nodes decide where nobody says it."""
        return params

    def check(self, params: RunParams) -> None:  # noqa: B027 (there may be nothing to check)
        """Raise ParamError for what cannot be started: called before anything is."""

    def notes(self, params: RunParams) -> list[str]:
        """Return what a person should know before the ranks are started, a sentence each."""
        return []

    def dry_run(self, params: RunParams) -> tuple[str, Iterable[str]]:
        """Return the text that a scheduler would receive, and lines on it. Raises ParamError where there is none."""
        raise ParamError("launch.executor", f"{path_of(params.launch.executor)} submits no job; set it to slurm")

    def requeues(self, launch: LaunchParams) -> bool:
        """Return True if the scheduler starts preempted ranks again, which `mmfsdp check` then tries."""
        return False

    # ---- the start ----

    @abstractmethod
    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Start the ranks of a run, and return them. Called by the supervisor, once more after each preemption.

        Each rank calls `rank_command(folder)`, or by submitit `run_rank`. port: a free one of this machine, at which
        ranks that are all here may meet. An exception ends the run with its text.
        """

    def submit(self, folder: Path) -> None:
        """Hand a run to the scheduler that keeps it. Called in place of a supervisor."""
        raise NotImplementedError(f"{type(self).__name__} has a supervisor")

    def failure(self, look: Snapshot, ranks: StartedRanks, log: str) -> RunState | None:
        """Return the state of ranks of which one has failed, where the launcher knows more than their reports.

        log: what the supervisor and its child processes have printed.
        """
        return None

    # ---- in each rank ----

    def place_of_rank(self) -> Place:
        """Return who this process is."""
        return RankPlace.from_environment()

    def enter_rank(self, place: Place, record: RunRecord) -> None:
        """Set the environment of this rank, before torch is imported; RANK and its like are set."""
        cpus = available_cores() // max(1, place.num_tasks // place.num_nodes)
        os.environ["OMP_NUM_THREADS"] = str(record.threads or max(1, cpus))
        os.environ[RUN_VARIABLE] = record.identity

    def meet(self, place: Place) -> None:
        """Set the address at which the ranks meet, the first node, and try it.

        Raises OSError if it cannot be reached from here.
        """
        host = set_address(place.hostnames)
        if place.global_rank > 0 and host != LOOPBACK:
            check_answers(host, int(os.environ["MASTER_PORT"]))

    def allocated_gpus(self) -> int:
        """Return the GPUs of this node that the scheduler has given to the job of this process."""
        return 0

    def restarted(self) -> str:
        """Return that the scheduler itself has started the ranks again, in words; "" the first time."""
        return ""

    # ---- a run, from any process ----

    def state(self, look: Snapshot, record: RunRecord) -> RunState:
        """Return the state of a run, of a look at it."""
        return local_state(look, record)

    def ask_ahead(self, looks: Sequence[Snapshot], timeout: float) -> None:  # noqa: B027 (files need no question)
        """Ask the scheduler once for all these runs, and wait for its answer at most `timeout` seconds."""

    def where(self, look: Snapshot, record: RunRecord) -> str:
        """Return where a run is, for a table of runs."""
        return f"{record.executor} {look.values.get('job', '')}"

    def stop(self, folder: Path, look: Callable[[], RunState], end: float) -> str:
        """Wait until a run has ended whose folder has the file `cancel`, which its supervisor sees.

        Return "", or what its end still waits for if the scheduler was asked and has not answered yet.

        look: returns the state of the run now. end: the time of `time.monotonic` at which TimeoutError is raised.
        """
        while True:
            record = RunRecord.read(folder)  # None while the run is being launched
            state = look()
            if state.done and not (record and is_here(record) and processes_of(record, folder)):
                return ""
            if time.monotonic() > end:
                raise TimeoutError(f"{folder.name} is still running after its cancel: {state}")
            if record and is_here(record) and (not is_supervised(record) or time.monotonic() > end - 5):
                stop_processes(record, folder)  # there is no supervisor to do it
            time.sleep(0.05)

    def cannot_signal(self, folder: Path, record: RunRecord) -> str:
        """Return why this process cannot send a signal to the ranks of a run; "" if it can."""
        return "" if is_here(record) else f"{folder} runs on {record.host}; start the drill there"

    def send_signal(self, folder: Path, record: RunRecord, number: signal.Signals) -> str:
        """Send a signal to all ranks of a run that are running. Return why that failed; "" if it has not."""
        for status in rank_statuses(folder, record):
            signal_rank(folder, record, status, number)
        return ""

    def print_stack(self, folder: Path, record: RunRecord, rank: int, number: signal.Signals) -> bool:
        """Send the signal to a rank by which it writes its stack into a file. Called by whoever watches the ranks.

        Return False if it cannot be reached. Others may write theirs, too.
        """
        status = rank_status(folder, rank)
        if status.get("host") != socket.gethostname():
            return False
        signal_rank(folder, record, status, number)
        return True


def rank_command(folder: Path) -> list[str]:
    """Return the command that is a rank of a run, for a launcher without submitit.

    It is to be called in the environment of `rank_environment` with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, as torchrun sets them. What it prints goes into a log in the run folder.
    """
    return [sys.executable, "-u", "-m", "mmfsdp.kit.run", str(folder), "rank"]


def rank_environment(folder: Path, record: RunRecord) -> dict[str, str]:
    """Return the variables by which others know that a process is of this run. A rank must be started with them."""
    return {RUN_VARIABLE: record.identity, FOLDER_VARIABLE: str(folder)}
