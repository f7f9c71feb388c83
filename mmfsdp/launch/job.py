"""What every rank runs: the one function that submitit is given, with the run folder's path and nothing else."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from submitit import JobEnvironment

from ..runs import RESERVE, Preempted, RunRecord, listen, write_json
from ..runs.processes import process_start

VISIBLE = "MMFSDP_CUDA_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES of the person who launched; submitit's local executor hides the GPUs."""


def run_rank(folder: str) -> None:
    """Call the run's entry function as one rank, and leave word of its end in logs/rank<N>.json.

    Raises what the entry function raises, after the traceback is on disk: so the first cause is known, before the
    other ranks fail for want of this one. A rank that made room exits with 0, and leaves submitit no result.
    """
    path = Path(folder)
    record = RunRecord.read(path)
    assert record, f"{folder} has no run.json"
    job = JobEnvironment()
    _prepare(job, record)
    word = {"rank": job.global_rank, "host": socket.gethostname(), "pid": os.getpid()}
    word["start"] = process_start(os.getpid())

    def say(**more: Any) -> None:
        write_json(path / "logs" / f"rank{job.global_rank}.json", word | {"time": time.time()} | more)

    listen(term=record.executor != "local")  # locally, the supervisor stops ranks by SIGTERM
    say(state="running")
    try:
        find(record.entry)(path)
    except Preempted as preempted:
        say(state="preempted", step=preempted.step)
        raise SystemExit(0) from None
    except BaseException as error:
        (path / "logs" / RESERVE).unlink(missing_ok=True)  # on a full disk, room for the words to come
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        say(state="failed", error=text[:500], traceback=traceback.format_exc()[-20_000:])
        raise
    say(state="done")


def find(entry: str) -> Callable[[Path], Any]:
    """The function named `module:function`."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


def _prepare(job: JobEnvironment, record: RunRecord) -> None:
    """The environment that torch.distributed reads, set before torch is imported."""
    os.environ.update(
        RANK=str(job.global_rank),
        LOCAL_RANK=str(job.local_rank),
        WORLD_SIZE=str(job.num_tasks),
        LOCAL_WORLD_SIZE=str(job.num_tasks // job.num_nodes),
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks a rank that hangs for its stack
    if record.executor == "local":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if record.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif VISIBLE in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE]
