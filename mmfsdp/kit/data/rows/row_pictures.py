"""Find the pictures of a row: under one of PICTURE_KEYS, in parts of messages, or in a column known by its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..corrupt import Unreadable
from ..media import PICTURE, PICTURE_NAME, media_of
from .row_documents import TEXT_KEYS
from .row_questions import ANSWER_KEYS, CHOICE_KEYS, CONTEXT_KEYS, INPUT_KEYS, OTHER_ANSWER_KEYS
from .row_turns import CONVERSATION_KEYS, PAIR_LISTS, PICTURE_PART_KEYS, SYSTEM_KEYS, TEXT_PARTS
from .row_values import PICTURE_KEYS, Row, file_name_of, first_set, list_in, named_pictures

NEVER_PICTURES = frozenset(
    (
        *("id", "messages", "questions", "history", "text_list", "image_info"),
        *(*TEXT_KEYS, *CONVERSATION_KEYS, *PAIR_LISTS, *SYSTEM_KEYS),
        *(*ANSWER_KEYS, *OTHER_ANSWER_KEYS, *CHOICE_KEYS, *CONTEXT_KEYS, *INPUT_KEYS),
        *(key for keys in ANSWER_KEYS.values() for key in keys),
    )
)
"""Keys of texts and turns: an answer may be the name of a file."""


def column_of_pictures(row: Row, *, parts_have_pictures: bool | None = None) -> str:
    """Return the key whose values are the pictures of a row, where `first_set(row, PICTURE_KEYS)` is not; else "".

    It is the only key with pictures, or else the only one with names of pictures' files. With names under one of
    PICTURE_KEYS and pictures under another, it is the latter: the names are those that the pictures once had.

    parts_have_pictures: parts of messages have pictures of their own, which are the row's. None: look for them.
    """
    named_key = first_set(row, PICTURE_KEYS)
    if named_key:
        for key in PICTURE_KEYS:
            if row.get(key) is not None and media_of(row[key]) == PICTURE:
                return "" if key == named_key else key
        return ""
    if parts_have_pictures is None:
        parts_have_pictures = has_part_pictures(row)
    if parts_have_pictures or row.get("text_list") is not None:
        return ""
    media = {key: media_of(value) for key, value in row.items() if key not in NEVER_PICTURES}
    embedded = [key for key in media if media[key] == PICTURE]
    columns = embedded or [key for key in media if media[key] == PICTURE_NAME]
    return columns[0] if len(columns) == 1 else ""


def with_pictures(row: Row, column: str) -> Row:
    """Return a row with the pictures of a column in the place of others."""
    if not column:
        return row
    moved = {key: value for key, value in row.items() if key not in PICTURE_KEYS and key != column}
    moved["image"] = row[column]
    return moved


def columns_of_names(rows: Iterable[Row]) -> set[str]:
    """Return the keys of some rows that may name their pictures: PICTURE_KEYS, and others by their values."""
    columns = set(PICTURE_KEYS)
    for row in rows:
        columns.add(column_of_pictures(row))
    return columns - {""}


def part_pictures(row: Row) -> Iterator[Any]:
    """Yield the pictures that parts of messages have of their own."""
    for key in ("messages", *CONVERSATION_KEYS, "prompt"):
        turns = row.get(key)
        for turn in turns if isinstance(turns, (list, tuple)) else ():
            parts = turn.get("content") if isinstance(turn, Mapping) else None
            for part in parts if isinstance(parts, (list, tuple)) else ():
                if isinstance(part, Mapping) and part.get("type") not in TEXT_PARTS:
                    part_key = first_set(part, PICTURE_PART_KEYS)
                    if part_key:
                        yield part[part_key]


def has_part_pictures(row: Row) -> bool:
    """Return whether parts of messages have pictures of their own."""
    return any(True for _ in part_pictures(row))


def picture_name(row: Row) -> str:
    """Return the file of the one picture that a row names, by which it is held out with others of the same picture.

    Empty for a row without a picture, with several, or with the picture itself.
    """
    value = _pictures_of(row)
    if value is None:
        value = list(part_pictures(row))
    if isinstance(value, (list, tuple)) and row.get("conversations") is None:  # those were always held out alone
        value = value[0] if len(value) == 1 else None
    return file_name_of(value)


def picture_names(row: Row) -> list[str]:
    """Return the files of all pictures that a row names, in no particular order; nothing is opened or checked."""
    values = _pictures_of(row)
    if named_pictures(values):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        values = [values]
    infos = row.get("image_info")
    matched = [info.get("image_name") for info in infos if isinstance(info, Mapping)] if isinstance(infos, list) else []
    names = [file_name_of(value) for value in (*values, *part_pictures(row), *matched)]
    return [name for name in names if name]


def _pictures_of(row: Row) -> Any:
    """Return what a row has under the key of its pictures; None if there is none."""
    row = with_pictures(row, column_of_pictures(row))
    key = first_set(row, PICTURE_KEYS)
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return list_in(row, key)
        except Unreadable:  # it is refused by name when it is read
            return None
    return value
