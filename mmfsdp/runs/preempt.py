"""Preemption: a signal asks a rank to make room, and the training asks here, at each step, whether one came."""

from __future__ import annotations

import signal

NOTICE = signal.SIGUSR2
"""What asks a run to save, end and start again: Slurm sends it before the time is up, a drill at any time."""
AGAIN = 75
"""Exit status of a rank that made room: try again later (EX_TEMPFAIL), as torchrun and schedulers understand it."""

_heard: set[int] = set()


class Preempted(SystemExit):
    """The training has saved `step` and makes room; started again, it goes on from there."""

    def __init__(self, step: int):
        super().__init__(AGAIN)
        self.step = step


def listen(*, term: bool) -> None:
    """From now on this process only remembers NOTICE, and with `term` also SIGTERM. In the main thread only.

    NOTICE is blocked, too: so processes that this one starts, such as data workers, inherit that and are not killed by
    it where it is sent to all processes of a job, as Slurm does.
    """
    for number in (NOTICE, signal.SIGTERM) if term else (NOTICE,):
        signal.signal(number, lambda number, _: _heard.add(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})


def asked(*numbers: int) -> bool:
    """Whether a signal came that asks to make room; with `numbers`, whether one of those did."""
    came = _heard | ({NOTICE} & signal.sigpending())
    return bool(came & set(numbers)) if numbers else bool(came)
