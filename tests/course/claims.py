"""What the course claims: sentences with a strong word, or a number with a unit, of its notebooks, its quizzes, the
clinic's stories and its slides, each answer that a quiz says is right, and what the reference pages call exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from books import FOLDER, ROOT, read
from course.clinic_stories import STORIES

from mmfsdp.kit.cli.class_copy import tagged

UNITS = (
    "percent|bytes?|GiB|MiB|KiB|GB|MB|kB|ms|seconds?|minutes?|microseconds?|bits?|times|GPUs?|ranks?|parameters|"
    "tokens|positions|patches|operations|all-gathers|collectives|lines"
)
WORDS = "always|never|only|must|half|twice|a third|a fifth|doubles?|exactly|cannot|neither|nobody"
CLAIM = re.compile(
    rf"\b({WORDS})\b|\d[\d.,]*(?:\^\d+)?\s*(?:%|(?:{UNITS})\b)",
    re.IGNORECASE,
)
EXACT = re.compile(r"\b(bitwise|bit for bit|last bit|to the byte|exactly)\b", re.IGNORECASE)
"""Of the reference pages, whose other strong words were read once by a person."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown text; each row of a table, heading and item counts as a paragraph."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#]|\d\. )", text):
        plain = re.sub(r"\s+", " ", paragraph).strip()
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z*`(])", plain)


def right_answers() -> Iterator[tuple[str, str]]:
    """Yield (place, answer) of each answer that a quiz says is right: "answer 02" for one of lesson 02's quiz."""
    for lesson, questions in _quizzes().items():
        for question in questions:
            yield f"answer {lesson}", question["answers"][0]["choice"]


def texts() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of all that students see: "02" for a lesson, "quiz 02" for the reasons of its quiz, "answer
    02" for the right answers, "story 08.bug1" for what a check of the clinic tells, "deck" for a slide with its notes,
    "page plan" for a reference page.
    """
    for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb")):
        for cell in read(path).cells:
            if cell.cell_type == "markdown" and not tagged(cell, "solution"):
                yield path.name[:2], cell.source
    for lesson, questions in _quizzes().items():
        for question in questions:
            for answer in question["answers"]:
                yield f"quiz {lesson}", answer["because"]
    yield from right_answers()
    for exercise, story in STORIES.items():
        yield f"story {exercise}", story
    for page in sorted((FOLDER / "reference").glob("*.md")):
        yield f"page {page.stem}", page.read_text(encoding="utf-8")
    for slide in (ROOT / "slides" / "deck.md").read_text(encoding="utf-8").split("\n---\n"):
        yield "deck", slide.replace("&nbsp;", " ")


def claims() -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) of each claim. The minutes of exercises, cards and slides are none."""
    yield from right_answers()
    for place, text in texts():
        if place.startswith("answer"):
            continue
        for sentence in sentences(text):
            without_minutes = re.sub(r"\(\d+ minutes, \w+\)|^\| \*\*It takes\*\*.*", "", sentence)
            if (EXACT if place.startswith("page") else CLAIM).search(without_minutes):
                yield place, sentence


def _quizzes() -> dict[str, list]:
    return yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
