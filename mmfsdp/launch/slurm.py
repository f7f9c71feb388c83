"""The job that Slurm is given: the text of its batch file, and its submission. Both by submitit, from one executor."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit import SlurmExecutor

if TYPE_CHECKING:
    from ..params import RunParams

END = "end"
"""File in logs/ with the exit code of all ranks together, written on the first node."""

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
    logs = Path(launch.folder).expanduser().absolute() / launch.name / "logs"
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
        "srun_args": ["--kill-on-bad-exit=1", *([f"--cpus-per-task={cpus}"] if cpus else [])],
        "setup": _setup(launch, logs, python),
        "teardown": ["code=$?", f"echo $code > {shlex.quote(str(logs / END))}", "exit $code"],
    }
    executor.update_parameters(**{name: value for name, value in asked.items() if value is not None})
    return executor


def _setup(launch: Any, logs: Path, python: str) -> list[str]:
    lines = [f"module load {shlex.quote(module)}" for module in launch.modules]
    lines += [shlex.join(line.split()) for line in launch.setup]
    lines += [f"rm -f {shlex.quote(str(logs / END))}", f'export MASTER_PORT=$({python} -c "{_PORT}")']
    return lines


def _option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    return name, value if equals else True


def clean_environment(environment: dict[str, str]) -> dict[str, str]:
    """An environment without what an allocation, another run or a GPU choice has left in it: the job gets its own."""
    strange = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_")
    ranks = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    dropped = (*ranks, "CUDA_VISIBLE_DEVICES")
    return {k: v for k, v in environment.items() if k == "SLURM_CONF" or not (k.startswith(strange) or k in dropped)}
