"""Refuse by its name the content of a row that is not read, and name other keys once for a source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .corrupt import CorruptRecord, shorten
from .processor import IMAGE

MAX_KEYS = 12
"""Keys that a message lists."""

FILE = r"s?([_-]?(path|file|file[_-]?name|url)s?)?"
SOUND_OR_VIDEO_KEY = re.compile(rf"(video|audio|sound|speech){FILE}", re.IGNORECASE)
PICTURE_KEY = re.compile(rf"(image|img|picture|photo){FILE}|file_names?", re.IGNORECASE)
INSTRUCTION_KEYS = {
    *("system", "system_prompt", "system_message", "tools", "functions", "tool_calls"),
    *("history", "chosen", "rejected", "rejected_response", "reasoning_content"),
}
"""Keys of a conversation, or of a turn in it, that change what is said or learned."""
QUESTION_KEYS = {"messages", "texts", "query", "question", "questions", "instruction", "prompt"}
"""Keys of a caption's row under which other forms of rows have the question that a text answers."""
LOSS_KEYS = {"loss", "train", "weight"}
"""Keys of a turn by which it is left out of the loss, unless they are true or 1."""

MEDIA_TAG = re.compile(
    r"<\|?(image|img|picture|image_?here|image_placeholder|(image|video|audio)_pad|vision_start"
    r"|video|vid|audio|sound|speech)[ _]?\d*\|?>",
    re.IGNORECASE,
)
"""Places of pictures, videos and sounds in the texts of published data: <video>, <img>, <image_1>, <|image_pad|>."""


def is_set(value: Any) -> bool:
    """Return False for a key without content: tables write null where a row has nothing."""
    return value is not None and value not in ("", [], {})


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of a row that have content, in words."""
    keys = sorted(key for key, value in row.items() if is_set(value))
    if not keys:
        return "no keys"
    more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
    return f"the keys {', '.join(map(shorten, keys[:MAX_KEYS]))}{more}"


def check_keys(row: Mapping[str, Any], read: Collection[str], *, has_pictures: bool, name: str) -> None:
    """Raise CorruptRecord for a key of content that is not among those `read`.

    has_pictures: a key that is read names a picture, so that another one may name the same again.
    """
    for key, value in row.items():
        if key in read or not is_set(value):
            continue
        if SOUND_OR_VIDEO_KEY.fullmatch(key):
            words = "of video and sound nothing is read; remove the row, or the key if its text does without"
        elif PICTURE_KEY.fullmatch(key) and not has_pictures:
            names = [read_key for read_key in sorted(read) if PICTURE_KEY.fullmatch(read_key)]
            words = f"pictures are read under {' or '.join(names) or 'image, a key of the row'}"
        elif key.lower() in INSTRUCTION_KEYS:
            words = "which is not read; write what the model is told into the first question, or remove the key"
        else:
            continue
        raise CorruptRecord(name, f"has {key!r}: {words}")


def check_turn_keys(turn: Mapping[str, Any], read: Collection[str], *, name: str) -> None:
    """Raise CorruptRecord for a key of content, or for one that leaves a turn out of the loss, in a conversation."""
    check_keys(turn, read, has_pictures=False, name=name)
    for key in LOSS_KEYS.intersection(turn):
        if turn[key] not in (True, None):
            value = shorten(repr(turn[key]))
            words = "all answers are learned alike; remove the key, or the turn"
            raise CorruptRecord(name, f"has a turn with {key!r} {value}: {words}")


def check_tags(texts: Iterable[str], *, name: str) -> None:
    """Raise CorruptRecord for a text with a tag of a video, a sound or a picture other than <image>."""
    for text in texts:
        for tag in MEDIA_TAG.finditer(text):
            if tag[0] != IMAGE:
                words = f"a picture's place is {IMAGE}, and its file is named under 'image'; nothing else is read"
                raise CorruptRecord(name, f"has {tag[0]} in its text: {words}")


def unread_keys(row: Mapping[str, Any], read: Collection[str]) -> set[str]:
    """Return the keys of a row that have content and are not read."""
    return {key for key, value in row.items() if key not in read and key != "id" and is_set(value)}


def unread_note(keys_of_rows: Iterable[set[str]]) -> list[str]:
    """Return a note that names the keys that rows have and that are not read; none without any."""
    unread: set[str] = set()
    for keys in keys_of_rows:
        unread |= keys
    if not unread:
        return []
    return [f"rows have {keys_of(dict.fromkeys(unread, True))}, which are not read"]
