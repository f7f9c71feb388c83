"""Local: the ranks are processes on this machine, which submitit starts as child processes of the supervisor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import submitit

from ....params import Device, LaunchParams, RunParams
from .. import rank_count
from ..files.run_record import RunRecord
from ..files.snapshot import Snapshot
from ..local import LOOPBACK, available_cores
from ..ranks.address import loopback_interface, set_interface
from ..ranks.forked_ranks import ForkedRanks, are_forked
from ..ranks.rank import run_rank
from .launcher import Launcher, Place, StartedRanks

VISIBLE_DEVICES = "MMFSDP_CUDA_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES of the person who launched; submitit's local executor hides the GPUs."""


class LocalRanks(StartedRanks):
    """Ranks that submitit has started; they end with the session of the supervisor."""

    def __init__(self, job: submitit.Job[Any]):
        self._job, self.job_id = job, job.job_id

    def done(self) -> bool:
        """Return True if all ranks have ended."""
        return self._job.done()


class Local(Launcher):
    """Processes on this machine."""

    here = True
    place = "this machine"

    def gpus(self, params: RunParams) -> int:
        """Return the GPUs that torch sees here."""
        return 0 if params.train.device is Device.CPU else rank_count.count_gpus()

    def why_no_gpu(self, gpus: int) -> str:
        """Return why the ranks are on the CPU, of what torch and the driver say."""
        return rank_count.why_no_gpu_here(gpus)

    def threads(self, launch: LaunchParams) -> int:
        """Return the threads of a rank: those that were asked for, else the cores shared evenly."""
        return launch.threads or max(1, available_cores() // launch.world_size)

    def check(self, params: RunParams) -> None:
        """Raise ParamError for what this machine cannot do, and for fewer GPUs than ranks where GPUs are wanted."""
        params.fsdp.check_machine()
        rank_count.check_gpus(params)

    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Start the ranks in this process's environment."""
        os.environ.update(
            MASTER_ADDR=LOOPBACK,
            MASTER_PORT=str(port),
            OMP_NUM_THREADS=str(record.threads),
            PYTHONUNBUFFERED="1",
        )
        os.environ.setdefault("SUBMITIT_LOG_LEVEL", "CRITICAL")  # rank logs are for what the ranks print
        if loopback := loopback_interface():
            set_interface(loopback)  # a laptop's network may come and go
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            os.environ[VISIBLE_DEVICES] = os.environ["CUDA_VISIBLE_DEVICES"]
        executor = ForkedRanks(folder) if are_forked(record) else submitit.LocalExecutor(folder / "logs")
        executor.update_parameters(
            nodes=1,
            tasks_per_node=record.ranks,
            timeout_min=record.timeout_min + 10,  # the supervisor is first to stop it
            stderr_to_stdout=True,
        )
        job = executor.submit(run_rank, str(folder))
        job.paths.submitted_pickle.chmod(0o600)
        return LocalRanks(job)

    def place_of_rank(self) -> Place:
        """Return who this process is, as submitit knows it."""
        place: Place = submitit.JobEnvironment()
        return place

    def enter_rank(self, place: Place, record: RunRecord) -> None:
        """Undo what submitit changes; the supervisor has set the rest."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if VISIBLE_DEVICES in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]

    def meet(self, place: Place) -> None:
        """Do nothing: the supervisor has set the address."""

    def where(self, look: Snapshot, record: RunRecord) -> str:
        """Return the machine."""
        return record.host
