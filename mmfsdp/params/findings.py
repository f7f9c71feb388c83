"""Finding: what is wrong, and what to do; of lint, verify, check, before a launch, and with a run that goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .base import ParamError

Level = Literal["error", "warning", "wrong", "note", "ok"]
DATA = "data"
"""Code of a note on the data of a run: how they are split, what is not read."""
UNKNOWN_WORDS = "unknown-words"
SKIPPED_ROWS = "skipped-rows"
PICTURE_VALUES = "picture-values"
FEW_ROWS = "few-rows"
CUT_TEXTS = "cut-texts"
BY_LENGTH = "by-length"
OF_DATA = (UNKNOWN_WORDS, SKIPPED_ROWS, PICTURE_VALUES, FEW_ROWS, CUT_TEXTS, BY_LENGTH)
"""Codes of the warnings about data, which kit/train/notices.py gives."""


@dataclass(frozen=True)
class Finding:
    """Say what is wrong, and what to do."""

    level: Level
    """error (of a plan: a launch stops), warning or note; of a line of `verify` and `check`: wrong, note or ok."""
    code: str
    """Kind of the finding, by which code knows it; its words may be changed."""
    message: str
    fix: str = ""
    """The fix; empty where the message says it, or nobody knows."""

    def __str__(self) -> str:
        return f"{self.message}. What to do: {self.fix}" if self.fix else self.message


def stop_at_errors(findings: Iterable[Finding]) -> None:
    """Raise ParamError with every error among the findings."""
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise ParamError("plan", "; ".join(dict.fromkeys(errors)))
