"""`python -m course.verify [NOTEBOOK ...]`, in notebooks/: run lessons with their solutions; write the day and pages.

`python -m course.verify --class FOLDER` makes the notebooks of the class's copy instead, as `mmfsdp course DIR
--student` does: no solutions, no outputs, and checks and quizzes in which nobody reads an answer by chance.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from mmfsdp.kit.cli.class_copy import class_files, solved
from mmfsdp.kit.cli.course import write_files

from .rendered import render

HERE = Path(__file__).resolve().parent.parent


def lessons() -> list[Path]:
    """Every notebook that has a number, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


def with_minutes(text: str, minutes: int) -> str:
    """Return a card's text with the machine's minutes, which `course.measure` measures."""
    needed = f"{minutes} minute{'s' if minutes > 1 else ''}"
    return re.sub(r"the machine .*?, on two free cores", f"the machine {needed}, on two free cores", text)


def with_day(text: str, day: str) -> str:
    """Return a card's text with the day on which the lesson ran, and the torch."""
    return re.sub(r"(\| \*\*Last verified\*\* \|).*", rf"\1 {day} |", text)


def set_scripts_aside(folder: Path) -> None:
    """Rename the learner's scripts of lesson 08, so that they are made anew: an edited one does not show its bug."""
    if folder.is_dir():
        before = folder.with_name("clinic_before")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)


def verify(path: Path) -> None:
    """Run a lesson with its solutions; write the day into its card, and its page for the web. A cell that raises,
    raises."""
    import torch

    book = nbformat.read(path, as_version=4)
    set_scripts_aside(HERE.parent / "runs" / "course" / "clinic")
    here = {"metadata": {"path": str(HERE)}}
    ran = NotebookClient(solved(book), timeout=1200, kernel_name="python3", resources=here).execute()
    day = f"{datetime.date.today().isoformat()}, torch {torch.__version__.split('+')[0]}"
    book.cells[0].source = with_day(book.cells[0].source, day)
    nbformat.write(book, path)
    render(book, ran, HERE / "rendered" / f"{path.stem}.md")
    print(f"{path.name}: as its solutions say")


def main() -> int:
    """Verify lessons, or make the class's copy."""
    parser = argparse.ArgumentParser(prog="python -m course.verify", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every lesson but 00")
    parser.add_argument("--class", dest="folder", type=Path, help="write the copy for the class into this folder")
    given = parser.parse_args()
    if given.folder:
        write_files(class_files(HERE), given.folder, replace=True)
        print(f"{given.folder}: {len(lessons())} notebooks without solutions")
        return 0
    for path in given.notebooks or lessons()[1:]:
        verify(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
