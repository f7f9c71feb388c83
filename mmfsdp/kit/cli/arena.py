"""The command `mmfsdp arena`: one number for a file of one's own FSDP."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...params import ParamError
from ...params.base import without_controls
from ...params.findings import Finding
from .answers import ArenaAnswer
from .json_output import add_json, reply
from .planning import say

if TYPE_CHECKING:
    from ..arena.result import Result


def add_arena(add: Callable[..., ArgumentParser]) -> None:
    """Add `mmfsdp arena`."""
    about = "try a file of your own FSDP: what it sends and holds, as one number; or show a class's results"
    command = add(
        arena,
        about,
        usage="FILE [--to FILE] [--json]\n       mmfsdp arena --recheck RESULT | --class FOLDER [--to FILE]",
    )
    command.add_argument("file", metavar="FILE", nargs="?", help="such as my_fsdp.py; it is executed")
    command.add_argument(
        "--to", metavar="FILE", help="the result to write (default: arena.json beside FILE), or the page"
    )
    add_json(command, ArenaAnswer)
    command.add_argument(
        "--recheck", metavar="RESULT", help="check that a result follows from its counts; execute nothing"
    )
    about = "write a page with the results in the folders of students (arena.json, course.json); execute nothing"
    command.add_argument("--class", dest="students", metavar="FOLDER", help=about)


def arena(values: Namespace) -> int:
    """Try a file, check a result, or make the page of a class. Returns 1 for a file or result that is refused."""
    given = [name for name in ("file", "recheck", "students") if getattr(values, name) is not None]
    if len(given) != 1:
        raise ParamError("FILE", "give a file of your own, --recheck RESULT or --class FOLDER, one of the three")
    if values.students is not None:
        if values.json:
            raise ParamError("--json", "is of FILE and --recheck; the results of a class are JSON files already")
        return class_page(Path(values.students), Path(values.to or "wall.html"))
    if values.recheck is not None:
        return recheck(values, Path(values.recheck))
    return try_it(values)


def try_it(values: Namespace) -> int:
    """Run a file in the arena, and write its result and picture beside it."""
    from ..arena.gate import Refused, try_file
    from ..arena.report import picture

    to = Path(values.to or Path(values.file).with_name("arena.json"))
    best = number_in(to)
    say(f"executing {values.file} on 2 and on 3 ranks of this machine")
    try:
        result = try_file(values.file)
    except Refused as error:
        print(without_controls(error.traceback), end="", file=sys.stderr)
        return refuse(values, values.file, error.findings)
    result.write(to)
    drawn = to.with_suffix(".svg")
    drawn.write_text(picture(result), encoding="utf-8")
    status = show(values, result, to, best)
    if not values.json:
        print(f"{to}: the result; {drawn}: your step as a picture")
    return status


def number_in(path: Path) -> float | None:
    """Return the number of an earlier result; None where there is none, of other rules or damaged: it is replaced."""
    from ..arena.result import read_result

    try:
        return read_result(path).number if path.is_file() else None
    except ParamError:
        return None


def recheck(values: Namespace, path: Path) -> int:
    """Check that a result's figures follow from its counts."""
    from ..arena.result import read_result

    try:
        result = read_result(path)
    except ParamError as error:
        return refuse(values, str(path), [Finding("error", "not-a-result", str(error))])
    return show(values, result, path, None)


def show(values: Namespace, result: Result, path: Path, best: float | None) -> int:
    """Print a result, and return 0."""
    from ..arena.report import table

    if not values.json:
        print(table(result, best))
        return 0
    figures = {
        name: value for name, value in result.to_dict().items() if name in ArenaAnswer.model_fields and name != "file"
    }
    return reply(values, ArenaAnswer(ok=True, file=result.file, result=str(path), refused=[], **figures))


def refuse(values: Namespace, file: str, findings: list[Finding]) -> int:
    """Print why something was refused, and return 1."""
    if not values.json:
        print(*(f"refused: {without_controls(str(finding))}" for finding in findings), sep="\n")
        return 1
    nothing = dict.fromkeys(("step_ms", "torchs_step_ms", "largest_parameters"))
    return reply(values, ArenaAnswer(ok=False, file=file, result="", levels=[], points=0, refused=findings, **nothing))


def class_page(folder: Path, to: Path) -> int:
    """Write the page of a class."""
    from ..arena.wall import students_in, wall

    students = students_in(folder)
    to.write_text(wall(students, folder.resolve().name), encoding="utf-8")
    print(f"{to}: {len(students)} students")
    return 0
