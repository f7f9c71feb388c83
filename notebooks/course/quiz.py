"""A recap quiz: one question after the other, each answer with its reason."""

from __future__ import annotations

import re
import zlib
from base64 import b64decode
from html import escape
from pathlib import Path
from typing import Any

import yaml

from mmfsdp.kit.widgets.style import GATHERED, TRAINABLE


def questions(name: str) -> list[dict[str, Any]]:
    """The questions of a notebook ('01'), each with `answers` of `choice` and `because`, the right one first."""
    content = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text(encoding="utf-8"))
    if isinstance(content, str):  # the class's copy, see `packed` in verify.py
        content = yaml.safe_load(zlib.decompress(b64decode(content)))
    return content[name]


def quiz(name: str) -> Any:
    """The quiz of a notebook as widgets."""
    import ipywidgets as w

    return w.VBox([_question(i, each["question"], each["answers"]) for i, each in enumerate(questions(name))])


def _question(number: int, text: str, answers: list[dict[str, str]]) -> Any:
    import ipywidgets as w

    turn = (number * 7 + len(text)) % len(answers)  # the same order every time, and the right one anywhere
    reasons = {a["choice"]: a["because"] for a in [*answers[turn:], *answers[:turn]]}
    options = [(choice.replace("`", ""), choice) for choice in reasons]  # a button shows no marks of code
    buttons = w.RadioButtons(options=options, value=None, layout={"width": "auto"})
    said = w.HTML()

    def answer(change: dict[str, str]) -> None:
        right = change["new"] == answers[0]["choice"]
        color, head = (GATHERED, "Right.") if right else (TRAINABLE, "No.")
        edge = f"border-left:6px solid {color};padding-left:8px"
        said.value = f"<div style='{edge}' role='status'><b>{head}</b> {_html(reasons[change['new']])}</div>"

    buttons.observe(answer, names="value")
    return w.VBox([w.HTML(f"<b>{number + 1}. {_html(text)}</b>"), buttons, said])


def _html(text: str) -> str:
    """A text as HTML, with its `code` as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
