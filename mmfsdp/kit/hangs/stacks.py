"""Read the stacks that faulthandler has written: where in a person's own code a rank is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...own.modules import is_of_package, is_persons_file

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_ANY_FRAME = re.compile(r'^  File "(.+?)", line \d+')
_THREAD = re.compile(r"^(Current thread|Thread) 0x|^Stack \(most recent call first\):")
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
DATA_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"


def main_stack(log: str) -> list[Frame]:
    """Return the newest stack of the main thread in what a process has printed, the innermost frame first; [] if none.

    faulthandler lists the threads from the newest to the first, which is the main one.
    """
    frames: list[Frame] = []
    inside = False
    for line in log.splitlines():
        if _THREAD.match(line):
            frames, inside = [], True
        elif inside and (match := _FRAME.match(line)):
            frames.append(Frame(match[1], int(match[2]), match[3]))
        elif inside:
            inside = False
    return frames


def crash(log: str) -> str:
    """Return how a process crashed, such as `Segmentation fault in step (train.py, line 9)`, by what faulthandler has
    printed; "" if it has not."""
    crashes = list(_CRASH.finditer(log))
    if not crashes:
        return ""
    frame = own_frame(main_stack(log[crashes[-1].end() :]))
    return f"{crashes[-1][1]} in {frame}" if frame else crashes[-1][1]


def own_frame(frames: list[Frame]) -> Frame | None:
    """Return the innermost frame of a person's own code; else of this package; else the innermost one."""
    for frame in frames:
        if is_persons_file(frame.file):
            return frame
    for frame in frames:
        if is_of_package(frame.file):
            return frame
    return frames[0] if frames else None


def short_stacks(text: str) -> str:
    """Return a process's text without the frames that call a person's code, and of torch's frames only the first."""
    lines: list[str] = []
    torch_frames = 0
    for line in text.splitlines():
        frame = _ANY_FRAME.match(line)
        if frame and _calls_cells(frame[1]):
            continue
        is_of_torch = frame is not None and "site-packages/torch/" in frame[1]
        if is_of_torch and torch_frames:
            torch_frames += 1
            continue
        if torch_frames > 1:
            lines.append(f"  ... {torch_frames - 1} more of torch ...")
        torch_frames = int(is_of_torch)
        lines.append(line)
    return "\n".join(lines)


def without_callers(text: str) -> str:
    """Return a process's text without the frames that lead to `run_rank`: all ranks have them."""
    lines: list[str] = []
    outside = False
    for line in text.splitlines(keepends=True):
        frame = _FRAME.match(line.rstrip())
        if frame and outside:
            continue
        outside = frame is not None and frame[3] == "run_rank" and is_of_package(frame[1])
        lines.append(line)
    return "".join(lines)


def waits_for_workers(frames: list[Frame]) -> bool:
    """Return True if a rank waits for its data workers."""
    return any(DATA_LOADER.search(frame.file) and "get_data" in frame.function for frame in frames)


def _calls_cells(file: str) -> bool:
    """Return True for a file that calls the code of a `%%ranks` cell."""
    return file == "<frozen runpy>" or (is_of_package(file) and file.endswith("/ranks_cell/ranks_worker.py"))
