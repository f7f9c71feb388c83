"""Count what the core reads of safetensors files."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from io import FileIO
from typing import Any
from unittest import mock

from mmfsdp.core import tensor_files


class CountedFiles:
    """Counts the bytes that are read, and how often each file is opened."""

    def __init__(self) -> None:
        self.bytes = 0
        self.opened: Counter[str] = Counter()
        self.open_now = self.most_open = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[CountedFiles]:
        """Count while this is entered."""
        with mock.patch.object(tensor_files, "FileIO", self.open_file):
            yield self

    def open_file(self, path: str) -> CountedFile:
        """Open a file."""
        file = CountedFile(path)
        file.counts = self
        self.opened[path] += 1
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return file


class CountedFile(FileIO):
    """A file whose reads are counted."""

    counts: CountedFiles

    def readinto(self, memory: Any) -> int | None:
        """Read the next bytes."""
        size = super().readinto(memory)
        self.counts.bytes += size or 0
        return size

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self.counts.open_now -= 1
        super().close()
