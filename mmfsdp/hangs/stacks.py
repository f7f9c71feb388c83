"""Read the stacks that faulthandler has written: where in a person's own code a rank is."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

PACKAGE = str(Path(__file__).resolve().parent.parent) + "/"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x|^Stack \(most recent call first\):")
_LIBRARIES = re.compile(r"/(site|dist)-packages/|^<frozen ")
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


def own_frame(frames: list[Frame]) -> Frame | None:
    """Return the innermost frame of a person's own code; else of this package; else the innermost one."""
    for is_ours in (False, True):
        for frame in frames:
            if not _is_library(frame.file) and frame.file.startswith(PACKAGE) == is_ours:
                return frame
    return frames[0] if frames else None


def waits_for_workers(frames: list[Frame]) -> bool:
    """Return True if a rank waits for its data workers."""
    return any(DATA_LOADER.search(frame.file) and "get_data" in frame.function for frame in frames)


def _is_library(file: str) -> bool:
    standard = sysconfig.get_path("stdlib") + "/"
    return bool(_LIBRARIES.search(file)) or file.startswith(standard)
