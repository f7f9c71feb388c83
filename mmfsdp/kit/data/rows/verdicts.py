"""Refuse a row whose own keys say that it, or a turn of it, should not be learned as a good answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..corrupt import Unreadable, shorten

WEIGHT_KEY = re.compile(r"((sample|loss|example|row|turn|token)s?_?)?(weight|loss_mask)s?")
"""Keys of the share that a row or a turn has in the loss: anything but 1 and true changes what is learned."""
SWITCH_KEY = re.compile(r"loss|train(_on)?(_turn)?|(is_)?(used?|keep|included?)")
"""Keys whose false or 0 leaves something out of the training. Another number may be a loss that somebody measured."""
OUT_KEY = re.compile(r"(is_)?(ignored?|skip(ped)?|excluded?|discard(ed)?|drop(ped)?)")
"""Keys whose true or 1 leaves something out of the training."""
MASK_KEY = re.compile(r"(is_|label_|answer_|turn_|output_)?mask(ed)?s?")
"""Keys that leave something out, where data sets do not agree whether 0 or 1 does so."""
GOOD_KEY = re.compile(
    r"((answer|response|caption)_)?(is_|was_)?(correct|good|valid|accepted|approved|desirable|acceptable)"
)
"""Keys whose false says that an answer is bad."""
BAD_KEY = re.compile(
    r"((answer|response|caption)_)?(is_|was_|has_)?(bad|wrong|incorrect|invalid|undesirable|unacceptable|hallucinat\w*)"
)
"""Keys whose true says that an answer is bad."""
SCORE_KEY = re.compile(r"((answer|response|caption)_)?(score|reward|rating|feedback|verdict|judge?ment|label|quality)")
"""Keys of a judgement, or of a class. A judgement of 0 or less, or words that say so, are of a bad answer."""
NUMBER_IS_CLASS = "label"
"""A number under this key is that of a class."""
BAD_WORDS = re.compile(
    r"(a |the )?(very )?(bad|wrong|incorrect|false|rejected|undesirable|unacceptable|dispreferred|worse|worst|invalid"
    r"|hallucinat(ed|ion)|thumbs?[ _-]?down)([ _-](answers?|responses?|captions?|completions?|label))?",
    re.IGNORECASE,
)
"""Words of a judgement on a bad answer."""


def check_verdicts(row: Mapping[str, Any], read: Collection[str], *, where: str = "") -> None:
    """Raise Unreadable for a key that is not `read` and changes what should be learned: a weight, a mask, a bad label.

    where: what has the key, in the message.
    """
    for key, value in row.items():
        if key in read or value is None or value == "":
            continue
        words = _verdict_of(key.lower(), value)
        if words:
            raise Unreadable(f"has {where}{key!r} {shorten(repr(value))}: {words}")


def _verdict_of(key: str, value: Any) -> str:
    """Return why a key with a value must not be ignored; "" if it may be."""
    is_left_out = (
        (WEIGHT_KEY.fullmatch(key) and not _is_whole(value))
        or (SWITCH_KEY.fullmatch(key) and _says(value, False))
        or (OUT_KEY.fullmatch(key) and _says(value, True))
        or (MASK_KEY.fullmatch(key) and _is_mask(value))
    )
    if is_left_out:
        return "all answers are learned alike; remove the key, or what it is about"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_bad = (
        (GOOD_KEY.fullmatch(key) and _says(value, False) and not is_number)
        or (BAD_KEY.fullmatch(key) and _says(value, True))
        or (SCORE_KEY.fullmatch(key) and (value is False or _has_bad_words(value)))
        or (SCORE_KEY.fullmatch(key) and key != NUMBER_IS_CLASS and is_number and value <= 0)
    )
    if is_bad:
        return "it says that the answer is bad, and it would be learned as a good one; remove the row, or the key"
    return ""


def _is_whole(value: Any) -> bool:
    """Return whether a weight is 1 or true, all of a list are, or it is no weight at all, such as a text."""
    if isinstance(value, (list, tuple)):
        return all(_is_whole(inner) for inner in value)
    return not isinstance(value, (bool, int, float)) or value == 1


def _is_mask(value: Any) -> bool:
    """Return whether a value is 0, 1 or a truth, or a list of these: polygons of objects are no mask of words."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_mask(inner) for inner in value)
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _says(value: Any, truth: bool) -> bool:
    """Return whether a value is this truth, also as a number, or in words as tables have it."""
    if isinstance(value, (bool, int, float)):
        return value == truth
    if isinstance(value, str):
        return value.strip().lower() in (("true", "yes", "1") if truth else ("false", "no", "0"))
    return False


def _has_bad_words(value: Any) -> bool:
    return isinstance(value, str) and bool(BAD_WORDS.fullmatch(value.strip()))
