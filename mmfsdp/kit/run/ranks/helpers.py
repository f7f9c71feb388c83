"""The processes beside a job's ranks: one watches the job, and one of each node asks its ranks when they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from ....params.launching import JOB_SIGNALS
from .ask_ranks import wait_for_request
from .fork import fork_alone, may_fork
from .hang import watch_job

HELPERS = {"watchdog": watch_job, "asker": wait_for_request}
"""The work of each, by its role. Called with the run folder and the rank's process."""


def start_helper(folder: Path, role: str) -> None:
    """Start a process that ends when this rank does, and that no signal to the whole job reaches.

    A fork of this process: the rank has imported all that its helper needs, which a Python of its own would take a CPU
    second for, and read from the file server of a cluster once more.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # which the process inherits; here they wait
    try:
        if may_fork():
            fork_alone(partial(HELPERS[role], folder, os.getpid()))
        else:
            command = [sys.executable, "-m", "mmfsdp.kit.run", str(folder), "helper", role, str(os.getpid())]
            subprocess.Popen(command, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
