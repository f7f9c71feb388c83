"""`python -m tests.kill_and_resume FOLDER RANKS KILLS`: train FOLDER, killing a random rank at random moments, saves
included, and going on each time. The ranks are forks of this process, which has imported all they need."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from mmfsdp import train
from mmfsdp.checkpoint.steps import complete_checkpoints
from mmfsdp.run.folder import last_row
from tests.tiny_run import as_rank, free_port


def begin(folder: Path, ranks: int) -> list[int]:
    """Start the ranks; their process ids."""
    port = free_port()
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            as_rank(rank, ranks, port)
            code = 1
            try:
                train.run(folder)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def is_saving(folder: Path, began: float) -> bool:
    """Whether a save that began after `began` is being written."""
    try:
        return any(path.stat().st_ctime > began for path in (folder / "checkpoints").glob(".*.writing"))
    except FileNotFoundError:
        return False  # it was done while we looked


def wait_for(moment: str, folder: Path, steps: int) -> None:
    """Until a save is being written, or so many more steps are done and a little time has passed; a minute at most."""
    done = last_row(folder).get("step", 0)
    began, until = time.time(), time.monotonic() + 60
    while time.monotonic() < until:
        if moment == "save" and is_saving(folder, began):
            return time.sleep(random.random() * 0.01)
        if moment == "step" and last_row(folder).get("step", 0) >= done + steps:
            return time.sleep(random.random() * 0.05)
        time.sleep(0.002)
    return None  # the machine is slow: any moment will do


def main(folder: Path, ranks: int, kills: int) -> None:
    random.seed(3)
    for kill in range(kills):
        pids = begin(folder, ranks)
        wait_for(("step", "save")[kill % 2], folder, random.randint(-3, 3))
        os.kill(random.choice(pids), signal.SIGKILL)
        time.sleep(random.random() * 0.1)  # the others notice, or not, before they are stopped
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        kept = [path.name for path in complete_checkpoints(folder / "checkpoints")]
        print("killed at step", last_row(folder).get("step"), "newest", kept[-1:], flush=True)
    codes = [os.waitpid(pid, 0)[1] for pid in begin(folder, ranks)]
    assert codes == [0] * ranks, codes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
