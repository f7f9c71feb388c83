"""Reads metrics.jsonl as it grows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..runs import PathLike, metrics_path
from ..runs.files import NO_FILE, parse_rows

BITE = 8 << 20
"""Bytes that are read at once."""
WHOLE = 2 << 20
"""Of a file that is larger than this when it is opened, one row in so many is read that this many bytes are parsed."""
RARE = b'"heldout_loss"'
"""Rows that have this are all read."""


@dataclass
class Rows:
    """The rows of rank 0 of a run, each once, in their order."""

    path: PathLike
    anew: bool = False
    """Whether the last poll found another file, or one begun anew: what came before no longer holds."""
    _inode: int = 0
    _offset: int = 0
    _sparse_to: int = 0
    _every: int = 1

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """(rows written since the last call, whether there are more to be read at once)."""
        self.anew = False
        try:
            file = open(metrics_path(self.path), "rb")
        except NO_FILE:
            return [], False
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self.anew = self._offset > 0
                self._inode, self._offset = stat.st_ino, 0
                self._sparse_to, self._every = stat.st_size, max(1, round(stat.st_size / WHOLE))
            file.seek(self._offset)
            data = file.read(BITE)
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == BITE else 0)
        whole = data[:end]
        if self._every > 1 and self._offset < self._sparse_to:
            lines = whole.splitlines()
            kept = (line for i, line in enumerate(lines) if i % self._every == 0 or RARE in line)
            whole = b"\n".join([*kept, *lines[-1:]])
        self._offset += end
        return parse_rows(whole), len(data) == BITE
