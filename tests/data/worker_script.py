"""A process with data workers, as a rank has. It fails, is killed, or closes its loader, as the argument says."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, IterableDataset

from mmfsdp.kit.data.worker_processes import worker_context
from mmfsdp.params.launching import JOB_SIGNALS

STUCK_AT = 8
"""The item of each worker that never comes, if the process is to fail."""


class Numbers(IterableDataset):
    """Numbers without end, or up to an item that never comes; with a thread that is at work while its worker ends."""

    def __init__(self, stuck_at: int, thread: bool = False):
        self.stuck_at = stuck_at
        self.thread = thread

    def __iter__(self):
        if self.thread:
            threading.Thread(target=work_on, daemon=True).start()
        number = 0
        while number != self.stuck_at:
            yield torch.tensor(number)
            number += 1
        time.sleep(3600)


def work_on() -> None:
    """Come back from PyTorch's C++ again and again, as the thread does that sends a worker's batches."""
    numbers = torch.ones(100, 100)
    while True:
        numbers @ numbers


def signal_workers() -> None:
    for child in multiprocessing.active_children():
        for number in JOB_SIGNALS:
            os.kill(child.pid, number)


def check_own_signals() -> None:
    """Raise AssertionError if this process does not hear its own signals as it did before it had workers."""
    received = []
    for number in JOB_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
        os.kill(os.getpid(), number)
    assert received == list(JOB_SIGNALS)


def main(end: str) -> None:
    data = Numbers(stuck_at=STUCK_AT if end == "fails" else -1, thread=end == "closes")
    number = 2 if end == "fails" else 1
    batches = iter(DataLoader(data, batch_size=None, num_workers=number, multiprocessing_context=worker_context()))
    workers = multiprocessing.active_children()
    print(*(child.pid for child in workers), flush=True)
    signal_workers()  # while they import
    assert [int(next(batches)) for _ in range(2 * number)] == sorted(number * [0, 1])
    signal_workers()
    assert [int(next(batches)) for _ in range(4 * number)] == sorted(number * [2, 3, 4, 5])
    assert all(child.is_alive() for child in workers)
    check_own_signals()
    if end == "closes":
        del batches
        codes = [child.exitcode for child in workers]
        assert codes == [0], f"exit codes of the workers: {codes}"
        return
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the failure of this rank")


if __name__ == "__main__":
    main(sys.argv[1])
