"""Trust in a run folder: a digest of its parameters, and one of its own code, under a key of the user's own.

To resume a run is to run what its params.yaml names: on Slurm a Python, modules and setup commands, also from a
cluster's profile; and what its code/ holds. Somebody may have handed the folder over, and who owns it says nothing: an
unpacked archive is owned by whoever unpacked it. So `launch` leaves digests of both in run.json that only a key in the
user's home can make. Where one does not fit, `resume` shows what it would run, and goes on only if it is told to trust
that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...own.modules import code_in_use
from ...params import ParamError, RunParams
from ...params.base import leaves, read_yaml, without_controls
from ...params.own import own_fields
from ...params.run import with_cluster
from .files.folder import make_folders, read_file
from .files.run_record import RunRecord
from .own_code import CODE, code_of, read_code, writable_by_others

KEY_BYTES = 32
_trusted: dict[Path, tuple[bytes, dict[str, bytes]]] = {}
"""Run folders whose own code this process may run, and what they held then."""
MAX_VALUE_LENGTH = 500
"""Characters of a value that are shown."""


class UntrustedRun(ParamError):
    """A run that this user did not start with these parameters.

    lines: what it would run, a parameter or a file each.
    """

    def __init__(self, why: str, lines: list[str]):
        self.why, self.lines = why, lines
        fix = "read that; Run.trust() or resume(trust=True), or --trust on the command line, runs it"
        super().__init__("run", f"{why}; it would run {'; '.join(lines)}; {fix}")


def trust_run(folder: Path) -> None:
    """Let this process run the own code that a run folder holds now, whoever wrote it: see `own_code_of`.

    Raises ParamError for what no launch writes there.
    """
    _trusted[folder.absolute()] = _content(folder)


def was_told_to_trust(folder: Path) -> bool:
    """Return True if `trust_run` was called for a run folder in this process."""
    return folder.absolute() in _trusted


def _content(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """Return what decides what a run executes: its parameters and its own code."""
    return read_file(folder / "params.yaml"), read_code(folder)


@contextmanager
def own_code_of(folder: Path, params: RunParams) -> Iterator[None]:
    """Run the own code of a run in this process, as it was at its launch: to caption, to export, to look at samples.

    Without own code, and in the run's own ranks, nothing happens. Raises UntrustedRun as `check_trusted`, but not for a
    run that this process has started, nor where `trust_run` was called.
    """
    is_rank = code_in_use() is not None
    if own_fields(params) and not is_rank and _trusted.get(folder.absolute()) != _content(folder):
        check_trusted(folder, params)
    with code_of(folder):
        yield


def is_trusted(folder: Path) -> bool:
    """Return True if this user started the run of this folder, and nobody else can have changed it since."""
    try:
        return not _distrust(folder)
    except (ParamError, OSError):
        return False


def check_trusted(folder: Path, params: RunParams) -> None:
    """Raise UntrustedRun unless this user started the run of this folder, and nobody else can have changed it since.

    params: those to be resumed with.
    """
    why = _distrust(folder)
    if why:
        raise UntrustedRun(f"{folder}: {why}", [*what_runs(params), *code_lines(folder)])


def _distrust(folder: Path) -> str:
    """Return why the parameters in a run folder may be somebody else's; empty if they are this user's."""
    for path in (folder, folder / "logs", folder / "params.yaml"):
        if not os.path.lexists(path):
            continue
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return f"{path.name} is a link"
        if status.st_uid != os.getuid():
            return f"{path.name} belongs to another user"
        if status.st_mode & 0o022:
            return f"others may write into {path.name} (chmod go-w {path.name})"
    others = writable_by_others(folder)
    if others:
        return f"{others} belongs to another user, or others may write it"
    record = RunRecord.read(folder)
    if record is None or not record.digest:
        return "nothing shows that you started this run: it has no digest of its parameters"
    text = read_file(folder / "params.yaml").decode("utf-8")
    digest = params_digest(text)
    if not digest:
        return f"your key {key_path()} cannot be read or written, so nothing shows that you started this run"
    if not hmac.compare_digest(digest, record.digest):
        return "its params.yaml, or the cluster's profile that it names, is not the one that you started it with"
    if not hmac.compare_digest(code_digest(text, read_code(folder)), record.code_digest):
        return "a file in its code/ is not the one that you started it with, or was added or removed"
    return ""


def code_lines(folder: Path) -> list[str]:
    """Return the files of code/ that would run, a line each. Raises ParamError for what no launch writes there."""
    lines = []
    for name, content in read_code(folder).items():
        lines.append(without_controls(f"{folder / CODE / name} ({len(content):,} bytes)")[:MAX_VALUE_LENGTH])
    return lines


def what_runs(params: RunParams) -> list[str]:
    """Return the parameters that are not the defaults, as `name: value`; also from a cluster's profile."""
    resolved = params.to_dict() | {"launch": with_cluster(params.launch).to_dict()}
    defaults, lines = leaves(RunParams().to_dict()), []
    for name, value in leaves(resolved).items():
        if defaults.get(name) != value and name not in ("launch.name", "launch.folder"):
            lines.append(without_controls(f"{name}: {value}")[:MAX_VALUE_LENGTH])
    return lines or ["the defaults"]


def params_digest(text: str) -> str:
    """Return the digest of a params.yaml, and of the profile that it names, under the user's key; "" without these."""
    key = _read_key() or _make_key()
    if key is None:
        return ""
    try:
        launch = with_cluster(RunParams.from_dict(read_yaml(text, name="params.yaml") or {}).launch)
    except ParamError:
        return ""  # such as a profile that is not there: who starts or resumes the run says so
    return hmac.new(key, "\0".join((text, launch.to_yaml())).encode(), "sha256").hexdigest()


def code_digest(text: str, files: Mapping[str, bytes]) -> str:
    """Return the digest of the files of code/, of a run with this params.yaml, under the user's key.

    "" without files, or without a key.
    """
    key = _read_key() or _make_key()
    if key is None or not files:
        return ""
    parts = ["code", hashlib.sha256(text.encode()).hexdigest()]
    for name in sorted(files):
        parts += [name, hashlib.sha256(files[name]).hexdigest()]
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


def seal_of(values: Mapping[str, Any]) -> str:
    """Return the digest of what a file of a run holds as JSON, under the user's key; "" without a key."""
    key = _read_key() or _make_key()
    if key is None:
        return ""
    return hmac.new(key, b"seal\0" + json.dumps(values, sort_keys=True).encode(), "sha256").hexdigest()


def key_path() -> Path:
    """Return the path of the user's key."""
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "mmfsdp", "key")


def _read_key() -> bytes | None:
    """Return the user's key; None if there is none that nobody else can have read or written."""
    try:
        with open(key_path(), "rb") as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
            key = file.read(KEY_BYTES)
    except OSError:
        return None
    return key if is_private and len(key) == KEY_BYTES else None


def _make_key() -> bytes | None:
    """Make the user's key, in place of one that others could read, and return it; None where the home takes none."""
    path = key_path()
    temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    if not path.is_absolute():  # this user has no home
        return None
    try:
        make_folders(path.parent)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        if path.exists() and _read_key() is None:
            path.unlink()
        os.link(temporary, path)
    except OSError:  # a home that is full or closed; or another process was first
        pass
    try:
        temporary.unlink()
    except OSError:
        pass
    return _read_key()
