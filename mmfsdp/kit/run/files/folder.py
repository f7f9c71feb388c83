"""Read and write the files of a run folder: paths, whole files, metrics rows, events, and files that grow.

Any process may read these files while they are written, and may find half a line after a crash. So a whole file is
written under a temporary name and renamed, a row is appended in one system call, and readers skip damaged rows.

A folder may come from somebody else, so what it holds is data: texts come without control sequences, numbers are
numbers, and nothing is written through a link, which may lead to any file of whoever reads.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ....params import TrackerKind
from ....params.base import MAX_YAML_BYTES, ParamError, read_yaml, without_controls
from ...hangs.stacks import without_callers

PathLike = str | os.PathLike[str]
Row = dict[str, Any]

HEARTBEAT_BYTES = 120
"""Bytes of a heartbeat's text, which is followed by its time."""

NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of opening a file that does not exist."""

MAX_FILE_BYTES = 1 << 26
"""Bytes that are read of a file that is read as a whole: far more than any of them has. Its values take more."""
LAST_ROWS_BYTES = 20_000
"""Bytes of the newest metrics that tell a run's state: some fifty steps."""
MAX_METRICS_BYTES = 1 << 28
"""Bytes of metrics that are read at once: some 400,000 rows. Of more, the newest."""

FILE_MODE = 0o644
"""Files of a run are never writable by group or others, whatever the umask."""

MAX_NUMBER = 1e300
"""Larger whole numbers are no figures of a run: they do not fit into a float."""
NUMBER = (int, float)
Types = Mapping[str, type | tuple[type, ...]]
"""The type of each key that a reader knows."""

CALLERS_BYTES = 20_000
"""Bytes that the frames which lead to a rank's call may take in its log."""
EVENT_KINDS = ("begun", "phase", "saved", "drill", "killed", "preempted", "requeued", "resumed", "stopped", "failed")


def open_own(path: PathLike, mode: str) -> IO[bytes]:
    """Open an unbuffered binary file that, if it is new, only its owner may write.

    Raises OSError for a link, which may lead to another file of this user, and for a pipe that nobody reads.
    """
    try:
        return open(path, mode, buffering=0, opener=_open_without_links)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link stands where a file of the run belongs; remove it", str(path)) from None


def _open_without_links(name: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe that nobody reads would wait for ever. It changes nothing for a file.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)


def touch(path: PathLike) -> None:
    """Make an empty file if there is none. Raises OSError for a link."""
    open_own(path, "ab").close()


def make_folders(path: PathLike) -> None:
    """Make a folder, and those above it, that do not exist; whatever the umask, their owner alone may write them."""
    for folder in (*reversed(Path(path).absolute().parents), Path(path)):
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)


def make_inner_folder(path: PathLike) -> None:
    """Make a folder inside a run folder, if there is none. Its owner alone may write it. Raises OSError for a link."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "a link stands where a folder of the run belongs; remove it", str(path))
    os.makedirs(path, mode=0o755, exist_ok=True)


def is_inside(path: PathLike, folder: PathLike) -> bool:
    """Return True if a path leads into a folder, with all links followed; a link to itself leads nowhere."""
    real, home = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, home]) == home


def check_links(folder: PathLike) -> None:
    """Raise ParamError for a link anywhere in a run folder, or a folder of runs, that leads out of it.

    Somebody may have handed the folder over: whoever works in it would read, write or delete elsewhere. The folder
    itself may be below a link, as a home often is, and a link may lead to another place in the folder. What is inside
    a tracker's own folder is its library's: W&B links to its log.
    """
    for parent, folders, files in os.walk(folder):  # does not follow links
        if os.path.basename(parent) in list(TrackerKind):
            folders.clear()
            continue
        for path in (os.path.join(parent, name) for name in [*folders, *files]):
            if os.path.islink(path) and not is_inside(path, folder):
                target = without_controls(os.readlink(path))
                words = (
                    f"{without_controls(path)} is a link; remove it, or put what it leads to, {target}, in its place"
                )
                raise ParamError("run", words)


def open_regular(path: PathLike) -> IO[bytes]:
    """Open a file for reading. Raise FileNotFoundError for anything but a regular file.

    To open a FIFO waits for somebody who writes, and a link to /dev/zero has no end: in a shared folder of runs, one of
    them would stop everybody who lists the runs.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileNotFoundError(f"{path} is not a regular file")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_file(path: PathLike, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return what a file holds, at most `limit` bytes. Raise FileNotFoundError for anything but a regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(min(size, limit))  # read(n) takes n bytes of memory before it reads


def write_text(path: PathLike, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, also after a crash."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: PathLike, content: bytes) -> None:
    """Replace a file in one step, as `write_text` does."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    data = memoryview(content)
    try:
        with open_own(temporary, "wb") as file:
            while data:  # a nearly full disk takes only a part at a time
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk; an interrupt
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: PathLike, value: Any) -> None:
    """Replace a file by a value as JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: PathLike) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file or it holds anything else."""
    try:
        value = _parse(read_file(path))
    except (*NO_FILE, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_params_yaml(folder: PathLike) -> Row:
    """Return the plain data of params.yaml. Raises FileNotFoundError, and ParamError for a file without parameters."""
    path = Path(folder) / "params.yaml"
    values = read_yaml(read_file(path, limit=MAX_YAML_BYTES + 1), name=str(path)) or {}
    if not isinstance(values, dict):
        raise ParamError(str(path), "is not a mapping of field names to values")
    return values


def _parse(data: bytes) -> Any:
    """Return the value of a JSON text, its texts without control sequences. Raises ValueError, RecursionError."""
    text = data.decode("utf-8")
    value = json.loads(text)
    if "\\" in text or without_controls(text) != text:  # else nothing is there to be left out, as in most rows
        return _without_controls(value)
    return value


def _without_controls(value: Any) -> Any:
    """Return a value of JSON with all its texts cleaned, keys too."""
    if isinstance(value, str):
        return without_controls(value)
    if isinstance(value, list):
        return [_without_controls(item) for item in value]
    if isinstance(value, dict):
        return {without_controls(key): _without_controls(item) for key, item in value.items()}
    return value


def of_types(values: Row, types: Types) -> Row:
    """Return values as a reader knows them: a known key whose value has another type is left out."""
    return {key: value for key, value in values.items() if key not in types or _has_type(value, types[key])}


def _has_type(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) > MAX_NUMBER)


def metrics_path(folder: PathLike, rank: int = 0) -> Path:
    """Return the path of a rank's metrics."""
    return Path(folder) / (f"metrics-rank{rank}.jsonl" if rank else "metrics.jsonl")


def heartbeat_path(folder: PathLike, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return Path(folder) / "logs" / f"rank{rank}.beat"


def put_heartbeat(file: IO[bytes], activity: str, at: float) -> None:
    """Write what a rank does, and since when in unix seconds, into its heartbeat.

    In place and of one length: a reader never finds half of it.
    """
    words = activity.encode()[:HEARTBEAT_BYTES].decode("utf-8", "ignore")
    os.pwrite(file.fileno(), f"{words:<{HEARTBEAT_BYTES}} {at:.3f}\n".encode(), 0)


def read_heartbeat(folder: PathLike, rank: int) -> tuple[str, float] | None:
    """Return what a rank last reported that it does, and when by the clock of its machine; None if there is nothing."""
    try:
        with open_regular(heartbeat_path(folder, rank)) as file:  # NFS asks its server at each open
            text = file.read(2 * HEARTBEAT_BYTES).decode("utf-8", "replace")
    except NO_FILE:
        return None
    activity, _, written = text.partition("\n")[0].rpartition(" ")
    try:
        return without_controls(activity).strip()[:HEARTBEAT_BYTES], float(written)
    except ValueError:  # it has reported nothing yet
        return None


def log_paths(folder: PathLike) -> list[tuple[int, Path]]:
    """Return (rank, path) of every rank log, oldest job first."""
    logs = []
    for path in (Path(folder) / "logs").glob("*_log.out"):
        match = re.fullmatch(r".+_(\d+)_log\.out", path.name)
        if match and path.exists():  # a link may lead nowhere
            logs.append((path.stat().st_mtime, int(match[1]), path))
    return [(rank, path) for _, rank, path in sorted(logs)]


def last_log_lines(folder: PathLike, rank: int, *, size: int = 4000) -> str:
    """Return the last `size` bytes that a rank has written, from the start of a line; empty if there are none.

    Stacks are without the frames that lead to the rank's call, of which there may be dozens.
    """
    paths = [path for number, path in log_paths(folder) if number == rank]
    if not paths:
        return ""
    log = GrowingFile(paths[-1])
    text = without_callers(without_controls(log.read(size + CALLERS_BYTES, newest=True).decode("utf-8", "replace")))
    return newest_lines(text, size, is_cut=log.skipped > 0)


def newest_lines(text: str, size: int, *, is_cut: bool = False) -> str:
    """Return the last `size` characters of a text, from the start of a line. is_cut: it does not begin with one."""
    is_cut = is_cut or len(text) > size
    text = text[-size:]
    return text.partition("\n")[2] if is_cut and "\n" in text else text


def last_line(path: PathLike) -> str:
    """Return the last line of a log that is not empty, cut at 300 characters; "" if there is none."""
    lines = last_bytes(path).strip().splitlines()
    return lines[-1][:300] if lines else ""


def last_bytes(path: PathLike, *, size: int = 4000) -> str:
    """Return the last `size` bytes of a file as text; "" if there is no such file."""
    return without_controls(GrowingFile(Path(path)).read(size, newest=True).decode("utf-8", "replace"))


@dataclass
class GrowingFile:
    """Read what is appended to a file, each byte once. Everything that follows a log or metrics reads through this."""

    path: Path
    offset: int = 0
    """Bytes read or skipped so far."""
    restarted: bool = False
    """True if the last read found a new or shorter file of this name, and began at its start."""
    skipped: int = 0
    """Bytes that the last read left out."""
    inode: int = field(default=0, repr=False)
    """The inode of the file that was read last; 0 before any."""

    def read(self, limit: int = -1, *, newest: bool = False) -> bytes:
        """Return at most `limit` new bytes (-1: all): the oldest of them, or with `newest` the last ones."""
        self.restarted, self.skipped = False, 0
        try:
            status = os.stat(self.path)
            if (status.st_ino, status.st_size) == (self.inode, self.offset):
                return b""  # of a thousand ranks, most have written nothing: do not open their files
            file = open_regular(self.path)
        except NO_FILE:
            return b""
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.restarted = self.offset > 0
                self.inode, self.offset = status.st_ino, 0
            if newest and limit >= 0:
                self.skipped = max(0, status.st_size - self.offset - limit)
            start = self.offset + self.skipped
            file.seek(start)
            # read(n) takes n bytes of memory before it reads
            data = file.read(min(limit, max(0, status.st_size - start)) if limit >= 0 else -1)
        self.offset += self.skipped + len(data)
        return data


RESULT_TYPES: Types = {
    "heldout_exact_match": NUMBER,
    "unseen_combination_exact_match": NUMBER,
    "text_only_exact_match": NUMBER,
    "seconds": NUMBER,
    "wire_bytes_predicted": NUMBER,
    "wire_bytes_measured": NUMBER,
    "wire_measured": list,
    "world_size": int,
    "frozen_parameters_changed": int,
    "peak": dict,
    "skipped": dict,
    "captions": list,
    "no_captions": str,
    "stopped": str,
    "began_with": str,
    "scores": dict,
    "best": dict,
}


def read_result(folder: PathLike) -> Row:
    """Return what result.json holds, each value of its type; {} until it is written."""
    return of_types(read_json(Path(folder) / "result.json") or {}, RESULT_TYPES)


def best_words(best: Any) -> str:
    """Return the best score of a run in words, such as `exact 0.8 at step 6`; "" if there is none."""
    types: Types = {"step": int, "name": str, "score": NUMBER}
    if not isinstance(best, dict) or of_types(best, types).keys() < types.keys():
        return ""
    return f"{best['name'].removeprefix('-')[:40]} {best['score']:.4g} at step {best['step']}"


def parse_rows(lines: bytes) -> list[Row]:
    """Return the JSON objects in some lines; damaged lines are skipped."""
    rows = []
    for line in lines.splitlines():
        try:
            row = _parse(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


_METRICS = (
    "time loss heldout_loss grad_norm lr samples tokens samples_per_s tokens_per_s rank_tokens_per_s step_s data_s "
    "padding wire_bytes memory_bytes reserved_bytes alloc_retries mfu hfu mfu_6n "
    "gpu_use power_w temperature_c"
)
METRIC_TYPES: dict[str, Any] = dict.fromkeys(_METRICS.split(), NUMBER)
METRIC_TYPES |= {"step": int, "skipped_steps": int, "skipped_in_a_row": int, "scores": dict}
"""Columns of metrics.jsonl that are drawn, printed or computed with."""


def metrics_lines(folder: PathLike, rank: int = 0, *, last_bytes: int = MAX_METRICS_BYTES) -> bytes:
    """Return the last `last_bytes` of a rank's metrics, as they are written."""
    return GrowingFile(metrics_path(folder, rank)).read(last_bytes, newest=True)


def metrics_of(lines: bytes) -> list[Row]:
    """Return the metrics in some lines, one row per step."""
    return [of_types(row, METRIC_TYPES) for row in parse_rows(lines)]


def newest_metrics(lines: bytes) -> Row:
    """Return the last row of `metrics_of`, and parse no other; {} if there is none."""
    for line in reversed(lines.splitlines()):
        if rows := metrics_of(line):
            return rows[-1]
    return {}


def read_metrics(folder: PathLike, rank: int = 0, *, last_bytes: int = MAX_METRICS_BYTES) -> list[Row]:
    """Return a rank's metrics, one row per step: those in the last `last_bytes` of the file."""
    return metrics_of(metrics_lines(folder, rank, last_bytes=last_bytes))


def last_row(folder: PathLike, rank: int = 0) -> Row:
    """Return a rank's newest metrics; {} if there are none."""
    return newest_metrics(metrics_lines(folder, rank, last_bytes=LAST_ROWS_BYTES))


MAX_LOSS_STEPS = 100
LOSS_BYTES = 2000 * MAX_LOSS_STEPS
"""Bytes of a run's newest metrics that have the rows for `final_loss`."""
LOSS_TITLE = "loss (last 10%)"
"""Head of the column with `final_loss` in a table of text."""
ABOUT_LOSS = f"loss: the mean over the last tenth of a run's steps, at most {MAX_LOSS_STEPS} of them"


def final_loss(rows: Sequence[Row]) -> float | None:
    """Return the loss of a run as tables show it: the mean over the last tenth of its steps, at most MAX_LOSS_STEPS.

    That of a single step depends on its batch. None before the first step; nan where one of them is not a number.

    rows: the newest metrics of rank 0, of LOSS_BYTES or more.
    """
    steps = rows[-1].get("step", 0) if rows else 0
    losses = [row["loss"] for row in rows if "loss" in row][-min(max(1, steps // 10), MAX_LOSS_STEPS) :]
    return sum(losses) / len(losses) if losses else None


def drop_rows(path: PathLike, *, after: int) -> None:
    """Remove the rows of later steps from a file of rows, if there is one: a resumed run does these steps again."""
    rows = parse_rows(GrowingFile(Path(path)).read())
    earlier_rows = [row for row in rows if of_types(row, {"step": int}).get("step", 0) <= after]
    if len(earlier_rows) < len(rows):
        write_text(path, "".join(json.dumps(row) + "\n" for row in earlier_rows))


class RowsWriter:
    """Append rows to a file, one JSON line each, visible to readers immediately.

    With `after`, rows of later steps are removed first.
    """

    def __init__(self, path: PathLike, *, after: int | None = None):
        if after is not None:
            drop_rows(path, after=after)
        self._file = open_own(path, "a+b")
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        if self._file.read(1) not in (b"", b"\n"):  # half a line, from a crash
            self._file.write(b"\n")

    def write(self, row: Row) -> None:
        """Append one row. Numbers of other libraries become floats."""
        self._file.write(json.dumps(row, default=float).encode() + b"\n")


class MetricsWriter(RowsWriter):
    """Appends rows to a rank's metrics."""

    def __init__(self, folder: PathLike, rank: int = 0, *, after: int | None = None):
        super().__init__(metrics_path(folder, rank), after=after)


EVENT_TYPES: Types = {"time": NUMBER, "step": int, "kind": str, "text": str, "rank": int}


def add_event(folder: PathLike, kind: str, *, step: int, text: str, rank: int | None = None) -> None:
    """Append to events.jsonl. rank: the one that it is about, if it is one.

    Ranks, supervisor and others write to it, so each event is one system call.
    """
    assert kind in EVENT_KINDS, kind
    row = {"time": time.time(), "step": step, "kind": kind, "text": text}
    if rank is not None:
        row["rank"] = rank
    with open_own(Path(folder) / "events.jsonl", "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")


def read_events(folder: PathLike) -> list[Row]:
    """Return the events of a run, oldest first."""
    rows = parse_rows(GrowingFile(Path(folder) / "events.jsonl").read(MAX_FILE_BYTES, newest=True))
    events = [of_types(row, EVENT_TYPES) for row in rows]
    return [{"text": "", **event} for event in events if event.get("kind") in EVENT_KINDS and "step" in event]
