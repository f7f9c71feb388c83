"""Show an error of a `%%ranks` cell: the person's own lines on the first rank that failed, and a line of each other.

The error of one rank ends the others, often with errors of their own ("Connection closed by peer"). Those say nothing
about the cause. So each rank that fails leaves a file, `RANK.failed`, and the process that waits for the ranks adds
their texts to the logs when it knows which was the first.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from ....own.modules import is_persons_file


def note_failure(folder: Path, rank: int, error: Exception) -> None:
    """Write down when this rank failed, with which error, and in which lines of the person's own code."""
    cell = str(folder / "cell.py")
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == cell:
            lines.append(f"line {frame.lineno}: {frame.line}")
        elif is_persons_file(frame.filename) and not _is_of_the_course(frame.filename):
            lines.append(f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}")
    failure = {"time_ns": time.time_ns(), "error": f"{type(error).__name__}: {error}", "lines": lines}
    (folder / f"{rank}.failed").write_text(json.dumps(failure), encoding="utf-8")


def tell_failures(folder: Path, ended: Iterable[int]) -> int:
    """Add what is shown of the ranks that ended with a failure to their logs. Return the rank that was the first."""
    failures, killed = {}, []
    for rank in sorted(ended):
        file = folder / f"{rank}.failed"
        if file.is_file():
            failures[rank] = json.loads(file.read_text(encoding="utf-8"))
        else:
            killed.append(rank)
            _add(folder, rank, "[this process ended without an error of Python: it was killed, or it ended itself]")
    # A killed rank is the cause of the others' errors, and has no time.
    first = killed[0] if killed else min(failures, key=lambda rank: failures[rank]["time_ns"])
    for rank, failure in failures.items():
        text = "\n".join([*failure["lines"], failure["error"]])
        if rank != first and not killed and failure["error"] == failures[first]["error"]:
            text = f"[failed with the same error as rank {first}]"
        elif rank != first:
            text = f"[failed after rank {first}, with {failure['error'].splitlines()[0]}]"
        _add(folder, rank, text)
    return first


def _add(folder: Path, rank: int, text: str) -> None:
    with (folder / f"{rank}.log").open("a", encoding="utf-8") as log:
        log.write(f"{text}\n")


def _is_of_the_course(file: str) -> bool:
    """Return True for a file of the course's own helpers, which a lesson's cell may have imported."""
    course = sys.modules.get("course")
    return course is not None and file.startswith(str(course.__file__).removesuffix("__init__.py"))
