"""Refuse by its name the content of a row that is not read, and name other keys once for a source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..batch import IMAGE, USER, Message
from ..corrupt import Unreadable, shorten
from ..media import DATA_URI, FILM, FILM_NAME, PICTURE, is_name_alone, media_inside, media_tags
from .verdicts import check_verdicts

MAX_KEYS = 12
"""Keys that a message lists."""

FILE = r"s?([_-]?(path|file|file[_-]?name|url)s?)?"
SOUND_OR_VIDEO_KEY = re.compile(rf"(video|audio|sound|speech){FILE}", re.IGNORECASE)
PICTURE_KEY = re.compile(
    rf"(image|img|picture|photo)({FILE}|[_-]?(id|base64|base64[_-]?str)s?)|file_names?", re.IGNORECASE
)
INSTRUCTION_KEY = re.compile(
    r"system([_-]?(prompt|message|instruction|text|role)s?)?|tools|functions|tool_calls|history|reasoning_content",
    re.IGNORECASE,
)
"""Keys of a row, or of a turn in it, that change what is said or learned."""
THOUGHT_KEYS = {"reasoning", "thinking", "thought", "thoughts"}
"""Keys of a turn under which its answer has a part of what was generated."""
PREFERENCE_KEY = re.compile(
    r"((chosen|rejected|preferred|dispreferred)([_-]\w+)?|\w+[_-](chosen|rejected|preferred|dispreferred)|kto_tag"
    r"|preference\w*)",
    re.IGNORECASE,
)
"""Keys of answers that are compared with others, or marked as good or bad."""
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
        media = media_inside(value)
        if SOUND_OR_VIDEO_KEY.fullmatch(key) or media == FILM or (media == FILM_NAME and not has_pictures):
            words = "of video and sound nothing is read; remove the row, or the key if its text does without"
        elif media == PICTURE:
            words = "it holds a picture that is not read; put all pictures into a list under 'images', or remove it"
        elif PICTURE_KEY.fullmatch(key) and not has_pictures:
            words = "pictures are read under image or images, a key of the row, as the names of their files"
        elif media and not has_pictures and media != FILM_NAME:
            words = f"it is {media}; pictures are read under image or images, as the names of their files"
        elif INSTRUCTION_KEY.fullmatch(key):
            words = "which is not read; write what the model is told into the first question, or remove the key"
        elif PREFERENCE_KEY.fullmatch(key):
            words = "no answer is compared with another; keep the good one as the answer, and remove the key"
        else:
            continue
        raise Unreadable(f"has {key!r}: {words}")


def check_turn_keys(turn: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise Unreadable for a key of content, or for one that leaves a turn out of the loss, in a conversation."""
    check_keys(turn, read, has_pictures=False)
    for key in THOUGHT_KEYS.intersection(turn):
        if key not in read and is_set(turn[key]):
            words = "a thought is not read; write it into the text of the turn, or remove the key"
            raise Unreadable(f"has a turn with {key!r}: {words}")
    check_verdicts(turn, read, where="a turn with ")


def check_texts(messages: Iterable[Message]) -> None:
    """Raise Unreadable for a text with a tag or the content of a picture, a video, a sound or a box that is not read.

    Of pictures, <image> is read, and what a row names outside of its texts.
    """
    for message in messages:
        for text in message.truths:
            _check_tags(text)
            content = DATA_URI.search(text)
            if content:
                words = f"the text of {message.role} holds {content[0]}..., which would be trained as text"
                raise Unreadable(f"{words}; write the file and name it under 'image'")
        if message.role == USER and is_name_alone(message.text):
            words = "names a picture as a text of the user"
            raise Unreadable(f"{words}, {shorten(message.text)!r}; name it under 'image', a key of the row")


def _check_tags(text: str) -> None:
    for tag in media_tags(text):
        if tag != IMAGE:
            words = f"a picture's place is {IMAGE}, and its file is named under 'image'; nothing else is read"
            raise Unreadable(f"has {tag} in its text: {words}")
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
