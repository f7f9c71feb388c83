"""Every lesson runs from top to bottom; unsolved exercises say so, and the solutions on the page are right."""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from books import FOLDER, LESSONS, execute, read, solutions, tagged, text_of, with_both

from tests import processes

RUNS = "test_a_lesson_runs_and_its_solutions_are_right"
EXPLAINED = {
    "UserWarning: plan: ": "the lint's findings, which lesson 03 reads and explains",
    "recvValueWithTimeout failed": "said by a rank that waits for one which an exercise, not solved yet, has ended",
}
"""Warnings that a lesson shows on purpose: how each begins, and where it is explained."""
CARD = ("You will learn", "You need", "It takes", "Last verified")


@pytest.fixture(scope="module")
def executed(request, tmp_path_factory, fork_server):
    """Lesson -> a future of its notebook with outputs. Two are executed at a time: much of each is waiting."""
    wanted = {item.callspec.params["path"] for item in request.session.items if item.originalname == RUNS}
    with ThreadPoolExecutor(2) as pool:

        def start(path: Path) -> Future:
            folder = tmp_path_factory.mktemp(path.stem)
            places = {"MMFSDP_COURSE": str(folder / "course"), "MMFSDP_PROGRESS": str(folder / "progress.json")}
            return pool.submit(execute, with_both(read(path)), FOLDER, fork_server, **places)

        processes.started.append("kernels of the lessons")  # by threads, perhaps only after this fixture is set up
        yield {path: start(path) for path in LESSONS if path in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_has_a_card_exercises_with_solutions_a_quiz_and_sources(path):
    book = read(path)
    assert all(f"**{word}**" in book.cells[0].source for word in CARD)
    text = "\n".join(cell.source for cell in book.cells)
    exercises = {tagged(cell, "exercise") for cell in book.cells} - {None}
    assert len(exercises) >= 3 and exercises == set(solutions(book))
    assert all(f"**Exercise {name}.**" in text and f'check("{name}"' in text for name in exercises)
    assert f'quiz("{path.name[:2]}")' in text and "**Further reading.**" in text
    for link in re.findall(r"\]\(([^)#]+\.(?:ipynb|md))\)", text):
        assert (FOLDER / link).is_file(), link


@pytest.mark.real
@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_runs_and_its_solutions_are_right(path, executed):
    book = executed[path].result()
    exercises = set(solutions(read(path)))
    for cell in book.cells:
        # The cell of an exercise fails before the exercise is solved. Its check says what it is after.
        is_exercise = tagged(cell, "exercise") or not exercises.isdisjoint(cell.source.split()[2:3])
        if cell.source.startswith("%%ranks") and not is_exercise and not path.name.startswith("08"):
            assert "except" in cell.source or not re.search(r"^\s*\w*Error: ", text_of(cell), re.MULTILINE), text_of(
                cell
            )
    shown = "\n".join(text_of(cell) for cell in book.cells if cell.cell_type == "code")
    warned = [line for line in shown.splitlines() if re.search(r"Warning: |\[W\d{4}|WARNING", line)]
    # Printed by the lesson itself, as its own words.
    warned = [line for line in warned if not line.startswith("Warning: ")]
    assert [line for line in warned if not any(start in line for start in EXPLAINED)] == []
    said = [(cell.source, text_of(cell)) for cell in book.cells if cell.cell_type == "code" and "check(" in cell.source]
    for (source, before), (again, after) in zip(said[::2], said[1::2], strict=True):
        assert source == again
        assert "Not yet." in before and "Right." in after, f"{source}: {before} then {after}"
