"""Ask the ranks of a run that hangs which collectives they have entered, on all their nodes.

A rank answers on a socket of its node (kit/hangs/rank_server.py). A local run is asked by its supervisor. In a Slurm
job the first rank of each node starts an asker, a process that waits for a request in the run folder and writes the
answers there: only the folder is shared by all nodes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from ...hangs.entered import RankRecord, parse
from ...hangs.own_loop import PLAN
from ...hangs.rank_server import (
    PICKLED_LIST,
    SOCKETS_VARIABLE,
    ask,
    ask_lists,
    own_groups,
    own_lists,
    ranks_in,
    remove,
    set_recorder,
    socket_folder,
    with_groups,
)
from ..files.folder import make_inner_folder, read_json, touch, write_bytes, write_text
from ..files.run_record import RunRecord, rank_status
from ..launchers.registry import launcher_named
from ..local import is_same_process

REQUEST = "ranks.ask"
"""File in logs/ by which the askers are told to ask."""
FOR_TORCHFRTRACE = "flight_recorder"
"""Folder in logs/ with NCCL's collectives of each rank as torch pickles them. Nothing here ever reads them."""
KEPT_PLAN = "ranks.plan.json"
"""File in logs/: the plan of a loop of one's own that has failed."""
ASKER_POLL_S = 1.0
OTHER_NODES_TIMEOUT_S = 10.0
"""Seconds that the answers of other nodes may take: the file server may show a new file late."""


def prepare_sockets(record: RunRecord) -> Path | None:
    """Set the environment of this process and its children so that ranks serve what they have entered.

    Return the folder of this node's sockets; None where there can be none.
    """
    set_recorder()
    os.environ.pop(SOCKETS_VARIABLE, None)  # of whoever launched this run
    folder = socket_folder(record.identity)
    if folder is not None:
        os.environ[SOCKETS_VARIABLE] = str(folder)
    return folder


def sockets_here() -> Path | None:
    """Return the folder of this node's sockets, as `prepare_sockets` has set it."""
    folder = os.environ.get(SOCKETS_VARIABLE)
    return Path(folder) if folder else None


def ask_here(folder: Path, sockets: Path) -> dict[int, RankRecord]:
    """Ask the ranks of this node. Those that cannot answer, such as before they have joined, are left out."""
    ranks = ranks_in(sockets)
    with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
        answers = pool.map(lambda rank: _ask_rank(folder, sockets, rank), ranks)
    return {record.rank: record for record in answers if record is not None}


def _ask_rank(folder: Path, sockets: Path, rank: int) -> RankRecord | None:
    try:
        answers = ask_lists(sockets, rank)
        record = with_groups(parse(rank, *answers), sockets)
    except TimeoutError:
        return RankRecord(rank, process=_process_state(folder, rank))
    except (OSError, ValueError):
        return None
    if b'"nccl:' in b"".join(answers):
        _keep_for_torchfrtrace(folder, sockets, rank)
    return record


def keep_entered(folder: Path, rank: int) -> None:
    """Write what this rank has entered into the run folder: it fails, and cannot be asked later."""
    with suppress(Exception):  # the cause is the exception that ends the rank, and nothing here
        if entered := parse(rank, *own_lists()).entries:
            groups = {name: tuple(ranks) for name, ranks in own_groups().items()}
            _write_answer(folder, RankRecord(rank, entered, groups=groups))
            _keep_plan(folder)


def _keep_plan(folder: Path) -> None:
    """Keep the plan of a loop of one's own: it lies beside the sockets, on this node, and goes with them."""
    sockets = sockets_here()
    if sockets is not None and (sockets / PLAN).exists():
        write_bytes(folder / "logs" / KEPT_PLAN, (sockets / PLAN).read_bytes())


def kept(folder: Path, record: RunRecord) -> dict[int, RankRecord]:
    """Return what ranks that failed have entered, by rank; an empty record for those that could not write it."""
    records = {}
    for rank in range(record.ranks):
        records[rank] = _read_answer(folder, rank) or RankRecord(rank)
    return records


def _process_state(folder: Path, rank: int) -> str:
    """Return the state of a rank's process, as psutil names it; "" if it is not known."""
    status = rank_status(folder, rank)
    pid, start = status.get("pid", 0), status.get("start", 0.0)
    with suppress(psutil.Error, ValueError, OverflowError):
        if is_same_process(pid, start):
            return psutil.Process(pid).status()
    return ""


def _keep_for_torchfrtrace(folder: Path, sockets: Path, rank: int) -> None:
    with suppress(OSError, LookupError):
        make_inner_folder(folder / "logs" / FOR_TORCHFRTRACE)
        write_bytes(folder / "logs" / FOR_TORCHFRTRACE / f"nccl_trace_rank_{rank}", ask(sockets, rank, PICKLED_LIST))


def ask_ranks(folder: Path, record: RunRecord) -> dict[int, RankRecord]:
    """Return what each rank of a run has entered, by rank; an empty record for those that did not answer."""
    records = {rank: RankRecord(rank) for rank in range(record.ranks)}
    sockets, here = sockets_here(), launcher_named(record.executor).here
    if not here:
        with suppress(OSError):  # as on a disk that is full
            touch(folder / "logs" / REQUEST)
    if sockets is not None:
        records |= ask_here(folder, sockets)
    for answer in records.values():  # also for the person, who may want to see more
        if answer.answered:
            with suppress(OSError):  # the disk may be full: that is no reason to tell less
                _write_answer(folder, answer)
    if not here:
        records |= _answers_of_askers(folder, records)
    return records


def _answers_of_askers(folder: Path, records: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """Wait for the answers of ranks of other nodes."""
    missing = {rank for rank, record in records.items() if not (record.answered or record.process)}
    answers: dict[int, RankRecord] = {}
    end = time.monotonic() + OTHER_NODES_TIMEOUT_S
    while missing - answers.keys() and time.monotonic() < end:
        for rank in missing - answers.keys():
            if answer := _read_answer(folder, rank):
                answers[rank] = answer
        time.sleep(0.1)
    return answers


def answer_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's answer."""
    return folder / "logs" / f"rank{rank}.collectives.json"


def _write_answer(folder: Path, answer: RankRecord) -> None:
    write_text(answer_path(folder, answer.rank), json.dumps(answer.to_dict()))  # a line: there may be thousands


def _read_answer(folder: Path, rank: int) -> RankRecord | None:
    values = read_json(answer_path(folder, rank))
    try:
        return None if values is None else RankRecord.from_dict(values)
    except ValueError:
        return None


def wait_for_request(folder: Path, rank_pid: int) -> None:
    """Ask this node's ranks as soon as somebody wants to know, and write their answers into the run folder."""
    sockets = sockets_here()
    if sockets is None:
        return
    while os.getppid() == rank_pid:
        if (folder / "logs" / REQUEST).exists():
            for record in ask_here(folder, sockets).values():
                _write_answer(folder, record)
            break  # the job ends
        time.sleep(ASKER_POLL_S)
    remove(sockets)
