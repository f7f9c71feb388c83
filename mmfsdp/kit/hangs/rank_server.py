"""Serve the flight recorder of a rank on a Unix socket, and ask for it.

torch keeps a list of the collectives that a rank has entered, its flight recorder. A server in C++ answers for it while
Python hangs. Both are private in torch: without them, a rank is named by its heartbeat alone.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from .entered import RankRecord

SOCKETS_VARIABLE = "MMFSDP_HANG_SOCKETS"
"""Environment variable of ranks that somebody asks when they hang: the folder of their sockets."""
NODE_VARIABLE = "SLURMD_NODENAME"
LISTS, PICKLED_LIST = ("fr_trace_json", "dump_nccl_trace_json"), "dump_nccl_trace_pickle"
"""Handlers of torch's server: the lists of gloo's and of NCCL's collectives as JSON; and NCCL's as torchfrtrace reads
it."""
ANSWER_TIMEOUT_S = 3.0
MAX_ANSWER_BYTES = 1 << 26
MAX_PATH_BYTES = 100
"""Bytes of a socket's path: Linux takes 107, macOS 103."""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "orangefs", "fuse", "panfs")

_servers: list[Any] = []
"""The server of this process."""


def socket_folder(key: str) -> Path | None:
    """Make the folder for the sockets of this node's ranks, which their user alone may open. None if there is none.

    Every process of a node gets the same folder for the same key. It lies in node-local temporary space: sockets do not
    work on most network file systems.
    """
    node = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    name = "mmfsdp-" + hashlib.sha256(f"{key} {node}".encode()).hexdigest()[:16]
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        folder = Path(parent) / name
        too_long = len(os.fsencode(_socket_path(folder, rank=10**6))) > MAX_PATH_BYTES
        if too_long or _is_on_network(parent) or not _make_private(folder):
            continue
        return folder
    return None


def _make_private(folder: Path) -> bool:
    """Make a folder of this user alone. Return False where somebody else has one of that name, or none can be made."""
    with suppress(FileExistsError):
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            if not isinstance(error, FileExistsError):
                return False
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _is_on_network(folder: str) -> bool:
    """Return True if a folder is on a network file system, as far as can be known."""
    path, kind, longest = os.path.realpath(folder), "", -1
    with suppress(OSError, psutil.Error):
        for mount in psutil.disk_partitions(all=True):
            inside = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
            if inside and len(mount.mountpoint) >= longest:
                kind, longest = mount.fstype, len(mount.mountpoint)
    return kind.startswith(NETWORK_FILE_SYSTEMS)


def _socket_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.sock"


def _groups_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.groups"


def set_recorder() -> None:
    """Let torch record collectives, before the process group is made. What a person has set stands."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # the default of torch 2.14; 0 turns it off


def serve_here() -> bool:
    """Answer for this rank where somebody asks its node's ranks when they hang, as in every run. Else return False."""
    folder, rank = os.environ.get(SOCKETS_VARIABLE), os.environ.get("RANK", "")
    return bool(folder) and rank.isdecimal() and serve(Path(str(folder)), int(rank))


def serve(folder: Path, rank: int) -> bool:
    """Answer, in this process and until it ends, who asks for this rank's collectives. Return False if torch cannot."""
    if _servers:
        return True
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:  # a build of torch without it
        return False
    path, process = _socket_path(folder, rank), os.getpid()
    try:
        path.unlink(missing_ok=True)  # of a process that was killed
        with _without_stderr():  # the server warns that it listens
            _servers.append(_WorkerServer(str(path), -1))
    except (OSError, RuntimeError, TypeError):
        return False

    def end() -> None:
        if os.getpid() != process:
            return  # a child process, as of data workers
        with _without_stderr(), suppress(RuntimeError):
            _servers.pop().shutdown()
        with suppress(OSError):
            path.unlink()
            _groups_path(folder, rank).unlink(missing_ok=True)
            folder.rmdir()  # by the last rank

    atexit.register(end)
    return True


def note_groups() -> None:
    """Write down which ranks each process group of this rank has, beside its socket: gloo's lists do not tell them."""
    folder, rank = os.environ.get(SOCKETS_VARIABLE), os.environ.get("RANK", "")
    if not folder or not _servers:
        return
    path = _groups_path(Path(folder), int(rank))
    with suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(own_groups()), encoding="utf-8")
        path.with_suffix(".new").rename(path)


def own_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group of this process, by its name; {} where torch does not have them so."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    with suppress(AttributeError, TypeError, ValueError):  # private in torch
        return {str(name): sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
    return {}


def noted_groups(folder: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """Return what a rank of this node has written down of its process groups; {} if it has not."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        values = json.loads(_groups_path(folder, rank).read_text(encoding="utf-8"))
        return {str(name): tuple(map(int, ranks)) for name, ranks in values.items()}
    return {}


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Leave out what C++ prints meanwhile."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def ranks_in(folder: Path) -> list[int]:
    """Return the ranks that have a socket in a folder."""
    ranks = []
    for path in folder.glob("rank*.sock"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal():
            ranks.append(int(number))
    return sorted(ranks)


def remove(folder: Path) -> None:
    """Remove the sockets of ranks that have ended, or are about to."""
    shutil.rmtree(folder, ignore_errors=True)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path):
        super().__init__("localhost", timeout=ANSWER_TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_TIMEOUT_S)
        self.sock.connect(str(self.path))


def ask_lists(folder: Path, rank: int) -> list[bytes]:
    """Return the lists of a rank of this node, as its torch has them. Raises TimeoutError and OSError as `ask` does."""
    answers = []
    for what in LISTS:
        with suppress(LookupError):
            answers.append(ask(folder, rank, what))
    return answers


def with_groups(record: RankRecord, folder: Path) -> RankRecord:
    """Return the record of a rank of this node with the process groups that it has written down."""
    return replace(record, groups=noted_groups(folder, record.rank) | record.groups)


def own_lists() -> list[bytes]:
    """Return the lists of this process, without a server; none before torch is imported."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [dump() for dump in dumps if dump is not None]


def ask(folder: Path, rank: int, what: str) -> bytes:
    """Return what the server of a rank of this node answers.

    Raises TimeoutError for a rank whose process does not run (stopped, or in the kernel), other OSError for one that
    has no server, and LookupError for a server without that handler.
    """
    connection = _UnixConnection(_socket_path(folder, rank))
    try:
        connection.request("POST", f"/handler/{what}")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise LookupError(what)
        return response.read(MAX_ANSWER_BYTES)
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
