"""FileBytes: parts of a file by their byte ranges; of a compressed one as if it were unpacked."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ..params import ParamError
from .first_bytes import START_BYTES, what_it_is

GZIP = b"\x1f\x8b"
OPEN_FILES = 64
"""Files that a process keeps open: a folder may have thousands, and a process may open about 1,000."""
State = tuple[int, int, int]
"""A file's inode, size and time of change."""


class FileBytes:
    """The bytes of a file of text, which stay on disk: only what is asked for is read.

    A file that is compressed by gzip, or written in UTF-16, has no byte ranges of its own: each process unpacks it into
    a temporary file in UTF-8. Workers of a loader get the path alone, and open the file themselves.
    """

    def __init__(self, path: Path):
        self.path = path
        self._state: State | None = None
        """As it was when it was first read: byte ranges are of that content."""
        self._unpacked: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_unpacked": None}

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`, or up to the end of the file.

        Raises OSError where it cannot be read or has changed, ParamError where it cannot be unpacked.
        """
        file = self._opened()
        content = os.pread(file.fileno(), end - start, start)
        if file is not self._unpacked:
            check_unchanged(file, self._state)
        return content

    def lines(self) -> IO[bytes]:
        """Return a handle at the first byte, to read all lines in order. Raises as `read`."""
        file = self._opened()
        file.seek(0)
        return file

    def start(self) -> bytes:
        """Return its first bytes, for `what_it_is`. Raises as `read`."""
        return self.read(0, START_BYTES)

    def _opened(self) -> IO[bytes]:
        if self._unpacked is not None:
            return self._unpacked
        if self._state is None:
            self._state = state_of(os.stat(self.path))
        file = _open(self.path, self._state)
        start = os.pread(file.fileno(), START_BYTES, 0)
        if start.startswith(GZIP):
            self._unpacked = _without_gzip(self.path)
            return self._unpacked
        encoding = _wide_encoding(start)
        if encoding:
            self._unpacked = _in_utf8(self.path, encoding)
            return self._unpacked
        return file


def state_of(stat: os.stat_result) -> State:
    """Return what changes when a file is written or replaced."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_unchanged(file: IO[bytes], state: State | None) -> None:
    """Raise OSError if a file is not as it was."""
    # After a write in place, the byte ranges would give other rows under the names of these.
    if state_of(os.fstat(file.fileno())) != state:
        raise OSError("the file has changed since it was opened")


@lru_cache(OPEN_FILES)
def _open(path: Path, state: State) -> IO[bytes]:
    """Return a file, open; the one that was not used for the longest time is closed."""
    file = path.open("rb")
    check_unchanged(file, state)
    return file


def _wide_encoding(start: bytes) -> str:
    """Return UTF-16 or UTF-32 where a file begins as text in it, else ""."""
    if what_it_is(start) or not start.startswith((b"\xff\xfe", b"\xfe\xff", b"\0", b"[\0", b"{\0")):
        return ""
    encoding = json.detect_encoding(start)
    return encoding if encoding.startswith(("utf-16", "utf-32")) else ""


def _without_gzip(path: Path) -> IO[bytes]:
    """Return a temporary file with what a gzip file holds. Raises ParamError if it is damaged."""
    unpacked = tempfile.TemporaryFile()
    try:
        with gzip.open(path) as content:
            shutil.copyfileobj(content, unpacked, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        unpacked.close()
        message = f"{str(path)!r} is a damaged gzip file ({error}); download it again"
        raise ParamError("path", message) from None
    unpacked.flush()
    return unpacked


def _in_utf8(path: Path, encoding: str) -> IO[bytes]:
    """Return a temporary file with a text in UTF-8. Raises ParamError if it is not in that encoding."""
    unpacked = tempfile.TemporaryFile()
    try:
        with path.open(encoding=encoding, newline="", errors="surrogatepass") as text:
            while part := text.read(1 << 20):
                unpacked.write(part.encode("utf-8", "surrogatepass"))
    except UnicodeError as error:
        unpacked.close()
        message = f"{str(path)!r} begins as text in {encoding}, and is not ({error}); save it in UTF-8"
        raise ParamError("path", message) from None
    unpacked.flush()
    return unpacked
