"""Srun: the ranks are a step of the Slurm job that this process is in: `launch.executor: srun`.

A notebook on a hub often runs in a job already, on nodes that may not submit another. The supervisor starts the ranks
there with one srun, which shares the job's CPUs, memory and GPUs with what runs in it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import DelayedSubmission

from ....params import Device, LaunchParams, ParamError, RunParams
from ....params.run import with_cluster
from ....params.shell_words import expanded
from ..files.reasons import ALLOCATION_ENDED, Reason
from ..files.run_record import RunRecord, RunState, Status
from ..files.snapshot import Snapshot
from ..hub_cache import is_offline
from ..local import processes_of
from ..rank_count import with_ranks
from ..ranks.address import HOST_VARIABLE, PORTS
from ..ranks.rank import run_rank
from ..slurm.ask_slurm import ask_slurm, scancel
from ..slurm.job_gpus import JOB_VARIABLE, gpus_of_allocation
from ..slurm.site import job_environment, profile_notes, srun_options
from ..slurm.slurm_log import failure_in_job
from ..slurm.slurm_queue import current_state, find_job
from ..slurm.slurm_state import ENDED
from .in_job import InJob, check_profile
from .launcher import Place, StartedRanks

OVER = {*ENDED, "COMPLETING"}
"""Slurm's states of a job in which none of its steps goes on."""
END_TIMEOUT_S = 5.0
"""Seconds that srun may take to end after its step has."""


class Srun(InJob):
    """A step of the Slurm job that this process is in."""

    place = "a step of this Slurm job"
    checks = "the cluster"

    def gpus(self, params: RunParams) -> int:
        """Return the GPUs that the step asks for or, if it does not say, that the job has on its nodes."""
        launch = with_cluster(params.launch)
        return 0 if params.train.device is Device.CPU else launch.nodes * gpus_of_node(launch)

    def check(self, params: RunParams) -> None:
        """Raise ParamError if this process is in no job, in one with too few nodes, or without a variable it needs."""
        check_allocation(params)
        check_profile(params.launch)
        with_variables_of(with_cluster(params.launch))
        check_allocated_gpus(params)

    def notes(self, params: RunParams) -> list[str]:
        """Return what a person should know of the profile, and that nodes of the job stay idle, if some do."""
        found = profile_notes(params.launch.cluster)
        nodes, used = nodes_of_allocation(), params.launch.nodes
        if used >= nodes:
            return found
        return [
            *found,
            f"launch.nodes is {used}, and the job has {nodes} nodes: the others stay idle; set it to {nodes}",
        ]

    def why_no_gpu(self, gpus: int) -> str:
        """Return that the job of this process has too few GPUs. gpus: as many as the step has."""
        return f"the job that this process is in has {gpus} GPUs for the step"

    def state(self, look: Snapshot, record: RunRecord) -> RunState:
        """Return the state of the step; if its supervisor has ended with the job, this is told."""
        state = super().state(look, record)
        if state.status is not Status.LOST or look.job is None:
            return state
        job = find_job(look.job, user=look.folder.stat().st_uid)
        is_over = job.answered and (job.state == "" or job.state in OVER)
        return replace(state, why=ended_job(look.job)) if is_over else state

    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Start the ranks in the job that this process is in; they find a port on its first node."""
        return start_step(folder, record)

    def failure(self, look: Snapshot, ranks: StartedRanks, log: str) -> RunState | None:
        """Return the state of the rank that failed first, which srun may have told."""
        assert isinstance(ranks, JobStep)
        return failure_in_job(look, log.rpartition(ranks.name)[2])  # what was printed since it began

    def place_of_rank(self) -> Place:
        """Return who this process is, among the nodes of its step: its job may have more."""
        os.environ["SLURM_JOB_NUM_NODES"] = os.environ["SLURM_STEP_NUM_NODES"]
        os.environ["SLURM_JOB_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]
        return super().place_of_rank()

    def send_signal(self, folder: Path, record: RunRecord, number: signal.Signals) -> str:
        """Send a signal to all ranks: srun hands it on."""
        if signal_step(folder, record, number):
            return ""
        return f"the srun of {folder} has ended; a drill needs a run whose ranks are all running"

    def print_stack(self, folder: Path, record: RunRecord, rank: int, number: signal.Signals) -> bool:
        """Send the signal to all ranks."""
        return signal_step(folder, record, number)


class JobStep(StartedRanks):
    """A step of this process's job, in which the ranks of a run are."""

    def __init__(self, process: subprocess.Popen[bytes], name: str):
        self.process, self.name = process, name
        self.job_id = os.environ[JOB_VARIABLE]

    def done(self) -> bool:
        """Return True if all ranks have ended."""
        return self.process.poll() is not None

    def ended_place(self) -> Reason:
        """Return that the job has ended, if Slurm says so."""
        known = current_state(self.job_id)
        return ended_job(self.job_id) if known == "" or known in OVER else Reason()

    def end(self) -> None:
        """Kill the ranks, on all nodes, and nothing else of the job."""
        rows = ask_slurm("squeue", "--steps", "--noheader", "--format=%i|%j", f"--jobs={self.job_id}").stdout
        for line in rows.splitlines():
            step, _, name = line.strip().partition("|")
            if name == self.name:
                scancel("--signal=KILL", job=step)
        end = time.monotonic() + END_TIMEOUT_S
        while not self.done() and time.monotonic() < end:
            time.sleep(0.05)


def check_allocation(params: RunParams) -> None:
    """Raise ParamError if this process is in no job, or in one with too few nodes."""
    if JOB_VARIABLE not in os.environ:
        words = "srun needs the Slurm job that this notebook or terminal runs in, and SLURM_JOB_ID is not set here; "
        raise ParamError("launch.executor", f"{words}choose slurm to submit a job, or local")
    if not shutil.which("srun"):
        raise ParamError("launch.executor", "srun needs Slurm's command of that name, which is not on PATH here")
    nodes = nodes_of_allocation()
    if params.launch.nodes > nodes:
        words = f"{params.launch.nodes} are more than the {nodes} of the job that this process is in; lower it"
        raise ParamError("launch.nodes", words)


def check_allocated_gpus(params: RunParams) -> None:
    """Raise ParamError if a run wants a GPU for each rank, and the job of this process has fewer."""
    params = with_ranks(params)
    launch, device = with_cluster(params.launch), params.train.device
    gpus = gpus_of_node(launch)
    if device is Device.CUDA and gpus < launch.ranks_per_node:
        words = f"{device} needs a GPU for each of {launch.ranks_per_node} ranks on a node, and the job here has {gpus}"
        raise ParamError("train.device", f"{words}; lower launch.ranks, or set train.device to cpu")


def nodes_of_allocation() -> int:
    """Return the nodes of the job that this process is in."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def ended_job(number: str) -> Reason:
    """Return that the job of a step has ended."""
    return Reason(f"the job {number} that it was a step of has ended", ALLOCATION_ENDED)


def gpus_of_node(launch: LaunchParams) -> int:
    """Return the GPUs of a node that a step asks for, or else that its job has on each node."""
    return gpus_of_allocation() if launch.gpu_count is None else launch.gpu_count


def step_command(params: RunParams, *, job: str, name: str, logs: Path) -> list[str]:
    """Return the srun that starts the ranks in a job. GPUs are those of the job, unless launch.gpus_per_node says."""
    params = with_ranks(params)
    launch = with_cluster(params.launch)
    gpus = 0 if params.train.device is Device.CPU else gpus_of_node(launch)
    options = [f"--jobid={job}", "--overlap", f"--job-name={name}", "--unbuffered", "--open-mode=append"]
    options += [f"--output={logs}/%j_%t_log.out", f"--nodes={launch.nodes}", f"--ntasks={launch.world_size}"]
    options += [
        f"--ntasks-per-node={launch.ranks_per_node}",
        *srun_options(with_variables_of(launch), launch.cpus_per_task),
    ]
    if gpus:
        options.append(f"--gres=gpu:{gpus}")
    return ["srun", *options, sys.executable, "-u", "-m", "submitit.core._submit", str(logs)]


def with_variables_of(launch: LaunchParams) -> LaunchParams:
    """Return a launch whose options of srun have the variables of this process expanded: no shell does it.

    Raises ParamError for one that is not set.
    """
    try:
        return launch.change(srun=tuple(expanded(option, os.environ) for option in launch.srun))
    except KeyError as error:
        words = f"the variable {error.args[0]} is not set here; set it, or write the value in full"
        raise ParamError("launch.srun", words) from None


def start_step(folder: Path, record: RunRecord) -> JobStep:
    """Start the ranks of a run in the job that this process is in."""
    params = RunParams.from_yaml(folder / "params.yaml")
    launch, logs, job = with_cluster(params.launch), folder / "logs", os.environ[JOB_VARIABLE]
    call = DelayedSubmission(run_rank, str(folder))
    call.set_timeout(record.timeout_min, 1)
    call.dump(logs / f"{job}_submitted.pkl")
    (logs / f"{job}_submitted.pkl").chmod(0o600)
    environment = job_environment(()) | {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_LOG_LEVEL": "CRITICAL"}
    environment |= {"PYTHONUNBUFFERED": "1", "MASTER_PORT": str(random.SystemRandom().choice(PORTS))}
    if is_offline(params):
        environment["HF_HUB_OFFLINE"] = "1"
    if launch.host:
        environment[HOST_VARIABLE] = launch.host
    if launch.interface:
        names = ",".join(launch.interface)
        environment |= {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": f"={names}"}
    name = f"mmfsdp-{record.identity}"
    print(f"srun starts {name}", flush=True)  # into the log of the supervisor, before what srun prints
    command = step_command(params, job=job, name=name, logs=logs)
    return JobStep(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment), name)


def signal_step(folder: Path, record: RunRecord, number: signal.Signals) -> bool:
    """Send a signal to all ranks: srun hands it on. Return False if there is no srun of this run on this machine."""
    found = [process for process in processes_of(record, folder) if process.name() == "srun"]
    for process in found[:1]:  # it has a child process of the same name
        process.send_signal(number)
    return bool(found)
