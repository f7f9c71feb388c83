"""Tries answers of learners: writes them where the lesson does, runs its cell on real ranks, and returns the hint."""

from __future__ import annotations

import re

from books import LESSONS, read, solutions, tagged
from course.checks import hint_for
from course.file_parts import lesson_parts, own_file, write_parts
from course.script import edit_script, original, own_script

from mmfsdp.kit.widgets.ranks_cell import ranks_magic

TESTS: dict[str, str] = {}
"""Name of a `%%ranks` cell -> its source."""
GIVEN: dict[str, str] = {}
"""Exercise -> its cell as the lesson gives it."""
SOLUTIONS: dict[str, str] = {}
for lesson in LESSONS:
    book = read(lesson)
    SOLUTIONS |= solutions(book)
    for cell in book.cells:
        if cell.source.startswith("%%ranks"):
            TESTS[cell.source.split()[2]] = cell.source
        if name := tagged(cell, "exercise"):
            GIVEN[name] = cell.source


def with_own_file(code: str) -> str:
    """Return the code of a cell that finds my_fsdp.py."""
    return f"import sys\nsys.path.insert(0, {str(own_file().parent)!r})\n{code}"


def hint_for_cell(name: str, ranks: int, code: str) -> str | None:
    """Return the hint for the code of a `%%ranks` cell."""
    if "import my_fsdp" in code:
        write_parts({part.name: part.code for part in lesson_parts()})
        code = with_own_file(code)
    ranks_magic.run_on_ranks(code, ranks, name)
    return hint_for(name)


def hint_for_part(name: str, code: str) -> str | None:
    """Return the hint for the code of a part of my_fsdp.py, the rest of which is as in the solutions."""
    step, part = SOLUTIONS[name].split("\n", 1)[0].split()[1:]
    others = {each.name: each.code for each in lesson_parts() if each.step <= int(step)}
    write_parts(others | {part: code})
    if name not in TESTS:  # its check runs the file by itself
        return hint_for(name)
    test = re.search(rf"^%%ranks (\d) {name}\n(.*)", TESTS[name], re.DOTALL)
    assert test, name
    ranks_magic.run_on_ranks(with_own_file(test[2]), int(test[1]), name)
    return hint_for(name)


def script_as_solved(name: str) -> str:
    """Return the script of the clinic with the solution's changes."""
    number = name.removeprefix("08.bug")
    edit_script(number, SOLUTIONS[name].split("\n", 1)[1])
    return own_script(int(number)).read_text(encoding="utf-8")


def script_as_shipped(name: str) -> str:
    """Return the script of the clinic with its bug."""
    return original(int(name.removeprefix("08.bug"))).read_text(encoding="utf-8")


def hint_for_script(name: str, text: str) -> str | None:
    """Return the hint for a script of the clinic with this text."""
    own_script(int(name.removeprefix("08.bug"))).write_text(text, encoding="utf-8")
    return hint_for(name)
