"""The job of every rank: submitit calls `run_rank` with the run folder, on a laptop as on Slurm."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ....own.calls import OwnCodeError
from ....params import RunParams
from ..error_kinds import kind_of
from ..files.folder import add_event, last_row, open_own, touch, write_json
from ..files.history import RANK, add_moment
from ..files.run_record import SITE_CHECK, TRAININGS, RunRecord, function_of
from ..launchers.launcher import Launcher, Place
from ..launchers.registry import launcher_in_run
from ..local import process_start
from ..own_code import use_code_of
from ..preempt import PREEMPT_SIGNAL, Preempted, listen_for_preemption, preemption_requested
from ..slurm.slurm_state import PREEMPTED_FILE
from .ask_ranks import keep_entered, prepare_sockets
from .fork import set_output
from .hang import STACK_SIGNAL, Heartbeat, stack_path
from .helpers import start_helper
from .rank_imports import rank_imports

SETTLE_S = 3.0
"""Seconds that a failed rank of a Slurm job waits before it ends. Of ranks that end at once srun does not tell which
was the first: one that was killed shall be told before those that fail for want of it."""


def run_rank(folder: str) -> None:
    """Call the run's entry function as one rank, and report its end in logs/rank<N>.json.

    Raises what the entry function raises, after the traceback is on disk: the first cause must be known before the
    other ranks fail because of it. A preempted rank exits with 0: see preempt.py.
    """
    path = Path(folder)
    record = RunRecord.read(path)
    assert record, f"{folder} has no run.json"
    launcher = launcher_in_run(path, record)
    place = launcher.place_of_rank()
    process = {"rank": place.global_rank, "host": socket.gethostname(), "pid": os.getpid()}
    process["start"] = process_start(os.getpid())

    def report(**status: Any) -> None:
        values = process | {"time": time.time()} | status
        write_json(path / "logs" / f"rank{place.global_rank}.json", values)
        add_moment(path, RANK, values, rank=place.global_rank)
        if status["state"] != "running":
            os.umask(0o077)  # submitit pickles the result next

    if (path / "cancel").exists():
        raise SystemExit("cancelled")
    listen_for_preemption(sigterm=not launcher.here)  # here, the supervisor stops ranks by SIGTERM
    try:
        set_environment(place)
        launcher.enter_rank(place, record)
        choose_devices(record)
        if record.entry != SITE_CHECK:  # `check` tells itself what is wrong with the address
            launcher.meet(place)
        start_helpers(path, record, launcher, place)  # before this process has a second thread: they are forks of it
        write_stacks_on(STACK_SIGNAL, stack_path(path, place.global_rank, os.getpid()))
        report(state="running")
        if place.global_rank == 0 and (text := launcher.restarted()):
            add_event(path, "requeued", step=last_row(path).get("step", 0), text=text)
        Heartbeat(path, place.global_rank)("importing")  # torch and transformers, which takes seconds, or minutes
        entry = import_entry(path, record)
        entry(path)
    except Preempted as preempted:
        report(state="preempted", step=preempted.step)
        if preemption_requested(PREEMPT_SIGNAL):  # after SIGTERM, Slurm itself requeues the job or ends it
            touch(path / "logs" / PREEMPTED_FILE)
        raise SystemExit(0) from None
    except BaseException as error:
        keep_entered(path, place.global_rank)
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        lines = traceback.format_exc()
        if isinstance(error, OwnCodeError):
            text, lines = str(error), error.traceback or lines
        report(state="failed", error=text[:500], kind=kind_of(error), traceback=lines[-20_000:])
        if not launcher.here:
            time.sleep(SETTLE_S)
        raise
    report(state="done")


def import_entry(folder: Path, record: RunRecord) -> Callable[[Path], object]:
    """Import the run's entry function, with the code as it was at the launch."""
    use_code_of(folder)
    module, _, name = function_of(record.entry).partition(":")
    params = RunParams.from_yaml(folder / "params.yaml") if record.entry in TRAININGS else None
    with rank_imports(params):
        entry: Callable[[Path], object] = getattr(import_module(module), name)
    return entry


def run_alone(folder: Path) -> None:
    """Be the rank that the environment names, and print into a log of its own (launchers/launcher.py: rank_command)."""
    with open_own(folder / "logs" / f"launcher_{int(os.environ['RANK'])}_log.out", "ab") as log:
        set_output(log.fileno())
    run_rank(str(folder))


def hold_back(number: signal.Signals) -> None:
    """Have a signal wait until a thread asks for it, also where a process that started this one ignores it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.signal(number, signal.SIG_DFL)  # the supervisor ignores it, which its ranks inherit


def write_stacks_on(number: signal.Signals, path: Path) -> None:
    """Write the stacks of all threads into a file when this process receives a signal. Only in the main thread.

    A file of this process alone: a data worker, which has the same log, may print its own stack, too.

    Slurm sends a signal to all processes of a job, and this one would end each process that a rank has started, such
    as a compiler. So the main thread blocks it, which processes and threads that it starts inherit, and one thread
    waits for it. That thread holds Python's lock while it writes: `faulthandler.register` writes in the signal handler,
    without the lock, and reads the frames of threads that run on meanwhile, which at times is a segmentation fault.
    """
    hold_back(number)
    unfinished = path.with_name(f"{path.name}.new")

    def write() -> None:
        with open_own(unfinished, "wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        os.replace(unfinished, path)

    def write_each_time() -> None:
        while True:
            signal.sigwait({number})
            if signal.getsignal(number) is not signal.SIG_IGN:  # a blocked signal arrives here though it is ignored
                with suppress(OSError):  # a full disk: whoever asks waits in vain
                    write()

    threading.Thread(target=write_each_time, name=f"receives {number.name}", daemon=True).start()


def start_helpers(folder: Path, record: RunRecord, launcher: Launcher, place: Place) -> None:
    """Start what serves ranks that are not child processes of a supervisor.

    That is a watchdog of all ranks, where there is no supervisor, and an asker on each node without it.
    """
    if launcher.here:
        return  # the supervisor has set what its ranks need, and watches them
    sockets = prepare_sockets(record)
    if not launcher.has_supervisor and place.global_rank == 0:
        start_helper(folder, "watchdog")
    elif place.local_rank == 0 and sockets is not None:
        start_helper(folder, "asker")


def set_environment(place: Place) -> None:
    """Set the environment variables that torch.distributed reads, before torch is imported; not the address yet."""
    local_ranks = place.num_tasks // place.num_nodes
    os.environ |= {"RANK": str(place.global_rank), "LOCAL_RANK": str(place.local_rank)}
    os.environ |= {"WORLD_SIZE": str(place.num_tasks), "LOCAL_WORLD_SIZE": str(local_ranks)}
    faulthandler.enable()
    hold_back(STACK_SIGNAL)


def choose_devices(record: RunRecord) -> None:
    """Hide the GPUs from a run on the CPU; else set the allocator of their memory."""
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
