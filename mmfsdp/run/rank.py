"""The job of every rank: submitit calls `run_rank` with the run folder, on a laptop as on Slurm."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from submitit import JobEnvironment

from ..params.own import OwnCodeError
from .folder import add_event, last_row, touch, write_json
from .hang import Heartbeat, start_watchdog
from .local import LOOPBACK, RUN_VARIABLE, process_start
from .own_code import use_code_of
from .preempt import PREEMPT_SIGNAL, Preempted, listen_for_preemption, preemption_requested
from .record import RunRecord, check_entry
from .slurm_state import PREEMPTED_FILE, RESTART_COUNT

VISIBLE_DEVICES = "MMFSDP_CUDA_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES of the person who launched; submitit's local executor hides the GPUs."""
SHARED_MEMORY = "/dev/shm"
"""The file system in memory by which data workers hand batches to their rank, and NCCL's ranks of a node talk."""
CONNECT_TIMEOUT_S = 30.0
"""Seconds within which the job's first node must answer; a packet that is lost is sent again after 1, 3, 7 and 15 s."""


def run_rank(folder: str) -> None:
    """Call the run's entry function as one rank, and report its end in logs/rank<N>.json.

    Raises what the entry function raises, after the traceback is on disk: the first cause must be known before the
    other ranks fail because of it. A preempted rank exits with 0: see preempt.py.
    """
    path = Path(folder)
    record = RunRecord.read(path)
    assert record, f"{folder} has no run.json"
    job = JobEnvironment()
    process = {"rank": job.global_rank, "host": socket.gethostname(), "pid": os.getpid()}
    process["start"] = process_start(os.getpid())

    def report(**status: Any) -> None:
        write_json(path / "logs" / f"rank{job.global_rank}.json", process | {"time": time.time()} | status)
        if status["state"] != "running":
            os.umask(0o077)  # submitit pickles the result next

    if (path / "cancel").exists():
        raise SystemExit("cancelled")
    listen_for_preemption(sigterm=record.executor != "local")  # locally, the supervisor stops ranks by SIGTERM
    try:
        set_environment(job, record)
        report(state="running")
        if record.executor == "slurm" and job.global_rank == 0:
            start_watchdog(path)
            restarts = os.environ.get(RESTART_COUNT, "0")
            if restarts != "0":
                text = f"Slurm has started the job again (restart {restarts})"
                add_event(path, "requeued", step=last_row(path).get("step", 0), text=text)
        Heartbeat(path, job.global_rank)("importing")  # torch and transformers, which takes seconds, or minutes
        use_code_of(path)
        module, _, name = check_entry(record.entry).partition(":")
        getattr(import_module(module), name)(path)
    except Preempted as preempted:
        report(state="preempted", step=preempted.step)
        if preemption_requested(PREEMPT_SIGNAL):  # after SIGTERM, Slurm itself requeues the job or ends it
            touch(path / "logs" / PREEMPTED_FILE)
        raise SystemExit(0) from None
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        lines = traceback.format_exc()
        if isinstance(error, OwnCodeError):
            text, lines = str(error), error.traceback or lines
        if "No space left on device" in text and is_full(SHARED_MEMORY):
            text = f"{SHARED_MEMORY} is full: {text}"
        report(state="failed", error=text[:500], traceback=lines[-20_000:])
        raise
    report(state="done")


def is_full(folder: str) -> bool:
    """Return True if a file system has less than 1 % of its space left."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return False
    return usage.free < 0.01 * usage.total


def set_environment(job: JobEnvironment, record: RunRecord) -> None:
    """Set the environment variables that torch.distributed reads, before torch is imported.

    Raises OSError if the job's first node cannot be reached from here.
    """
    local_ranks = job.num_tasks // job.num_nodes
    os.environ |= {"RANK": str(job.global_rank), "LOCAL_RANK": str(job.local_rank)}
    os.environ |= {"WORLD_SIZE": str(job.num_tasks), "LOCAL_WORLD_SIZE": str(local_ranks)}
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the hang detector asks for the stack of a rank by SIGUSR1
    if record.executor == "local":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if VISIBLE_DEVICES in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
    else:
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // local_ranks
        os.environ["OMP_NUM_THREADS"] = str(record.threads or max(1, cpus))
        if not {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"} & os.environ.keys():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this job has no GPU: the node's GPUs are other jobs'
        os.environ[RUN_VARIABLE] = record.identity
        if job.num_nodes == 1:
            _set_master_address(LOOPBACK)  # nothing outside the node needs to connect
        else:
            _set_master_address(job.hostnames[0])
        if job.node > 0:
            check_answers(job.hostnames[0], int(os.environ["MASTER_PORT"]))
    if record.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        set_allocator()


def set_allocator() -> None:
    """Let torch's allocator of GPU memory grow its segments, unless the person has set its options.

    Units and batches of many sizes then leave fewer gaps that nothing fits in (torch, docs/source/notes/cuda.rst).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _set_master_address(first_node: str) -> None:
    """Set MASTER_ADDR, and the network interface that leads there: a host's own name may lead nowhere.

    Raises OSError if the node's name does not resolve, rather than waiting minutes for it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(first_node, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        here = socket.gethostname()
        raise OSError(f"the job's first node, {first_node!r}, has no address on {here}: {error}") from None
    os.environ["MASTER_ADDR"] = first_node
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.connect(address)  # sends nothing
        own_address = trial.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in [item.address for item in addresses]:
            set_interface(name)


def set_interface(name: str) -> None:
    """Have gloo and NCCL meet over a network interface, unless the person has named others.

    NCCL follows gloo: left to itself, it may choose an interface by which the nodes do not reach each other.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # `=`: NCCL would take eth1 for the beginning of a name, and use eth10, too.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")


def check_answers(host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raise OSError if nobody answers at the address where the ranks meet. torch would notice it after many minutes.

    A refused connection is an answer: the host can be reached, and rank 0 does not listen yet. torch waits for that.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except ConnectionRefusedError:
            return
        except OSError as error:  # no route to the host, or no answer: a firewall drops the packets
            cause = error
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    words = f"nobody answers at {address} port {port}, where rank 0 listens on the job's first node {host!r}: {cause}; "
    words += f"may {socket.gethostname()} connect to ports 20000 to 31999 of other nodes? Ask the administrators"
    raise OSError(words)
