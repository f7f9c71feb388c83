"""The class's copy, the cards, and the table of contents."""

import ast
import json
import re

import nbformat
import pytest
from books import FOLDER, LESSONS, read
from course.checks import passed
from course.contents import contents, exercises
from course.measure import MODES, minutes
from course.verify import main, set_scripts_aside, with_day, with_minutes

from mmfsdp.kit.cli.class_copy import for_class, solutions, solved, tagged
from tests.processes import in_fresh_python


def test_the_copy_for_the_class_has_neither_solutions_nor_outputs():
    for path in LESSONS:
        book = read(path)
        book.cells[1].outputs = [nbformat.v4.new_output("stream", text="said")]
        copy = for_class(book)
        nbformat.validate(copy)
        assert not [cell for cell in copy.cells if tagged(cell, "solution") or cell.get("outputs")]
        assert len(copy.cells) + len([c for c in book.cells if tagged(c, "solution")]) == len(book.cells)
        assert "<summary>Solution" not in "".join(cell.source for cell in copy.cells)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The folder for the class."""
    folder = tmp_path_factory.mktemp("course") / "class"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["verify", "--class", str(folder)])
        assert main() == 0
    return folder


def test_in_the_copy_for_the_class_every_link_leads_somewhere(copy):
    books = sorted(copy.glob("*.ipynb"))
    assert [book.name for book in books] == [path.name for path in sorted(FOLDER.glob("*.ipynb"))]
    for path in books:
        text = "\n".join(cell.source for cell in read(path).cells)
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (path.parent / link).is_file(), (path.name, link)


def test_the_copy_for_the_class_holds_no_answer_to_read_and_its_checks_work(copy):
    files = [path for path in copy.rglob("*") if path.suffix in (".py", ".yaml", ".ipynb", ".md")]
    assert len(files) > 40
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    leaked = []
    for path in LESSONS:
        book = read(path)
        asked = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
        for code in solutions(book).values():
            answers = {line.strip() for line in code.splitlines() if len(line.strip()) > 25}
            for line in answers:
                in_json = json.dumps(line, ensure_ascii=False)[1:-1]
                leaked += [line] if line not in asked and (line in text or in_json in text) else []
    assert not leaked
    for hint in ("keeps its own part", "Nearly: 2.9 billion", "Each rank has its own 8"):
        assert hint not in text
    code = """
from course.checks import hint_for
from course.quiz import questions
assert hint_for("01.wire", 700) is None and "one half" in hint_for("01.wire", 350)
assert questions("01")[0]["answers"][0]["choice"] == "32 samples"
"""
    in_fresh_python(code, cwd=copy)


def test_a_solved_copy_leaves_no_blank_in_an_exercise():
    for path in LESSONS:
        book = solved(read(path))
        for cell in book.cells:
            if tagged(cell, "exercise"):
                code = re.sub(r"#.*", "", cell.source)
                assert not re.search(r"^\s*\.\.\.|[=:(,] \.\.\.", code, re.MULTILINE), cell.source


def test_cards_say_what_was_measured():
    measured = json.loads((FOLDER / "measured" / "lessons.json").read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb")):
        card = read(path).cells[0].source
        assert card == with_minutes(card, minutes(measured[path.stem])), "run `python -m course.measure`"
        assert re.search(r"you about \d+ minutes.*; the machine \d+ minutes?, on two free cores", card), path
    for path in LESSONS:
        card = read(path).cells[0].source
        assert re.search(r"\*\*Last verified\*\* \| \d{4}-\d\d-\d\d, torch \d", card), path.name
    assert with_minutes("the machine ?, on two free cores", 3) == "the machine 3 minutes, on two free cores"
    assert with_day("| **Last verified** | ? |", "2026-01-01") == "| **Last verified** | 2026-01-01 |"


def test_run_all_takes_at_most_three_minutes_and_that_of_the_first_notebook_five():
    measured = json.loads((FOLDER / "measured" / "lessons.json").read_text(encoding="utf-8"))
    for lesson, row in measured.items():
        limit_s = 300 if lesson == "00_start_here" else 180  # it trains a model
        for mode in set(MODES) & set(row):
            # Two cores: the work takes at least half of its CPU time. Where nothing else ran, the wall time says it.
            assert row[mode]["wall_s" if row[mode]["quiet"] else "cpu_s"] <= limit_s, (lesson, mode)


def test_each_exercise_says_its_minutes_and_they_fit_into_the_lesson():
    for path in LESSONS:
        text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        said = re.findall(r"\*\*Exercise [\w.-]+\.\*\* \((\d+) minutes, (?:easy|medium|hard)\)", text)
        assert len(said) == text.count("**Exercise "), path.name
        assert sum(map(int, said)) <= int(re.search(r"about (\d+) minutes", text)[1]), path.name


def is_code(given: str, solution: str) -> bool:
    """Return True for a solution that writes more than a value: a statement, a function or a call."""
    if solution.startswith("%%"):  # a cell of ranks, a part of the own file, a changed script
        return True
    kinds = (ast.Call, ast.FunctionDef, ast.For, ast.With, ast.BinOp, ast.Return)
    counts = []
    for code in (given, solution):
        tree = ast.parse(code)
        counts.append(sum(isinstance(node, kinds) for node in ast.walk(tree)))
    return counts[1] - counts[0] >= 3 or "def " in solution


def test_three_of_five_exercises_are_code():
    code, count = [], 0
    for path in LESSONS:
        book = read(path)
        given = {tagged(cell, "exercise"): cell.source for cell in book.cells if tagged(cell, "exercise")}
        for name, solution in solutions(book).items():
            count += 1
            code += [name] if is_code(given[name], solution) else []
    assert len(code) >= 0.6 * count, (len(code), count, code)


def test_contents_name_every_lesson_and_count_what_is_passed():
    names = exercises(FOLDER / "01_data_parallel.ipynb")
    assert names == ["01.ring", "01.wire", "01.ledger", "01.ddp"]
    passed("01.ring")
    table = contents().data
    assert "1 of 4" in table and all(path.name in table for path in LESSONS)
    page = (FOLDER / "contents.ipynb").read_text()
    assert all(path.name in page for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb")))


def test_edited_scripts_are_set_aside_and_kept(tmp_path):
    folder = tmp_path / "clinic"
    set_scripts_aside(folder)  # nothing is there yet
    for text in ("first", "second"):
        folder.mkdir()
        (folder / "01.py").write_text(text)
        set_scripts_aside(folder)
        assert not folder.exists() and (tmp_path / "clinic_before" / "01.py").read_text() == text
