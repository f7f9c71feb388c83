"""`python -m course.measure [NOTEBOOK ...]`, in notebooks/: measure how long a machine needs for Run All of each
lesson, as it stands and with its solutions, each in a fresh kernel. Writes measured/lessons.json and the minutes on the
cards.

On a machine that does other things, too, the wall time says little; then the seconds of CPU, of the kernel and all that
it starts, stand for it: they are the time that one core alone would need to compute, without what it waits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "measured" / "lessons.json"
MODES = ("as it stands", "solved")
SUBREAPER = 36
"""Linux: processes that lose their parent get this one as their parent, so that their CPU time counts here."""
QUIET_LOAD = 0.5
"""Runnable processes, beside the lesson, with which wall time still counts."""


def measure(path: Path, mode: str) -> dict[str, Any]:
    """Return {"wall_s", "cpu_s", "quiet"} of one lesson; in a process that does nothing else."""
    import nbformat
    from nbclient import NotebookClient

    from mmfsdp.kit.cli.class_copy import solved

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
    book = nbformat.read(path, as_version=4)
    if mode == "solved":
        book = solved(book)
    quiet = os.getloadavg()[0] < QUIET_LOAD
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"MMFSDP_COURSE": f"{folder}/course", "MMFSDP_PROGRESS": f"{folder}/progress.json"}
        began = time.monotonic()
        here = {"metadata": {"path": str(HERE)}}
        NotebookClient(book, timeout=1200, kernel_name="python3", resources=here).execute(env=env)
        wall = time.monotonic() - began
        while True:
            try:
                os.wait()
            except ChildProcessError:  # all have ended, and their time is counted
                break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": round(wall), "cpu_s": round(used.ru_utime + used.ru_stime), "quiet": quiet}


def minutes(row: dict[str, Any]) -> int:
    """Return the minutes that a card states: those of the longer mode, rounded up."""
    seconds = []
    for mode in set(MODES) & set(row):
        seconds.append(row[mode]["wall_s"] if row[mode]["quiet"] else row[mode]["cpu_s"])
    return max(1, math.ceil(max(seconds) / 60))


def main() -> None:
    """Measure lessons, one after the other, and write what was found."""
    import nbformat
    import torch

    from mmfsdp.kit.cli.class_copy import solutions

    from .verify import lessons, with_minutes

    parser = argparse.ArgumentParser(prog="python -m course.measure", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every lesson")
    parser.add_argument("--one", choices=MODES, help="measure one notebook in this process, and print JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.notebooks[0], given.one)))
        return
    for path in given.notebooks or lessons():
        row: dict[str, Any] = {"torch": torch.__version__.split("+")[0], "cores": os.cpu_count()}
        has_exercises = bool(solutions(nbformat.read(path, as_version=4)))
        for mode in MODES if has_exercises else MODES[:1]:
            command = [sys.executable, "-m", "course.measure", "--one", mode, str(path)]
            said = subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE, text=True).stdout
            row[mode] = json.loads(said.splitlines()[-1])
        found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
        found[path.stem] = row
        FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
        book = nbformat.read(path, as_version=4)
        book.cells[0].source = with_minutes(book.cells[0].source, minutes(row))
        nbformat.write(book, path)
        print(f"{path.name}: {row}")


if __name__ == "__main__":
    main()
