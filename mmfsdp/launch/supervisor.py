"""The process that starts the ranks of one run, watches every one of them, and has the last word on the run.

It leads a session of its own, in which all processes of the run are: nothing that happens to the notebook or terminal
reaches them. submitit alone would not do: it tells of a failed rank only once rank 0 has ended, too.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import submitit

from ..runs import NOTICE, RESERVE, RunRecord, Status, last_row, note, write_json
from ..runs.processes import oom_kills
from ..runs.state import LESS_MEMORY, advice, failure_of, full_disk, last_log_lines, rank_word
from .job import VISIBLE, run_rank
from .lint import refusal
from .silence import Silence

POLL = 0.1
SETTLE = 0.3
"""Seconds after a first failure in which a rank that died silently is still taken for its cause."""
BEAT = 10.0
"""Seconds between signs of life."""
LINGER = 30.0
"""Seconds that processes may take to end after all ranks are done."""

ENDS = ("done", "preempted", "failed")
"""What ranks say last."""

Verdict = dict[str, Any]
"""The content of status.json: status, and where known reason, rank, traceback, job."""


def supervise(folder: Path, *, unseen: bool = False) -> None:
    """Run one run from its folder, to its end. unseen: nobody has linted it yet."""
    record = read_record(folder)
    watch = _Watch(folder, record)
    try:
        verdict = watch.refused() if unseen else None
        verdict = verdict or watch.asked_to_stop() or watch.run()
        (folder / "logs" / RESERVE).unlink(missing_ok=True)
        watch.say(**verdict | {"status": Status.STARTING})  # the cause at once, the end once all is stopped
    except Exception as error:
        (folder / "logs" / RESERVE).unlink(missing_ok=True)
        reason = f"its supervisor failed: {error}{advice(str(error), folder)}"
        verdict = {"status": Status.FAILED, "reason": reason, "traceback": traceback.format_exc()}
    record.stop()
    watch.say(**verdict, finished=time.time())
    if verdict["status"] is Status.FAILED:
        note(folder, "failed", step=last_row(folder).get("step", 0), text=verdict["reason"])


def read_record(folder: Path) -> RunRecord:
    """run.json, which is written once this process is known to live."""
    for _ in range(1000):
        if record := RunRecord.read(folder):
            return record
        time.sleep(0.01)
    raise SystemExit(f"{folder} has no run.json")


class _Watch:
    """One run: its job, the processes of its ranks, and what was said of it so far."""

    def __init__(self, folder: Path, record: RunRecord):
        self.folder, self.record = folder, record
        self.said: Verdict = {}
        self.ranks: dict[int, psutil.Process] = {}
        self.signal: int | None = None
        self.until = time.monotonic() + 60 * record.timeout_min
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, number: int, _: Any) -> None:
        self.signal = number

    def say(self, **more: Any) -> None:
        """Add to status.json."""
        self.said |= more
        write_json(self.folder / "status.json", self.said)

    def refused(self) -> Verdict | None:
        """What the lint has against it."""
        words = refusal(self.folder, stop=lambda: bool(self.asked_to_stop()))
        return {"status": Status.FAILED, "reason": words} if words else None

    def run(self) -> Verdict:
        """Start the ranks and watch them until there is a verdict; again, as often as they make room."""
        while (verdict := self._life())["status"] is Status.STARTING:
            note(self.folder, "requeued", step=verdict["step"], text="its ranks made room, and are started again")
            for word in (self.folder / "logs").glob("rank*.*"):  # they are the last life's
                word.unlink()
        return verdict

    def _life(self) -> Verdict:
        """Start the ranks and watch them until all have ended, or one has failed."""
        self.ranks, self.oom_kills = {}, oom_kills()
        self.job = submit_local(self.folder, self.record)
        self.say(status=Status.STARTING, job=self.job.job_id)
        silence = Silence(self.folder, self.record)
        while not (
            verdict := self.asked_to_stop() or self._failure() or self._completion() or silence.verdict(self.ranks)
        ):
            self._beat()
            self._drill()
            time.sleep(POLL)
        return verdict

    def _drill(self) -> None:
        """Pass a drill on, once each rank listens."""
        words = [rank_word(self.folder, rank) for rank in range(self.record.ranks)]
        asked = self.folder / "drill"
        if asked.exists() and all(word.get("state") == "running" for word in words):
            asked.unlink()
            for word in words:
                with suppress(ProcessLookupError):
                    os.kill(word["pid"], NOTICE)

    def _beat(self) -> None:
        """Let other machines see that somebody is here."""
        if time.time() - (self.folder / "status.json").stat().st_mtime > BEAT:
            os.utime(self.folder / "status.json")

    def asked_to_stop(self) -> Verdict | None:
        if (self.folder / "cancel").exists():
            return {"status": Status.CANCELLED, "reason": "cancelled"}
        if self.signal:
            return {"status": Status.CANCELLED, "reason": f"stopped by {signal.Signals(self.signal).name}"}
        if time.monotonic() > self.until:
            minutes = self.record.timeout_min
            return {"status": Status.FAILED, "reason": f"stopped after {minutes} min; raise launch.timeout_min"}
        return None

    def _completion(self) -> Verdict | None:
        words = [rank_word(self.folder, rank) for rank in range(self.record.ranks)]
        if not {word.get("state") for word in words} <= {"done", "preempted"}:
            return None
        until = time.monotonic() + LINGER
        while not self.job.done() and time.monotonic() < until:
            time.sleep(POLL)
        steps = [word["step"] for word in words if word["state"] == "preempted"]
        if not steps:
            return {"status": Status.COMPLETED}
        if not self.job.done():
            return {"status": Status.FAILED, "reason": f"its ranks made room, but did not end within {LINGER:g} s"}
        return {"status": Status.STARTING, "step": steps[0]}

    def _failure(self) -> Verdict | None:
        """The verdict on the first rank that failed. A rank that died without a word comes before all others: they
        fail for want of it, and say so sooner than its death shows."""
        if not any(self._failed()):
            return None
        time.sleep(SETTLE)
        silent, failed = self._failed()
        failed.sort(key=lambda word: word["time"])
        if silent:
            rank = min(silent)
            text = last_log_lines(self.folder, rank) or (self.folder / "logs" / "supervisor.log").read_text()[-4000:]
            reason = f"rank {rank} died without a traceback: killed from outside, out of memory, or a crash"
            if oom_kills() > self.oom_kills:
                reason += f"; the kernel has just killed for want of memory{LESS_MEMORY}"
            reason += full_disk(self.folder)
            reason += "".join(f"; then {failure_of(self.folder, word)['reason']}" for word in failed[:1])
            return {"status": Status.FAILED, "reason": reason, "rank": rank, "traceback": text}
        return {"status": Status.FAILED, **failure_of(self.folder, failed[0]), "time": failed[0]["time"]}

    def _failed(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Ranks whose process is gone without a word of its end, and the words of those that failed."""
        over = self.job.done()
        self._find_ranks()
        gone = [r for r in range(self.record.ranks) if over or (r in self.ranks and not _lives(self.ranks[r]))]
        words = {rank: rank_word(self.folder, rank) for rank in range(self.record.ranks)}
        silent = [rank for rank in gone if words[rank].get("state") not in ENDS]
        return silent, [word for word in words.values() if word.get("state") == "failed"]

    def _find_ranks(self) -> None:
        """Learn the process of each rank from submitit's controller, before the rank itself can say anything."""
        if len(self.ranks) == self.record.ranks:
            return
        try:
            for child in psutil.Process(int(self.job.job_id)).children():
                rank = child.environ().get("SUBMITIT_LOCAL_GLOBALID")
                if rank is not None:
                    self.ranks[int(rank)] = child
        except psutil.Error:
            return  # just born or just gone: the next look will tell


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def submit_local(folder: Path, record: RunRecord) -> Any:
    """The ranks as local processes, by submitit. Their environment is this process's."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
        OMP_NUM_THREADS=str(record.threads),
        PYTHONUNBUFFERED="1",
    )
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "CRITICAL")  # rank logs are for what the ranks say
    if loopback := {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())  # a laptop's network may come and go
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ[VISIBLE] = os.environ["CUDA_VISIBLE_DEVICES"]
    executor = submitit.AutoExecutor(folder=folder / "logs", cluster="local")
    executor.update_parameters(
        nodes=1,
        tasks_per_node=record.ranks,
        timeout_min=record.timeout_min + 10,  # the supervisor is first to stop it
        stderr_to_stdout=True,
    )
    return executor.submit(run_rank, str(folder))


def _free_port() -> int:
    """A port outside the range from which the system serves outgoing connections, so that it stays free a while."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port on 127.0.0.1 between 20000 and 32000")
