"""No mutant of a solution is right: the checks of lessons 02, 03, 11 and of the clinic refuse each of them.

Those that a check takes are as right as the solution; they are listed with the reason, in
tests/files/equal_answers.yaml.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from answers import PARTS, SCRIPTS
from course.script import changes_in
from mutants import Mutant, mutants, own_lines
from tries import GIVEN, SOLUTIONS, hint_for_cell, hint_for_part, hint_for_script, script_as_shipped, script_as_solved

BY_ARENA = ("05.prefetch",)
"""Exercises whose check starts the arena: their mutants would take ten minutes."""
EQUAL = yaml.safe_load((Path(__file__).resolve().parent.parent / "files" / "equal_answers.yaml").read_text())


def code_of(cell: str) -> str:
    """The code of a cell, after the line of its magic."""
    return cell.split("\n", 1)[1]


def with_one_change_left_out(name: str) -> Iterator[Mutant]:
    """Yield the script of the clinic with all changes of the solution but one."""
    changes = changes_in(code_of(SOLUTIONS[name]))
    for left_out in changes:
        text = script_as_shipped(name)
        for old, new in changes:
            if (old, new) != left_out:
                text = text.replace(old, new)
        old, new = left_out
        first = (new.strip() or old.strip()).splitlines()[0]
        yield Mutant(now=f"left out: {first}", before=new, code=text)


def test_each_line_of_a_solution_has_a_mutant():
    for name in PARTS:
        solution = code_of(SOLUTIONS[name])
        own = own_lines(solution, code_of(GIVEN[name]))
        changed = "; ".join(mutant.before for mutant in mutants(solution, code_of(GIVEN[name])))
        for node in ast.walk(ast.parse(solution)):
            if (
                isinstance(node, ast.stmt)
                and node.lineno in own
                and not isinstance(node, (ast.FunctionDef, ast.Return))
            ):
                assert ast.unparse(node).splitlines()[0] in changed


def test_mutants_leave_out_weaken_and_swap():
    found = {mutant.now for mutant in mutants("if a and b[0]:\n    x = f(y, n=1) / 2\n")}
    assert {"pass", "if a:", "if a or b[0]:", "if a and b[-1]:", "x = f(y) / 2", "x = f(y, n=1)"} <= found
    assert not list(mutants("x = 1\n", given="x = 1\n"))


def taken(name: str, changed: list[Mutant], hint_of) -> None:
    """Assert that the check refuses the mutants but those in the list, and that these are still taken."""
    accepted = [mutant.now for mutant in changed if hint_of(name, mutant.code) is None]
    listed = [entry["now"] for entry in EQUAL.get(name, [])]
    assert sorted(set(accepted) - set(listed)) == [], "wrong answers that a check takes"
    assert sorted(set(listed) - set(accepted)) == [], "listed as right, and refused (or no mutant any more)"


@pytest.mark.real
@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in PARTS if name not in BY_ARENA])
def test_parts_of_the_own_file(rank_server, name):
    taken(name, list(mutants(code_of(SOLUTIONS[name]), code_of(GIVEN[name]))), hint_for_part)


@pytest.mark.real
@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_the_clinic(rank_server, name):
    changed = [*mutants(script_as_solved(name), script_as_shipped(name)), *with_one_change_left_out(name)]
    taken(name, changed, hint_for_script)


@pytest.mark.real
@pytest.mark.extended
def test_four_bits(rank_server):
    def hint_of(name: str, code: str) -> str | None:
        return hint_for_cell(name, 2, code)

    name = "11.four_bits"
    taken(name, list(mutants(code_of(SOLUTIONS[name]), code_of(GIVEN[name]))), hint_of)
