"""Within a Slurm job: a process beside rank 0 that ends the job when a rank stops answering or the run is cancelled.

Slurm itself sees ranks that die, nodes that fail and time that is up; not a rank that hangs. It needs no command of
Slurm's, which a container may lack: the end of rank 0 is the end of all.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ..runs import NOTICE, RESERVE, RunRecord, Status, read_json, write_json
from ..runs.slurm import LIFE
from ..runs.state import last_log_lines, rank_word
from .silence import DUMP, SLOW, Silence

EARLIER = 60.0
"""Seconds that other ranks may have started before rank 0; nodes' clocks differ."""


def start(folder: Path) -> None:
    """Called by rank 0. The process ends when rank 0 does."""
    command = [sys.executable, "-m", "mmfsdp.launch", str(folder), "watch", str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def watch(folder: Path, *, parent: int) -> None:
    """Watch the ranks of the run whose rank 0, process `parent`, has started this one."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # Slurm sends them to every process of the job
        signal.signal(number, signal.SIG_IGN)
    record = RunRecord.read(folder)
    assert record, folder
    if os.getppid() != parent:
        return  # it is gone already, and whoever has adopted this process is not to be touched
    rank0 = psutil.Process(parent)
    since = rank0.create_time()  # rather than now: a rank may hang before this process is there
    silence = Silence(folder, record, since=since - EARLIER)
    while rank0.is_running() and os.getppid() == parent:
        if (folder / "cancel").exists():
            return rank0.kill()
        _drill(folder, record)
        if verdict := _absent(folder, record, since) or silence.verdict(_seen_from_here(folder, record, rank0, since)):
            return _end(folder, verdict, rank0)
        time.sleep(min(1.0, record.silence_s / 10))


def _absent(folder: Path, record: RunRecord, since: float) -> dict[str, Any] | None:
    """The verdict on ranks that never began: the others would wait for them, and srun does not end those."""
    absent = [rank for rank in range(record.ranks) if not rank_word(folder, rank)]
    if not absent:
        return None
    said = _LAUNCH.search(last_log_lines(folder, 0, size=1 << 16))
    if not said and time.time() - since < SLOW * record.silence_s:
        return None
    from submitit import JobEnvironment  # half of the time to start, and seldom needed

    node = JobEnvironment().hostnames[absent[0] // (record.ranks // record.nodes)]
    reason = (
        f"rank {absent[0]} did not begin on {node}{f' ({said[0]})' if said else ''}; if that node cannot see {folder}"
    )
    return {"rank": absent[0], "reason": f"{reason}, put launch.folder where all nodes can write"}


_LAUNCH = re.compile(r"^srun: error: .*launch failed.*$", re.MULTILINE)


def _drill(folder: Path, record: RunRecord) -> None:
    """Pass a drill on as Slurm would, to all ranks at once, as soon as each of them listens."""
    if not (folder / "drill").exists():
        return
    words = [rank_word(folder, rank) for rank in range(record.ranks)]
    if all((word.get("state"), word.get("life")) == ("running", os.environ.get(LIFE, "0")) for word in words):
        (folder / "drill").unlink(missing_ok=True)
        if not _signal_all("USR2"):
            os.kill(words[0]["pid"], NOTICE)  # one is enough: it tells the others


def _signal_all(name: str) -> bool:
    """Send a signal to all processes of the job. False where Slurm's commands are missing."""
    if shutil.which("scancel"):
        command = ["scancel", f"--signal={name}", os.environ["SLURM_JOB_ID"]]
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False


def _seen_from_here(folder: Path, record: RunRecord, rank0: psutil.Process, since: float) -> dict[int, psutil.Process]:
    """Ranks on this node, as they themselves have said."""
    found = {0: rank0}
    for rank in range(1, record.ranks // record.nodes):
        word = rank_word(folder, rank)
        if word.get("time", 0) > since - EARLIER and word.get("state") == "running" and psutil.pid_exists(word["pid"]):
            found[rank] = psutil.Process(word["pid"])
    return found


def _end(folder: Path, verdict: dict, rank0: psutil.Process) -> None:
    if "traceback" in verdict and _signal_all("USR1"):  # stacks of ranks on other nodes, too
        time.sleep(DUMP)
        verdict["traceback"] = last_log_lines(folder, verdict["rank"])
    (folder / "logs" / RESERVE).unlink(missing_ok=True)
    said = read_json(folder / "status.json") or {}
    write_json(folder / "status.json", said | verdict | {"status": Status.FAILED, "finished": time.time()})
    rank0.send_signal(signal.SIGKILL)
