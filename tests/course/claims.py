"""What the course claims: sentences of its notebooks and quizzes with a strong word, or a number with a unit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from books import FOLDER, read

from mmfsdp.cli.class_copy import tagged

UNITS = (
    "%|percent|bytes?|GiB|MiB|KiB|GB|MB|kB|ms|seconds?|minutes?|microseconds?|bits?|times|GPUs?|ranks?|parameters|"
    "tokens|positions|patches|operations|all-gathers|collectives"
)
WORDS = "always|never|only|must|half|twice|a third|a fifth|doubles?"
CLAIM = re.compile(
    rf"\b({WORDS})\b|\d[\d.,]*(?:\^\d+)?\s*(?:{UNITS})\b",
    re.IGNORECASE,
)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown text; each row of a table, heading and item counts as a paragraph."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#])", text):
        plain = re.sub(r"\s+", " ", paragraph).strip()
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z*`(])", plain)


def texts() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of all that students read: "02" for a lesson, "quiz 02" for its quiz."""
    for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb")):
        for cell in read(path).cells:
            if cell.cell_type == "markdown" and not tagged(cell, "solution"):
                yield path.name[:2], cell.source
    quizzes = yaml.safe_load((FOLDER / "course" / "questions.yaml").read_text(encoding="utf-8"))
    for lesson, questions in quizzes.items():
        for question in questions:
            for answer in question["answers"]:
                yield f"quiz {lesson}", answer["because"]


def claims() -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) of each claim. The minutes of exercises and cards are none."""
    for place, text in texts():
        for sentence in sentences(text):
            without_minutes = re.sub(r"\(\d+ minutes, \w+\)|^\| \*\*It takes\*\*.*", "", sentence)
            if CLAIM.search(without_minutes):
                yield place, sentence
