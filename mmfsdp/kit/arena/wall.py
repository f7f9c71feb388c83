"""A class's results on one page, for the projector: who is where, and who may be stuck."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from ...params import ParamError
from ..run.files.folder import read_file
from ..widgets.markup import page, shown, table_of_cells
from .clock import MACHINE, PARAMETERS, RANKS
from .report import billions
from .result import LEVELS, Result, read_result

RESULT, PROGRESS = "arena.json", "course.json"
"""Files of a student's folder: the arena's result, and the exercises passed, as the course keeps them."""
MOST_STUDENTS, MOST_BYTES = 500, 1 << 20


@dataclass(frozen=True)
class Student:
    """Contents of the folder of a student."""

    name: str
    result: Result | None
    refused: str
    """The reason why there is no result; empty if there is one, or no file."""
    exercises: tuple[str, ...]
    newest: float
    """Time at which a file was last written, in seconds since 1970; 0 if there is none."""

    @property
    def points(self) -> int:
        """One for each level, and one for each exercise."""
        return len(self.result.levels if self.result else ()) + len(self.exercises)


def students_in(folder: Path) -> list[Student]:
    """Return the students of a class, whose folders are in `folder`, best number first.

    Their files are data: read within limits, checked, and never executed. Raises ParamError if there is no folder.
    """
    if not folder.is_dir():
        raise ParamError("--class", f"{str(folder)!r} is not a folder; collect one folder for each student in it")
    found = [_student(path) for path in _folders(folder)]
    if not found:
        raise ParamError("--class", f"{str(folder)!r} has no folder with {RESULT} or {PROGRESS}")
    return sorted(found, key=_place)


def _place(student: Student) -> tuple[float, int, str]:
    number = student.result.number if student.result else None
    return (float("inf") if number is None else number, -student.points, student.name)


def _folders(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir())[:MOST_STUDENTS]:
        if path.is_dir() and not path.is_symlink() and any((path / name).is_file() for name in (RESULT, PROGRESS)):
            yield path


def _student(folder: Path) -> Student:
    result, refused = None, ""
    if (folder / RESULT).exists():
        try:
            result = read_result(folder / RESULT)
        except ParamError as error:
            refused = str(error)
    files = [folder / name for name in (RESULT, PROGRESS) if (folder / name).is_file()]
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    return Student(folder.name, result, refused, _exercises(folder / PROGRESS), newest)


def _exercises(path: Path) -> tuple[str, ...]:
    """Return the names of the exercises passed; none where the file holds anything else."""
    try:
        names = json.loads(read_file(path, limit=MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(names, list):
        return ()
    return tuple(sorted({name[:60] for name in names if isinstance(name, str)}))


def wall(students: list[Student], title: str) -> str:
    """Return the page."""
    lessons = sorted({name.partition(".")[0] for student in students for name in student.exercises})
    head = ["student", "a step", "largest model", "points", *(level.name for level in LEVELS), *lessons, "last file"]
    rows = [_row(student, lessons) for student in students]
    about = (
        f"<style>body {{max-width: none}}</style><p>A step of {billions(PARAMETERS)} parameters on {RANKS} x "
        f"{escape(MACHINE)}, as the arena plays it from what was counted. Below the lessons: exercises passed.</p>"
    )
    return page(f"The arena: {title}", about + table_of_cells([escape(name) for name in head], rows, label="class"))


def _row(student: Student, lessons: list[str]) -> str:
    result = student.result
    step = "" if result is None else "does not fit" if result.number is None else f"{result.number:.1f} ms"
    if student.refused:
        step = f'<span title="{shown(student.refused)}">refused</span>'
    cells = [shown(student.name), step]
    cells.append("" if result is None else billions(result.mine.memory.largest))
    cells.append(str(student.points))
    for level in LEVELS:
        cells.append("✓" if result and level.name in result.levels else "")
    for lesson in lessons:
        passed = sum(name.partition(".")[0] == lesson for name in student.exercises)
        cells.append(str(passed) if passed else "")
    when = datetime.fromtimestamp(student.newest, timezone.utc)
    cells.append(f"{when:%H:%M} UTC" if student.newest else "")
    return "".join(f"<td>{cell}</td>" for cell in cells)
