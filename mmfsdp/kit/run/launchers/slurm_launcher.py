"""Slurm: the run is a job of a Slurm cluster, which goes on while the machine that launched it is off.

slurm.py, one folder up, writes and submits the job; slurm_state.py tells its state.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from ....params import Device, LaunchParams, ParamError, RunParams
from ....params.run import with_cluster
from ..files.reasons import NO_ANSWER, NO_SUCH_JOB, NOT_ITS_JOB, Reason
from ..files.run_record import RunRecord, RunState, cancelled_state, rank_status, write_status
from ..files.snapshot import Snapshot
from ..local import signal_rank
from ..slurm import site
from ..slurm.ask_slurm import scancel
from ..slurm.job_gpus import JOB_VARIABLE
from ..slurm.slurm_queue import current_state, expect_jobs, job_error
from ..slurm.slurm_state import ENDED, RESTART_COUNT, job_number, slurm_state
from .in_job import InJob, check_profile
from .launcher import DEFAULT_LIMIT_MIN, StartedRanks

KILL_AFTER_S = 2.0
"""Seconds that the ranks of a cancelled job have before they are killed: submitit ignores the first signal."""

NO_ANSWER_YET = Reason("Slurm was asked, no answer yet; this process goes on asking while it lives", NO_ANSWER)
"""Of a job that is to end."""


class Slurm(InJob):
    """A job of a Slurm cluster."""

    has_supervisor = False
    place = "a Slurm job"
    checks = "the cluster"
    array = "mmfsdp.kit.run.slurm.job_array:submit_array"
    command_lines = "mmfsdp.kit.check.slurm_lines:command_lines"
    rank_lines = "mmfsdp.kit.check.slurm_lines:job_lines"

    # ---- before a run ----

    def gpus(self, params: RunParams) -> int:
        """Return the GPUs that the job asks for."""
        launch = with_cluster(params.launch)
        if launch.ranks is None or params.train.device is Device.CPU:
            return super().gpus(params)
        return launch.nodes * launch.gpus(params.train.device)

    def time_limit(self, launch: LaunchParams) -> int:
        """Return the time limit of the job: the one that is set, else that of SBATCH_TIMELIMIT, else 720 min."""
        if launch.timeout_min is None and (limit := site.minutes(os.environ.get("SBATCH_TIMELIMIT", ""))):
            return limit
        return super().time_limit(launch)

    def with_defaults(self, params: RunParams) -> RunParams:
        """Return the parameters with the cluster that variables choose, the limit of the partition, if it is lower than
        720 min, and CPUs that a node has.

        Each only where nobody says it. What Slurm's nodes have is unknown where sinfo does not answer.
        """
        launch = with_cluster(params.launch)
        changes: dict[str, int | str] = {}
        cluster = site.chosen_cluster(launch)
        if cluster and launch.slurm_cluster is None:
            changes["launch.slurm_cluster"] = cluster
        is_known = launch.ranks is not None and (launch.gpu_count is not None or params.train.device is not Device.AUTO)
        gpus = launch.gpus(params.train.device) if is_known else 0
        no_limit = launch.timeout_min is None and "SBATCH_TIMELIMIT" not in os.environ
        no_cpus = gpus > 0 and launch.cpus_per_task is None
        if not (no_limit or no_cpus):
            return params.change(**changes)  # without a question to Slurm
        partitions = launch.partition or os.environ.get("SBATCH_PARTITION", "")
        kinds = site.kinds_in(partitions, cluster)
        if no_limit:
            limit = min([DEFAULT_LIMIT_MIN, *(kind.limit_min for kind in kinds if kind.limit_min)])
            if limit < DEFAULT_LIMIT_MIN:
                changes["launch.timeout_min"] = limit
        if no_cpus:
            cpus = site.cpus_of_rank(launch, gpus, kinds)
            if cpus is not None and max(cpus, launch.threads or 0) != launch.cpus(gpus):
                changes["launch.cpus_per_task"] = max(cpus, launch.threads or 0)
        return params.change(**changes)

    def check(self, params: RunParams) -> None:
        """Raise ParamError if there is no sbatch here, and for what cannot be written into a batch file."""
        from ..slurm.slurm import check_slurm  # submitit's executor of Slurm, which no look at a run needs

        check_slurm(params)
        check_profile(params.launch)

    def notes(self, params: RunParams) -> list[str]:
        """Return what a person should know of the job."""
        return site.notes(params)

    def dry_run(self, params: RunParams) -> tuple[str, Iterable[str]]:
        """Return what sbatch would receive, and what the job asks for and when Slurm would start it."""
        from ..slurm.slurm import option_names, slurm_executor, text_of

        executor = slurm_executor(params)
        text = text_of(executor)
        return text, site.question_lines(params, text, option_names(executor))

    def requeues(self, launch: LaunchParams) -> bool:
        """Return whether Slurm may requeue the job."""
        return "requeue" in site.sbatch_options(launch, 0)

    # ---- the start ----

    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Raise NotImplementedError: the batch script of the job starts them."""
        raise NotImplementedError("the ranks of a Slurm job are started by its batch script")

    def submit(self, folder: Path) -> None:
        """Submit the job."""
        from ..slurm.slurm import submit

        submit(folder)

    def restarted(self) -> str:
        """Return that Slurm has started the job again."""
        restarts = os.environ.get(RESTART_COUNT, "0")
        return "" if restarts == "0" else f"Slurm has started the job again (restart {restarts})"

    # ---- a run, from any process ----

    def state(self, look: Snapshot, record: RunRecord) -> RunState:
        """Return the state of the job, of its ranks' files and of what Slurm says."""
        return slurm_state(look, record)

    def ask_ahead(self, looks: Sequence[Snapshot], timeout: float) -> None:
        """Ask squeue and sacct once for the jobs of all these runs."""
        expect_jobs(((look.folder.stat().st_uid, look.job) for look in looks if look.job), timeout=timeout)

    def stop(self, folder: Path, look: Callable[[], RunState], end: float) -> str:
        """Cancel by scancel where there is one; else the watchdog of the job finds the file `cancel`.

        Raises ParamError if the job is another run's.
        """
        answers = [NO_ANSWER_YET]
        worker = threading.Thread(target=_end_job, args=(folder, look, answers), daemon=True)
        worker.start()  # scancel and squeue may take long
        worker.join(max(0.0, end - time.monotonic()))
        if answers[-1].kind == NOT_ITS_JOB:
            raise ParamError("run", f"{folder.name} is not cancelled: {answers[-1]}")
        if not worker.is_alive():
            return ""
        if answers[-1].kind == NO_ANSWER:
            return answers[-1].text
        words = answers[-1].text or "its ranks take long to end"
        raise TimeoutError(f"{folder.name} is not cancelled yet: {words}; this process goes on trying while it lives")

    def cannot_signal(self, folder: Path, record: RunRecord) -> str:
        """Return why the job must not be signalled: it is another run's, or has no number yet."""
        job = job_number(folder)
        error = job_error(folder, job) if job else Reason("it names no job")
        return f"{folder}: {error}" if error else ""

    def send_signal(self, folder: Path, record: RunRecord, number: signal.Signals) -> str:
        """Send a signal to all ranks by scancel, from any machine with it."""
        error = scancel(f"--signal={number.name.removeprefix('SIG')}", job=job_number(folder) or "")
        return f"scancel cannot signal the ranks of {folder}: {error}" if error else ""

    def print_stack(self, folder: Path, record: RunRecord, rank: int, number: signal.Signals) -> bool:
        """Send the signal to all ranks of the job that this process is in; without scancel, to a rank on this node."""
        if not scancel(f"--signal={number.name.removeprefix('SIG')}", job=os.environ[JOB_VARIABLE]):
            return True
        status = rank_status(folder, rank)
        if status.get("host") != socket.gethostname():
            return False
        signal_rank(folder, record, status, number, belongs=_is_of_this_job)
        return True


def _is_of_this_job(process: psutil.Process, record: RunRecord, folder: Path) -> bool:
    """Return True if a process says itself that it is of the job of this process.

    What a job inherits of a run's own variables depends on the cluster.
    """
    try:
        return process.environ().get(JOB_VARIABLE) == os.environ.get(JOB_VARIABLE, "none")
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


def _end_job(folder: Path, look: Callable[[], RunState], answers: list[Reason]) -> None:
    """End the Slurm job of a run, for as long as it takes.

    Until the run has ended, each round is in one of three states:

    1. The job has no number yet. The process that submits it sees the file `cancel`; wait.
    2. The number is known, and scancel was not called or failed: call it, and again in the next round if it fails.
    3. scancel has worked. Wait for the end of the job; after KILL_AFTER_S, kill its processes, once.

    answers: receives why Slurm has not ended it, or an empty reason once it has said yes and in which state the job is.
    """
    number, kill_at, error = "", float("inf"), Reason()
    while (folder / "cancel").exists():
        if error or (not number and job_number(folder)):
            number, kill_at = job_number(folder) or "", time.monotonic() + KILL_AFTER_S
            error = job_error(folder, number) or scancel(job=number)
        elif number and time.monotonic() > kill_at:
            error = scancel("--signal=KILL", "--full", job=number)
            kill_at = float("inf")
        known = current_state(number) if number and error.kind != NOT_ITS_JOB else None
        if error and error.kind != NO_ANSWER:
            answers.append(error)
        else:
            answers.append(NO_ANSWER_YET if known is None else Reason())
        if error.kind == NOT_ITS_JOB:
            return
        if number and (known in ENDED or error.kind == NO_SUCH_JOB):
            write_status(folder, cancelled_state(folder, RunRecord.read(folder)), finished=time.time())
        if look().done:
            return
        time.sleep(0.2)
