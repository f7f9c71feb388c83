"""The job that Slurm is given: the text of its batch file, and its submission. Both by submitit, from one executor."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError

from ..runs import Status, write_json
from ..runs.slurm import END, PREEMPTED
from .job import run_rank
from .lint import refusal as lint_refusal

if TYPE_CHECKING:
    from ..params import LaunchParams, RunParams

_PORT = "import random,socket as s;print(next(p for p in random.sample(range(20000,32000),999) "
_PORT += "if s.socket().connect_ex(('127.0.0.1',p))))"
"""A port of the first node that nobody serves, outside the range of outgoing connections."""


class _Executor(SlurmExecutor):
    """Is made where there is no Slurm, too: what would be submitted can be read anywhere."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def sbatch_text(params: RunParams) -> str:
    """What sbatch will receive for a run: its batch file, to the byte. Raises ParamError as `launch` does."""
    executor = slurm_executor(params)
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def slurm_executor(params: RunParams) -> SlurmExecutor:
    """submitit's executor with all that a run asks of Slurm. Raises ParamError naming the field that is wrong."""
    from ..params import Executor, ParamError
    from ..params.cluster import settled

    if params.launch.executor is not Executor.SLURM:
        raise ParamError("launch.executor", f"{params.launch.executor} submits no job; set it to slurm")
    launch = settled(params.launch)
    logs = Path(os.path.expanduser(launch.folder)).absolute() / launch.name / "logs"
    python = shlex.join((launch.python or sys.executable).split())
    executor = _Executor(logs, python=python)
    cpus = launch.cpus_per_task or launch.threads
    extra = {"requeue": True, **dict(_option(text) for text in launch.sbatch)}
    if launch.reservation:
        extra["reservation"] = launch.reservation
    gpus = launch.gpus(params.train.device)
    asked = {
        "job_name": launch.name,
        "nodes": launch.nodes,
        "ntasks_per_node": launch.ranks_per_node,
        "gpus_per_node": gpus or None,
        "cpus_per_task": cpus,
        "mem": launch.mem,
        "time": launch.timeout_min,
        "signal_delay_s": min(90, 15 * launch.timeout_min),
        **{name: getattr(launch, name) for name in ("partition", "account", "qos", "constraint", "exclude")},
        "additional_parameters": extra,
        "stderr_to_stdout": True,
        "srun_args": ["--kill-on-bad-exit=1", "--distribution=block", *([f"--cpus-per-task={cpus}"] if cpus else [])],
        "setup": _setup(launch, logs, python),
        "teardown": _teardown(logs),
    }
    executor.update_parameters(**{name: value for name, value in asked.items() if value is not None})
    return executor


def _setup(launch: LaunchParams, logs: Path, python: str) -> list[str]:
    lines = [f"module load {shlex.quote(module)}" for module in launch.modules]
    lines += [shlex.join(line.split()) for line in launch.setup]
    lines += [f"rm -f {shlex.quote(str(logs))}/rank*"]  # the ranks' words of an earlier life
    lines += [f'export MASTER_PORT=$({python} -c "{_PORT}")']
    return lines


def _teardown(logs: Path) -> list[str]:
    """Once no rank is left: back into the queue if they made room, else word of their end."""
    made_room, cancelled = shlex.quote(str(logs / PREEMPTED)), shlex.quote(str(logs.parent / "cancel"))
    return [
        "code=$?",
        f"[ -e {made_room} ] && [ ! -e {cancelled} ] && scontrol requeue $SLURM_JOB_ID && sleep 60",
        f"echo $code > {shlex.quote(str(logs / END))}",
        "exit $code",
    ]


def _option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    return name, value if equals else True


def clean_environment(environment: dict[str, str]) -> dict[str, str]:
    """An environment without what an allocation, another run or a GPU choice has left in it: the job gets its own."""
    strange = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_")
    ranks = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    dropped = (*ranks, "CUDA_VISIBLE_DEVICES")
    return {k: v for k, v in environment.items() if k == "SLURM_CONF" or not (k.startswith(strange) or k in dropped)}


ANSWER = 0.5
"""Seconds in which a refusal by Slurm still reaches the caller of launch."""

FIELDS = {
    "account": "account", "partition": "partition", "qos": "qos", "feature": "constraint",
    "reservation": "reservation", "node name": "exclude", "memory": "mem", "time limit": "timeout_min",
    "gres": "gpus_per_node", "cpu count": "cpus_per_task", "unrecognized option": "sbatch", "invalid option": "sbatch",
    "contact": "executor", "configuration is not available": "nodes, or gpus_per_node, cpus_per_task or mem",
    "node count": "nodes", "more processors": "ranks",
}  # fmt: skip
"""Part of what sbatch complains of, in lower case -> the field to change."""


def check(params: RunParams) -> None:
    """Raises ParamError with Slurm's own words for what it will refuse, if it says so within a moment."""
    from ..params import ParamError

    if not shutil.which("sbatch"):
        words = "slurm needs sbatch, which is not on PATH here; set it to local, or launch on a cluster's login node"
        raise ParamError("launch.executor", words)
    text = sbatch_text(params)
    environment = clean_environment(dict(os.environ))
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"], input=text, capture_output=True, text=True, env=environment, timeout=ANSWER
        )
    except subprocess.TimeoutExpired:
        return  # its answer to the submission itself will be in the run's state
    if done.returncode and "configuration is not available" not in done.stderr:  # which may be for now only
        field, _, words = refusal(done.stderr).partition(": ")
        raise ParamError(field, words)


def submit(folder: Path, *, unseen: bool = False) -> None:
    """Submit a run from its folder. What sbatch says, good or bad, is then in status.json; or what the lint says, if
    it is `unseen`."""
    from ..params import RunParams

    enter_clean_environment()
    if (folder / "cancel").exists():
        write_json(folder / "status.json", {"status": Status.CANCELLED, "reason": "cancelled"})
        return
    if unseen and (words := lint_refusal(folder)):
        write_json(folder / "status.json", {"status": Status.FAILED, "reason": words, "finished": time.time()})
        return
    try:
        job = slurm_executor(RunParams.from_yaml(folder / "params.yaml")).submit(run_rank, str(folder))
    except (FailedJobError, ValueError) as error:
        refused = {"status": Status.FAILED, "reason": refusal(str(error))}
        write_json(folder / "status.json", refused | {"finished": time.time()})
        return
    write_json(folder / "status.json", {"status": Status.QUEUED, "job": job.job_id, "submitted": time.time()})
    if (folder / "cancel").exists():
        stop_job(job.job_id)


def enter_clean_environment() -> None:
    """From now on this process, which is there to submit, has the environment that jobs are to have."""
    environment = clean_environment(dict(os.environ))
    os.environ.clear()
    os.environ.update(environment | {"SUBMITIT_LOG_LEVEL": "CRITICAL", "PYTHONUNBUFFERED": "1"})


def refusal(said: str) -> str:
    """What Slurm said, after the field that it is about: `launch.partition: sbatch: error: invalid partition`."""
    words = " ".join(line for line in said.splitlines() if re.match("sbatch|slurm|allocation", line)) or said.strip()
    field = next((field for part, field in FIELDS.items() if part in words.lower()), "executor")
    return f"launch.{field}: {words[:500]}"


def stop_job(number: str, *, kill: bool = False) -> str:
    """Ask Slurm to end a job; with `kill`, at once. Returns what it complains of: nothing if all is well."""
    command = ["scancel", *(["--signal=KILL", "--full"] if kill else []), number]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
