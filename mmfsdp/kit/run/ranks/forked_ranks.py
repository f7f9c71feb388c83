"""The ranks of a local run as forks of one process that has imported what they run.

submitit hands over the call and the environment, as it does for ranks of its own. Not on a machine with a GPU's driver
unless the run is on the CPU: what a library asks of the driver before a fork, CUDA refuses after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from submitit import LocalExecutor
from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.local.local import LocalJob

from ....params import Device, RunParams
from ....params.own import own_fields
from ..files.folder import open_own
from ..files.run_record import ENTRIES, SITE_CHECK, RunRecord
from ..rank_count import is_on_cpu
from .fork import Fork, fork, may_fork, set_output, without_threads
from .hang import Heartbeat
from .rank_imports import rank_imports

POLL_S = 0.02
CALL_TIMEOUT_S = 60.0
"""Seconds that submitit may take to write the call, which it does after it has started whoever reads it."""


def are_forked(record: RunRecord) -> bool:
    """Return True if the ranks of this local run are forks: on Linux, where they use no GPU."""
    return sys.platform == "linux" and is_on_cpu(Device(record.device))


class ForkedRanks(LocalExecutor):
    """submitit's executor of local processes, which starts a process that forks the tasks."""

    def __init__(self, run_folder: Path):
        super().__init__(run_folder / "logs")
        self.run_folder = run_folder

    def _submit_command(self, command: str) -> LocalJob[Any]:
        number = self._num_tasks()
        os.environ.update(
            SUBMITIT_EXECUTOR="local",
            SUBMITIT_LOCAL_NTASKS=str(number),
            SUBMITIT_LOCAL_JOB_NUM_NODES="1",
            SUBMITIT_LOCAL_NODEID="0",
        )
        process: Any
        if is_warm() and may_fork():
            process = fork(lambda: fork_ranks(self.run_folder))
        else:
            process = subprocess.Popen([sys.executable, "-u", "-m", "mmfsdp.kit.run", str(self.run_folder), "ranks"])
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=list(range(number)))


def is_warm() -> bool:
    """Return True if this process has imported torch already, so that its forks need not."""
    return "torch" in sys.modules


def fork_ranks(folder: Path) -> None:
    """Import what the ranks of a run call, start one fork for each, and wait for all."""
    record = RunRecord.read(folder)
    assert record, f"{folder} has no run.json"
    for rank in range(record.ranks):
        Heartbeat(folder, rank)("importing")
    # What cannot be imported each rank meets again, and reports.
    with suppress(Exception), without_threads():
        import_entry(folder, record)
    wait_for_call(folder / "logs")
    start = start_fork if may_fork() else start_python
    ranks = [start(folder / "logs", rank) for rank in range(record.ranks)]
    while any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)


def import_entry(folder: Path, record: RunRecord) -> None:
    """Import what this package's own entries call. A person's code may start threads: each rank imports it."""
    if record.entry not in ENTRIES:
        return
    module, _, name = ENTRIES[record.entry].partition(":")
    if record.entry == SITE_CHECK:
        getattr(import_module(module), name)
    else:
        params = RunParams.from_yaml(folder / "params.yaml")
        with rank_imports(params):
            getattr(import_module(module), name)
            if not own_fields(params):
                import_model(params)


def import_model(params: RunParams) -> None:
    """Import what the model of a run consists of, by building it on the meta device: libraries import that late."""
    import torch

    from ...models.build import build_model

    with torch.random.fork_rng(devices=[]):
        build_model(params.model, meta=True)


def wait_for_call(logs: Path) -> None:
    """Wait until submitit has written the call; a rank that finds none would wait for a second."""
    call, end = JobPaths(logs, str(os.getpid()), 0).submitted_pickle, time.monotonic() + CALL_TIMEOUT_S
    while not call.exists() and time.monotonic() < end:
        time.sleep(POLL_S)


def start_fork(logs: Path, rank: int) -> Fork:
    """Fork one rank, in the environment and with the log that submitit gives a task."""
    variables = variables_of(rank)

    def work() -> None:
        os.environ.update(variables)
        set_output(log.fileno())
        set_threads()
        process_job(logs)

    with open_own(JobPaths(logs, str(os.getpid()), rank).stdout, "ab") as log:
        return fork(work)


def start_python(logs: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank as a Python of its own: what was imported has started a thread, which a fork would lack."""
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(logs)]
    with open_own(JobPaths(logs, str(os.getpid()), rank).stdout, "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables_of(rank))


def variables_of(rank: int) -> dict[str, str]:
    """Return what tells a task which one it is (submitit/local/local.py: LocalJobEnvironment)."""
    return {
        "SUBMITIT_LOCAL_JOB_ID": str(os.getpid()),
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }


def set_threads() -> None:
    """Let torch compute with OMP_NUM_THREADS, which it has read already where it was imported before the fork."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
