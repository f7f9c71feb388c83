"""Makes the ranks of `%%ranks` cells: imports torch once, then forks a process per rank, which takes no time at all.

Reads requests from its standard input, one JSON line each, {"folder", "ranks"}, and answers each with a line once every
rank has ended. Ends with its input, and so with the notebook's kernel.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from ...hangs.compare import find_hang
from ...hangs.entered import RankRecord, parse
from ...hangs.own_loop import PLAN, order_in
from ...hangs.rank_server import SOCKETS_VARIABLE, ask_lists, remove, serve_here, socket_folder, with_groups
from ...hangs.stacks import Frame, main_stack
from ...hangs.words import NO_ORDER, hang_words
from ...run.ranks.address import free_port
from ...run.ranks.rank_imports import AHEAD_OF_CELLS
from ..pictures.rank_moves import Moves, can_run, cpu_seconds_of, one_waits
from .rank_failures import note_failure, tell_failures

NOTHING_MOVED = "nothing moved"
LOOK_S = 0.5
"""Time between two looks at what ranks compute."""
STACK_S = 3.0
"""Time that a rank has to write down its stack."""
LIMIT_S = 120
"""Ranks that are busy for longer are ended."""


def serve() -> None:
    """Answer requests until there are no more."""
    import torch

    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    for name in AHEAD_OF_CELLS:
        import_module(name)  # so that no rank of any cell spends its time on it
    gc.freeze()  # in a rank, a collection would look through all of that, and copy the memory that a fork shares
    for line in sys.stdin:
        request = json.loads(line)
        _run(Path(request["folder"]), request["ranks"])
        print("done", flush=True)


def _run(folder: Path, ranks: int) -> None:
    port = free_port()
    sockets = socket_folder(f"ranks {os.getpid()}")  # the ranks inherit its name
    os.environ[SOCKETS_VARIABLE] = str(sockets or "")
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _rank(folder, rank, ranks, port)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        running[pid] = rank
    try:
        _wait(running, folder, sockets)
    finally:
        for pid in running:  # all of them first: one that runs on would tell of the connection that another one closed
            os.kill(pid, signal.SIGSTOP)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if sockets is not None:
            remove(sockets)


def _wait(running: dict[int, int], folder: Path, sockets: Path | None) -> None:
    """Wait until all have ended, or one has failed, or they hang: then each says where it stands. End all."""
    why, failed, end = "", [], time.monotonic() + LIMIT_S
    moves, looked = Moves(), time.monotonic()
    records: dict[int, RankRecord] = {}
    while running and not why:
        failed = [rank for rank, status in _ended(running) if status]
        if failed:
            why = "a rank had failed"
        elif time.monotonic() > end:
            why = f"its {LIMIT_S} s were over"
        elif time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            if moves.are_none(looked, cpu_seconds_of(running), can_run=any(map(can_run, running))):
                records = _records(running, sockets)
                why = NOTHING_MOVED if one_waits(records, _frames(running, folder), _at_end(running, folder)) else ""
        time.sleep(0.01)
    time.sleep(0.3 if running else 0)  # the others may be about to fail as well
    failed += [rank for rank, status in _ended(running) if status]
    if failed:
        why = f"rank {tell_failures(folder, failed)} had failed"
    order = NO_ORDER if sockets is None else order_in(sockets / PLAN) or NO_ORDER
    hang = find_hang(records, order.fit) if why == NOTHING_MOVED else None
    frames = {} if failed else _frames(running, folder)
    named = f"\n[{hang_words(hang, order, frames.get(hang.missing[0], []) if hang.missing else [])}]" if hang else ""
    for rank in running.values():
        (folder / f"{rank}.pt").unlink(missing_ok=True)  # what a rank saved counts only if it came to its end
        stack = "" if failed else (folder / f"{rank}.stack").read_text(errors="replace")
        with (folder / f"{rank}.log").open("a") as log:
            log.write(f"{stack}{named}\n[ended here, since {why}]\n")


def _records(running: dict[int, int], sockets: Path | None) -> dict[int, RankRecord]:
    """Return which collectives each rank has entered, as far as they tell."""
    records: dict[int, RankRecord] = {}
    for pid, rank in running.items() if sockets is not None else ():
        assert sockets is not None
        records[rank] = RankRecord(rank)
        try:
            records[rank] = with_groups(parse(rank, *ask_lists(sockets, rank)), sockets)
        except TimeoutError:
            records[rank] = RankRecord(rank, process=psutil.Process(pid).status())
        except (OSError, ValueError):
            continue
    return records


def _frames(running: dict[int, int], folder: Path) -> dict[int, list[Frame]]:
    """Return the stack of each rank, the innermost frame first, that it now writes into its RANK.stack."""
    for pid, rank in running.items():
        (folder / f"{rank}.stack").write_text("")
        os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_S
    texts: dict[int, str] = {}
    before: dict[int, str] | None = None
    while (texts != before or not all(texts.values())) and time.monotonic() < end:
        time.sleep(0.1)
        before, texts = texts, {rank: (folder / f"{rank}.stack").read_text() for rank in running.values()}
    return {rank: main_stack(text) for rank, text in texts.items()}


def _at_end(running: dict[int, int], folder: Path) -> list[int]:
    """Return the ranks that have run the cell, and wait until the others have run it, too."""
    return [rank for rank in running.values() if (folder / f"{rank}.ran").exists()]


def _ended(running: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (rank, status) of those that have ended, and forget them."""
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield running.pop(pid), status


def _rank(folder: Path, rank: int, ranks: int, port: int) -> int:
    """Be one rank: run the folder's cell.py, joined to the others; 1 if it fails, with the error in `RANK.failed`."""
    import torch
    import torch.distributed as dist

    os.setpgid(0, 0)
    # After a fork torch makes its pool of threads anew. Where two threads do so at once, this one and autograd's,
    # the process aborts ("Invalid thread pool!", torch 2.15): let this one do it, while it is alone.
    torch.set_num_threads(1)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stack = os.open(folder / f"{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks)}
    serve_here()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    saved: dict[str, Any] = {}

    def save(**values: Any) -> None:
        saved.update(values)
        torch.save(saved, folder / f"{rank}.pt")

    cell = folder / "cell.py"
    names = {"torch": torch, "dist": dist, "rank": rank, "world_size": ranks, "save": save, "__name__": "cell"}
    names["__file__"] = str(cell)
    try:
        exec(compile(cell.read_text(encoding="utf-8"), str(cell), "exec"), names)
        if dist.is_initialized():
            (folder / f"{rank}.ran").touch()
            dist.barrier()  # it fails where another rank has failed, later than that one
    except Exception as error:
        note_failure(folder, rank, error)
        (folder / f"{rank}.pt").unlink(missing_ok=True)
        return 1
    return 0


if __name__ == "__main__":
    serve()
