"""Every lesson runs from top to bottom; unsolved exercises say so, and the solutions on the page are right."""

import re

import pytest
from books import FOLDER, LESSONS, execute, read, solutions, tagged, text_of, with_both

CARD = ("You will learn", "You need", "It takes", "Last verified")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_COURSE", str(tmp_path / "course"))
    monkeypatch.setenv("MMFSDP_PROGRESS", str(tmp_path / "progress.json"))


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


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_runs_and_its_solutions_are_right(path):
    book = with_both(read(path))
    execute(book, FOLDER)
    for cell in book.cells:
        if cell.source.startswith("%%ranks") and not tagged(cell, "exercise") and not path.name.startswith("08"):
            assert "except" in cell.source or not re.search(r"^\s*\w*Error: ", text_of(cell), re.MULTILINE), text_of(
                cell
            )
    said = [(cell.source, text_of(cell)) for cell in book.cells if cell.cell_type == "code" and "check(" in cell.source]
    for (source, before), (again, after) in zip(said[::2], said[1::2], strict=True):
        assert source == again
        assert "Not yet." in before and "Right." in after, f"{source}: {before} then {after}"
