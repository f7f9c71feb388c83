"""Ranks that ended without a report: what their logs tell of it."""

from __future__ import annotations

import re

from ...hangs.stacks import crash
from ..error_kinds import text_kind
from ..files.reasons import CRASH, LIBRARY
from ..files.snapshot import Snapshot

_LIBRARY_ERROR = re.compile(r"^terminate called .*\n(?:.*\n)?? *what\(\): +(.+)$", re.MULTILINE)
"""The lines that C++ prints when it ends a process by an exception that nobody caught, as gloo's are."""


def library_error(log: str) -> str:
    """Return the message with which a library in C++ ended a process, by what it has printed; "" if none did."""
    messages = _LIBRARY_ERROR.findall(log)
    return messages[-1][:400] if messages else ""


def death_words(look: Snapshot, rank: int) -> tuple[str, str]:
    """Return what ended a rank, and the kind of it: a library in C++, or a crash; "" and "" where its log has neither.

    Such as `was ended by a library (in step 2 compute): MESSAGE` or `crashed (in step 2 compute): Segmentation fault in
    step (train.py, line 9)`.
    """
    log, beat = look.log(rank), look.beat(rank)
    activity = f" (in {beat[0]})" if beat else ""
    if error := library_error(log):
        return f"was ended by a library{activity}: {error}", text_kind(error) or LIBRARY
    if words := crash(log):
        return f"crashed{activity}: {words}", CRASH
    return "", ""
