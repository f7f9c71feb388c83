"""Preemption: the cluster takes the nodes away, and the run goes on later as if nothing had happened.

The whole story of a preempted Slurm job, in order:

1. **Signal.** Slurm sends PREEMPT_SIGNAL to every rank at most 90 s before the time limit (`signal_delay_s` in
   slurm.py). A preemption by another job comes as SIGTERM, and so does one under torchrun.
2. **Flag.** `listen_for_preemption`, called by every rank at its start (rank.py), makes the signal only set a flag.
3. **Vote.** The training step asks `preemption_requested()` on every rank and all-reduces the answer together with
   the gradient norm: if one rank was asked, all of them stop after the same step.
4. **Save.** All ranks write a checkpoint of that step, and raise `Preempted` (kit/train/loop.py).
5. **Exit code.** After PREEMPT_SIGNAL a rank leaves the file logs/ranks.preempted and exits with 0 (`run_rank` in
   rank.py): with any other code srun would kill the ranks that are still ending. Started by torchrun itself, it exits
   with EXIT_REQUEUE.
6. **Requeue.** The batch script finds that file and calls `scontrol requeue` (`after_ranks` in slurm.py). After
   SIGTERM Slurm requeues the job itself, as the option `requeue` allows (`sbatch_options` in site.py).
7. Slurm starts the same job again, and the ranks resume from the newest complete checkpoint.

A local run is preempted by the same signal; its supervisor starts the ranks again (supervisor.py).
To change what a Slurm job does then, change `after_ranks` of slurm.py and `sbatch_options` of site.py; the signal and
the flag are in this file.
"""

from __future__ import annotations

import signal
from pathlib import Path

from ...params import ParamError
from .files.folder import add_event
from .files.snapshot import Snapshot
from .launchers.registry import check_no_replay, launcher_of
from .state import run_state

PREEMPT_SIGNAL = signal.SIGUSR2
"""Asks a rank to save, end and be started again."""
EXIT_REQUEUE = 75
"""Exit code of a preempted rank (EX_TEMPFAIL: try again later), as torchrun and schedulers understand it."""

_received: set[int] = set()


class Preempted(SystemExit):
    """Raised by the training after it saved `step` because of a preemption; started again, it goes on from there."""

    def __init__(self, step: int):
        super().__init__(EXIT_REQUEUE)
        self.step = step


def listen_for_preemption(*, sigterm: bool) -> None:
    """Make PREEMPT_SIGNAL, and with `sigterm` also SIGTERM, only set a flag. Only in the main thread.

    PREEMPT_SIGNAL is blocked, too, and child processes inherit that: Slurm sends it to all processes of a job, and it
    would kill data workers.
    """
    numbers = (PREEMPT_SIGNAL, signal.SIGTERM) if sigterm else (PREEMPT_SIGNAL,)
    for number in numbers:
        signal.signal(number, lambda number, _: _received.add(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {PREEMPT_SIGNAL})


def preemption_requested(*numbers: int) -> bool:
    """Return True if a signal has asked this rank to stop; with `numbers`, if one of those signals did."""
    received = _received | ({PREEMPT_SIGNAL} & signal.sigpending())
    return bool(received & set(numbers)) if numbers else bool(received)


def simulate_preemption(folder: Path) -> None:
    """Send PREEMPT_SIGNAL to every rank of a run, as a cluster would: a drill. Returns immediately.

    Raises ParamError if not all ranks are running, if they cannot be signalled from this machine, or if the job that
    the folder names is another run's.
    """
    check_no_replay(folder, "preempted: it plays what the recorded run went through")
    look = Snapshot(folder)
    state, record, statuses = run_state(look), look.record, look.reports
    if record is None or state.done or any(status.get("state") != "running" for status in statuses):
        raise ParamError("run", f"{folder} is {state}; a drill needs a run whose ranks are all running")
    launcher = launcher_of(folder, record)
    if error := launcher.cannot_signal(folder, record):
        raise ParamError("run", error)
    add_event(folder, "drill", step=state.step, text="drill: all ranks are sent the preemption signal")
    if error := launcher.send_signal(folder, record, PREEMPT_SIGNAL):
        raise ParamError("run", error)
