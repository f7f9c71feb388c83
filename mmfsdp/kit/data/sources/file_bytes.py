"""FileBytes: parts of a file by their byte ranges; of a compressed one as if it were unpacked."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tempfile
import threading
import zlib
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ....params import ParamError
from .first_bytes import START_BYTES, what_it_is

GZIP = b"\x1f\x8b"
OPEN_FILES = 64
"""Files that a process keeps open: a folder may have thousands, and a process may open about 1,000."""
LINE_BUFFER = 1 << 20
"""Bytes that are read at a time where all lines are read in order."""
State = tuple[int, int, int]
"""A file's inode, size and time of change."""


class FileBytes:
    """The bytes of a file of text, which stay on disk: only what is asked for is read.

    A file that is compressed by gzip, or written in UTF-16, has no byte ranges of its own: each process unpacks it into
    a temporary file in UTF-8. Workers of a loader get the path alone, and open the file themselves.

    Threads share the open files of a process, so nothing here uses the position of a file: all reads are `pread`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._state: State | None = None
        """State of the file when it was first read: byte ranges are of that content."""
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
        """Return a handle at the first byte, with a position of its own, to read all lines. Raises as `read`."""
        return io.BufferedReader(_FromStart(self._opened()), LINE_BUFFER)

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
        encoding = "" if start.startswith(GZIP) else _wide_encoding(start)
        if not start.startswith(GZIP) and not encoding:
            return file
        with _unpacking:
            if self._unpacked is None:  # otherwise another thread has unpacked it by now
                self._unpacked = _in_utf8(self.path, encoding) if encoding else _without_gzip(self.path)
            return self._unpacked


_unpacking = threading.Lock()
"""Held while a file is unpacked, so that two threads that read one file unpack it once."""


class _FromStart(io.RawIOBase):
    """Reads an open file from its first byte on. The file's own position, which other readers share, stays as it is."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """Return True: a buffered reader asks before it reads."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer, and return their number; 0 at the end of the file."""
        content = os.pread(self._file.fileno(), len(buffer), self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


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
