"""Rows: what a part has measured, written line by line, so that a part that is stopped leaves what it has."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu.device import free_memory


class Rows:
    """The rows of one part."""

    def __init__(self, path: Path, *, seconds: float, show: bool = True) -> None:
        """path: a file of JSON lines. seconds: the time that the part may take. show: print them, too."""
        self.path = path
        self.show = show
        self.folder = path.parent
        self._start = time.monotonic()
        self._end = self._start + seconds
        self.failed = False

    @property
    def seconds_left(self) -> float:
        """The time until the part is stopped."""
        return self._end - time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the file."""
        self.failed = self.failed or "failed" in row
        with self.path.open("a") as file:
            file.write(json.dumps(row | {"at s": round(time.monotonic() - self._start, 1)}) + "\n")
        if self.show:
            print(f"  {line(row)}", flush=True)

    def attempt(self, about: dict[str, Any], work: Callable[[], dict[str, Any]]) -> bool:
        """Write `about` and what `work` returns, or why it failed; the rows after it are measured all the same.

        Returns False if the GPU has too little memory for it, which is no failure.
        """
        enough_memory = True
        try:
            row = about | work()
        except torch.OutOfMemoryError:
            row, enough_memory = about | {"stopped": "out of memory"}, False
        except Exception as error:
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            row = about | {"failed": f"{type(error).__name__}: {first_line[:200]}"}
        self.write(row)
        free_memory()
        return enough_memory


def line(row: dict[str, Any]) -> str:
    """Return a row of any keys as text."""
    cells = []
    for key, value in row.items():
        cells.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(cells)
