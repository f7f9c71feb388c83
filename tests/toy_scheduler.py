"""A scheduler of one's own, small enough to read: a folder is the queue, and one process starts the ranks of its jobs.

`python toy_scheduler.py QUEUE` is the scheduler, one job at a time; `launch.executor: {call: toy_scheduler:FolderQueue,
queue: QUEUE}` launches runs by it. A job is a file: NUMBER.json until it starts, NUMBER.running, then NUMBER.ended. Who
deletes the file ends the job.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mmfsdp import ParamError
from mmfsdp.kit.run.launchers.launcher import Launcher, StartedRanks, rank_command, rank_environment


class FolderQueue(Launcher):
    """Starts ranks by the toy scheduler, whose queue is a folder."""

    place = "the toy scheduler"
    fields = ("gpus_per_node",)  # tells how many ranks to start where launch.ranks is unset

    def __init__(self, queue):
        self.queue = Path(queue).absolute()

    def check(self, params):
        """Raise ParamError where nobody would start the ranks."""
        if not (self.queue / "scheduler.pid").exists():
            raise ParamError("launch.executor", f"no scheduler serves {str(self.queue)!r}; start toy_scheduler.py")

    def start(self, folder, record, *, port):
        """Put a job into the queue: the command of a rank, and the variables that tell each rank which one it is."""
        number = str(time.time_ns())
        shared = rank_environment(folder, record) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": str(record.ranks), "LOCAL_WORLD_SIZE": str(record.ranks)}
        ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(record.ranks)]
        job = {"command": rank_command(folder), "cwd": os.getcwd(), "ranks": ranks}
        (self.queue / f"{number}.new").write_text(json.dumps(job))
        (self.queue / f"{number}.new").rename(self.queue / f"{number}.json")
        return QueuedRanks(self.queue, number)


class QueuedRanks(StartedRanks):
    """A job in the queue."""

    def __init__(self, queue, number):
        self.queue, self.job_id = queue, number

    def waits_for(self):
        """Say that other jobs come first."""
        waits = (self.queue / f"{self.job_id}.json").exists()
        return f"job {self.job_id} waits for its turn" if waits else ""

    def done(self):
        """Return True if the scheduler has no such job any more, or has written that it ended."""
        return not any((self.queue / f"{self.job_id}.{state}").exists() for state in ("json", "running"))

    def end(self):
        """Delete the job, and wait until its ranks are gone."""
        for state in ("json", "running"):
            (self.queue / f"{self.job_id}.{state}").unlink(missing_ok=True)
        while not (self.queue / f"{self.job_id}.ended").exists() and (self.queue / "scheduler.pid").exists():
            time.sleep(0.05)


def serve(queue):
    """Run the jobs of a queue, the oldest first, until this process is ended."""
    (queue / "scheduler.pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            for waiting in sorted(queue.glob("*.json")):
                run_job(waiting)
            time.sleep(0.05)
    finally:
        (queue / "scheduler.pid").unlink()


def run_job(waiting):
    """Start the ranks of a job, and wait for their end; kill them once somebody has deleted the job."""
    running, ended = waiting.with_suffix(".running"), waiting.with_suffix(".ended")
    job, ranks = json.loads(waiting.read_text()), []
    waiting.rename(running)
    try:
        for variables in job["ranks"]:
            ranks.append(subprocess.Popen(job["command"], cwd=job["cwd"], env=os.environ | variables))
        while running.exists() and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        running.unlink(missing_ok=True)
        ended.touch()


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)  # jobs of an earlier scheduler
    Path(sys.argv[1]).mkdir(parents=True)
    serve(Path(sys.argv[1]))
