"""`python -m course.verify [NOTEBOOK ...]`, in notebooks/: run lessons with their solutions; write cards and pages.

`python -m course.verify --class FOLDER` makes the copy for the class instead: no solutions, no outputs, and checks and
quizzes in which nobody reads an answer by chance.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import time
import zlib
from base64 import b64encode
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from .file_parts import lesson_parts
from .rendered import render

HERE = Path(__file__).resolve().parent.parent


def lessons() -> list[Path]:
    """Every notebook that has a number, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


def tagged(cell: nbformat.NotebookNode, kind: str) -> str | None:
    """'01.ring' of a cell tagged exercise-01.ring or solution-01.ring; None for others."""
    tags = cell.metadata.get("tags", [])
    return next((tag.removeprefix(f"{kind}-") for tag in tags if tag.startswith(f"{kind}-")), None)


def solutions(book: nbformat.NotebookNode) -> dict[str, str]:
    """The code in each folded solution, by exercise."""
    found = {}
    for cell in book.cells:
        if name := tagged(cell, "solution"):
            code = re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)
            assert code, name
            found[name] = code[1]
    return found


def solved(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy in which each exercise is answered as its solution says."""
    book, answers = nbformat.from_dict(book), solutions(book)
    for cell in book.cells:
        if name := tagged(cell, "exercise"):
            cell.source = answers[name]
    return book


def for_class(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without solutions and outputs, and without links to pages that have them."""
    book = nbformat.from_dict(book)
    book.cells = [cell for cell in book.cells if not tagged(cell, "solution")]
    for cell in book.cells:
        cell.source = "\n".join(line for line in cell.source.split("\n") if "(rendered/" not in line)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return book


def packed(path: Path) -> str:
    """Return a file of checks or questions for the class: it works as before, and no search finds an answer in it.

    The checks need the answers, so a student who decodes the file can still read them.
    """
    text = b64encode(zlib.compress(path.read_bytes())).decode()
    if path.suffix == ".py":
        return f"import base64, zlib\n\nexec(zlib.decompress(base64.b64decode('{text}')))\n"
    return text


def with_card(text: str, *, minutes: float | None, day: str) -> str:
    """A card's text, with what this machine needed, if that is known."""
    if minutes is not None:
        needed = f"{max(1, round(minutes))} minute{'s' if round(minutes) > 1 else ''}"
        text = re.sub(r"the machine needs .*? for all of it", f"the machine needs {needed} for all of it", text)
    return re.sub(r"(\| \*\*Last verified\*\* \|).*", rf"\1 {day} |", text)


def verify(path: Path) -> None:
    """Run a lesson with its solutions; write minutes and day into its card, and its page for the web. A machine that
    does much else says nothing about minutes: then the card keeps its own. A cell that raises, raises."""
    import torch

    book = nbformat.read(path, as_version=4)
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    began = time.monotonic()
    here = {"metadata": {"path": str(HERE)}}
    ran = NotebookClient(solved(book), timeout=1200, kernel_name="python3", resources=here).execute()
    minutes = (time.monotonic() - began) / 60
    day = f"{datetime.date.today().isoformat()}, torch {torch.__version__.split('+')[0]}"
    book.cells[0].source = with_card(book.cells[0].source, minutes=None if busy else minutes, day=day)
    nbformat.write(book, path)
    render(book, ran, HERE / "rendered" / f"{path.stem}.md")
    print(f"{path.name}: {minutes:.1f} minutes{', beside much else' if busy else ''}")


def main() -> int:
    """Verify lessons, or make the class's copy."""
    parser = argparse.ArgumentParser(prog="python -m course.verify", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every lesson but 00")
    parser.add_argument("--class", dest="folder", type=Path, help="write the copy for the class into this folder")
    given = parser.parse_args()
    if given.folder:
        for name in ("course", "reference", "images"):
            shutil.copytree(HERE / name, given.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*HERE.glob("course/e[0-9][0-9].py"), HERE / "course" / "questions.yaml"):
            (given.folder / "course" / path.name).write_text(packed(path), encoding="utf-8")
        whole_file = HERE / "fsdp_in_200_lines.py"
        (given.folder / whole_file.name).write_text(packed(whole_file), encoding="utf-8")
        parts = b64encode(zlib.compress(json.dumps(lesson_parts()).encode())).decode()
        (given.folder / "course" / "parts.txt").write_text(parts, encoding="utf-8")  # for %catch_up
        for path in (HERE / "contents.ipynb", *lessons()):
            nbformat.write(for_class(nbformat.read(path, as_version=4)), given.folder / path.name)
        print(f"{given.folder}: {len(lessons())} notebooks without solutions")
        return 0
    for path in given.notebooks or lessons()[1:]:
        verify(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
