"""The processes of data workers: signals that a cluster sends to every process of a job do not end them.

Slurm sends a preemption (SIGTERM, SIGUSR2), a request for stacks (SIGUSR1) and an interrupt (SIGINT) to ranks and data
workers alike. A rank answers them. A data worker that ended would end its rank before the rank could save. So workers
start with these signals blocked: a handler, or `signal.SIG_IGN` in the worker, would come only after its imports.

A worker ends when its rank closes the loader, or, as PyTorch's watchdog sees, when its rank has ended. As a last resort
the loader, and Python at its exit, terminate a worker; here they do so by SIGKILL, since SIGTERM is blocked.

A worker ends as a forked process does, by `os._exit`. While Python ends, a thread that comes back from PyTorch's C++
aborts the process, and the thread that sends the last batches, which nobody waits for, may do that: the loader would
raise "DataLoader worker is killed by signal: Aborted" in a rank that has read all that it needs.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from ...params.launching import JOB_SIGNALS


@cache
def worker_context() -> SpawnContext:
    """Return the `multiprocessing_context` of a DataLoader whose workers outlive the signals of a cluster.

    Workers are spawned: a fork would copy the threads of gloo and CUDA.
    """
    # Python would start this process, which workers share, with the first semaphore, and unblock SIGINT and SIGTERM.
    _in_blocking_thread(resource_tracker.ensure_running)
    # At exit Python terminates workers that a failed rank has left; PyTorch's handler would call that one more failure.
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
    return _WorkerContext()


class _WorkerPopen(Popen):
    """A spawned process that starts with signals blocked, and is terminated by SIGKILL."""

    def _launch(self, process: BaseProcess) -> None:
        _in_blocking_thread(super()._launch, process)  # type: ignore[misc]  # typeshed does not know it

    def terminate(self) -> None:
        self.kill()


class WorkerProcess(SpawnProcess):
    """A data worker. The worker itself imports this class by its name."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _WorkerPopen:
        return _WorkerPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> NoReturn:
        # It has run the worker, joined what is to be joined and flushed the streams.
        os._exit(super()._bootstrap(parent_sentinel))  # type: ignore[misc]  # typeshed does not know it


class _WorkerContext(SpawnContext):
    Process = WorkerProcess


def _in_blocking_thread(function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a thread that blocks the signals: what it starts inherits that. This thread keeps its own.

    A signal that arrives meanwhile is this process's as always: another thread receives it.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(signal.pthread_sigmask, signal.SIG_BLOCK, JOB_SIGNALS).result()
        executor.submit(function, *args).result()
