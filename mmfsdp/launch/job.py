"""What every rank runs: the one function that submitit is given, with the run folder's path and nothing else.

Local ranks have a supervisor, which started them. Those of a Slurm job have Slurm, and a process beside rank 0
(within.py).
"""

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

import psutil
from submitit import JobEnvironment

from ..loading import collector_paused
from ..runs import NOTICE, RESERVE, Preempted, RunRecord, asked, last_row, listen, note, write_json
from ..runs.processes import process_start
from ..runs.slurm import FAILED, LIFE, PREEMPTED
from . import within

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
    word |= {"start": process_start(os.getpid()), "life": os.environ.get(LIFE, "0")}

    def say(**more: Any) -> None:
        write_json(path / "logs" / f"rank{job.global_rank}.json", word | {"time": time.time()} | more)

    if (path / "cancel").exists():
        raise SystemExit("cancelled")
    listen(term=record.executor != "local")  # locally, the supervisor stops ranks by SIGTERM
    try:
        say(state="running")
        if record.executor == "slurm" and job.global_rank == 0:
            within.start(path)
            if word["life"] != "0":
                text = f"Slurm has started its job again, for the {word['life']}. time"
                note(path, "requeued", step=last_row(path).get("step", 0), text=text)
        find(record.entry)(path)
    except Preempted as preempted:
        say(state="preempted", step=preempted.step)
        if asked(NOTICE):  # after SIGTERM, the end or a new start is Slurm's affair
            (path / "logs" / PREEMPTED).touch()
        raise SystemExit(0) from None
    except BaseException as error:
        (path / "logs" / RESERVE).unlink(missing_ok=True)  # on a full disk, room for the words to come
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        say(state="failed", error=text[:500], traceback=traceback.format_exc()[-20_000:])
        (path / "logs" / FAILED).touch()
        raise
    say(state="done")


def find(entry: str) -> Callable[[Path], Any]:
    """The function named `module:function`."""
    module, _, name = entry.partition(":")
    with collector_paused(for_good=True):
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
    faulthandler.register(signal.SIGUSR1)  # whoever watches asks a rank that hangs for its stack
    if record.executor == "local":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if VISIBLE in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE]
    else:
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // (job.num_tasks // job.num_nodes)
        os.environ["OMP_NUM_THREADS"] = str(record.threads or max(1, cpus))
        if "SLURM_JOB_GPUS" not in os.environ and "SLURM_STEP_GPUS" not in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # none was asked for: those of the node are others'
        _meet_at(job.hostnames[0])
    if record.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _meet_at(first_node: str) -> None:
    """MASTER_ADDR, and for gloo the network interface that leads there: a host's own name may lead nowhere.

    Raises OSError if the node's name does not resolve, rather than waiting minutes for it.
    """
    try:
        address = socket.getaddrinfo(first_node, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise OSError(
            f"the job's first node, {first_node!r}, has no address on {socket.gethostname()}: {error}"
        ) from None
    os.environ["MASTER_ADDR"] = first_node
    with socket.socket(address[0], socket.SOCK_DGRAM) as trial:
        trial.connect(address[4])  # sends nothing
        mine = trial.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == mine for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
