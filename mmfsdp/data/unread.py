"""Refuse by its name the content of a row that is not read, and name other keys once for a source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .batch import IMAGE
from .corrupt import Unreadable, shorten

MAX_KEYS = 12
"""Keys that a message lists."""

FILE = r"s?([_-]?(path|file|file[_-]?name|url)s?)?"
SOUND_OR_VIDEO_KEY = re.compile(rf"(video|audio|sound|speech){FILE}", re.IGNORECASE)
PICTURE_KEY = re.compile(
    rf"(image|img|picture|photo)({FILE}|[_-]?(id|base64|base64[_-]?str)s?)|file_names?", re.IGNORECASE
)
INSTRUCTION_KEYS = {
    *("system", "system_prompt", "system_message", "tools", "functions", "tool_calls"),
    *("history", "reasoning_content"),
}
"""Keys of a row, or of a turn in it, that change what is said or learned."""
PREFERENCE_KEYS = {"chosen", "rejected", "rejected_response", "kto_tag"}
"""Keys of answers that are compared with others, or marked as good or bad."""
LOSS_KEYS = {"loss", "train", "weight"}
"""Keys of a turn by which it is left out of the loss, unless they are true or 1."""

MEDIA_TAG = re.compile(
    r"<\|?(image|img|picture|image_?here|image_placeholder|(image|video|audio)_pad|vision_start"
    r"|video|vid|audio|sound|speech)[ _]?\d*\|?>",
    re.IGNORECASE,
)
"""Places of pictures, videos and sounds in the texts of published data: <video>, <img>, <image_1>, <|image_pad|>."""
BOX_TAG = re.compile(r"<(bbox|ref-object)>")
"""Places of boxes and names that ms-swift's rows have under `objects`."""


def is_set(value: Any) -> bool:
    """Return False for a key without content: tables write null where a row has nothing."""
    if isinstance(value, (str, bytes, list, tuple, dict)):
        return len(value) > 0
    return value is not None


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of a row that have content, in words."""
    keys = sorted(key for key, value in row.items() if is_set(value))
    if not keys:
        return "no keys"
    more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
    return f"the keys {', '.join(map(shorten, keys[:MAX_KEYS]))}{more}"


def check_keys(row: Mapping[str, Any], read: Collection[str], *, has_pictures: bool) -> None:
    """Raise Unreadable for a key of content that is not among those `read`.

    has_pictures: a key that is read names a picture, so that another one may name the same again.
    """
    for key, value in row.items():
        if key in read or not is_set(value):
            continue
        if SOUND_OR_VIDEO_KEY.fullmatch(key):
            words = "of video and sound nothing is read; remove the row, or the key if its text does without"
        elif PICTURE_KEY.fullmatch(key) and not has_pictures:
            words = "pictures are read under image or images, a key of the row, as the names of their files"
        elif key.lower() in INSTRUCTION_KEYS:
            words = "which is not read; write what the model is told into the first question, or remove the key"
        elif key.lower() in PREFERENCE_KEYS:
            words = "no answer is compared with another; keep the good one as the answer, and remove the key"
        else:
            continue
        raise Unreadable(f"has {key!r}: {words}")


def check_turn_keys(turn: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise Unreadable for a key of content, or for one that leaves a turn out of the loss, in a conversation."""
    check_keys(turn, read, has_pictures=False)
    for key in LOSS_KEYS.intersection(turn):
        if turn[key] not in (True, None):
            value = shorten(repr(turn[key]))
            words = "all answers are learned alike; remove the key, or the turn"
            raise Unreadable(f"has a turn with {key!r} {value}: {words}")


def check_tags(texts: Iterable[str]) -> None:
    """Raise Unreadable for a text with a tag of a box, a video, a sound or a picture other than <image>."""
    for text in texts:
        for tag in MEDIA_TAG.finditer(text):
            if tag[0] != IMAGE:
                words = f"a picture's place is {IMAGE}, and its file is named under 'image'; nothing else is read"
                raise Unreadable(f"has {tag[0]} in its text: {words}")
        box = BOX_TAG.search(text)
        if box:
            words = "boxes under 'objects' are not read; write the words and numbers into the text"
            raise Unreadable(f"has {box[0]} in its text: {words}")


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
