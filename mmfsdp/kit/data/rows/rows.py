"""Turn a row into a sample, whatever its shape: a caption, a conversation, a question, an interleaved document.

A shape is one entry of SHAPES and one function that reads it (row_turns, row_questions, row_documents).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....params import SourceParams
from ..batch import Sample
from ..corrupt import CorruptRecord, Unreadable
from ..media import FILM, FILM_NAME, PICTURE, PICTURE_NAME, PICTURE_URL, media_of
from ..pictures import open_picture
from . import row_values
from .row_documents import TEXT_KEYS, read_caption, read_interleaved, read_matched
from .row_pictures import column_of_pictures, has_part_pictures, with_pictures
from .row_questions import ANSWER_KEYS, CHOICE_KEYS, CONTEXT_KEYS, INPUT_KEYS, answer_keys, question_key, read_question
from .row_turns import (
    CONVERSATION_KEYS,
    PAIR_LISTS,
    SYSTEM_KEYS,
    is_pair,
    read_conversations,
    read_messages,
    read_pairs,
    read_question_lists,
    role_of,
)
from .row_values import PICTURE_KEYS, Content, Row, first_key, first_set
from .unread import check_keys, check_texts, is_set, keys_of, unread_keys
from .verdicts import check_verdicts

FindPicture = Callable[[str], Path | bytes]
"""Returns the path or the bytes of a picture that a row names. Raises CorruptRecord."""


@dataclass(frozen=True)
class Shape:
    """A form in which data sets have their rows."""

    words: str
    """The keys of the shape in words."""
    fits: Callable[[Row], object]
    """Returns true for a row of this shape, by its keys."""
    read: Callable[[Row, SourceParams], Content]
    """Returns what a row says. Raises Unreadable."""
    keys: Callable[[Row], set[str]]
    """Returns the keys that are read, beside those of pictures."""
    example: str
    """A row in JSON."""


def _has(*keys: str) -> Callable[[Row], object]:
    """Return a function that tells whether a row has one of some keys: null is none, an empty list is one."""
    # An empty list is refused by the reader of the shape, which can say what is missing.
    return lambda row: first_key(row, keys)


def _is_pairs(row: Row) -> bool:
    """Return whether a row has a list of questions with answers, and not OBELICS' list of texts."""
    key = first_key(row, PAIR_LISTS)
    return bool(key) and not (key == "texts" and _is_interleaved(row))


def _is_interleaved(row: Row) -> bool:
    """Return whether `texts` are texts and places of pictures."""
    texts = row.get("texts")
    return isinstance(texts, (list, tuple)) and all(text is None or isinstance(text, str) for text in texts)


def _with_system(*keys: str) -> Callable[[Row], set[str]]:
    """Return a function that gives the first of some keys that a row has, and that of a system text."""
    return lambda row: {first_key(row, keys), first_set(row, SYSTEM_KEYS)}


def _question_keys(row: Row) -> set[str]:
    """Return the keys that are read of a row with a question."""
    key = question_key(row)
    keys = {key, *answer_keys(row, key), first_set(row, SYSTEM_KEYS), *CONTEXT_KEYS, "history"}
    if key == "question":
        keys.add(first_set(row, CHOICE_KEYS))
    if key == "instruction":
        keys.update(INPUT_KEYS)
    return keys


def _question(key: str, answers: str, example: str) -> Shape:
    """Return the shape of rows with a question under `key`, and its answer under one of the keys of row_questions."""

    def fits(row: Row) -> object:
        # Alpaca has `input` beside `instruction`, as the text that it is about.
        belongs_to_instruction = key == "input" and is_set(row.get("instruction"))
        return is_set(row.get(key)) and not belongs_to_instruction and answer_keys(row, key)

    return Shape(f"{key} with {answers}", fits, read_question, _question_keys, example)


SHAPES = (
    Shape(
        "messages of role and content",
        _has("messages"),
        read_messages,
        _with_system("messages"),
        '{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, '
        '{"role": "assistant", "content": "A pet."}], "images": ["cat.png"]}',
    ),
    Shape(
        "conversations of from and value (LLaVA), or of role and content",
        _has(*CONVERSATION_KEYS),
        read_conversations,
        _with_system(*CONVERSATION_KEYS),
        '{"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A pet."}], '
        '"image": "cat.png"}',
    ),
    Shape(
        "texts of user and assistant (the_cauldron)",
        _is_pairs,
        read_pairs,
        _with_system(*PAIR_LISTS),
        '{"images": ["cat.png"], "texts": [{"user": "What is it?", "assistant": "A pet."}]}',
    ),
    _question(
        "question", "answer or answers (VQA)", '{"image": "cat.png", "question": "What?", "answers": ["pet", "cat"]}'
    ),
    _question("query", "response", '{"query": "<image>What is it?", "response": "A pet.", "images": ["cat.png"]}'),
    _question(
        "instruction",
        "output",
        '{"instruction": "Name the pet.", "input": "One word.", "output": "Cat.", "images": ["cat.png"]}',
    ),
    _question("prompt", "completion", '{"prompt": "This is", "completion": " a pet.", "images": ["cat.png"]}'),
    _question("problem", "solution", '{"image": "cat.png", "problem": "How many ears?", "solution": "2"}'),
    _question("user", "assistant", '{"image": "cat.png", "user": "What is it?", "assistant": "A pet."}'),
    _question("input", "output", '{"image": "cat.png", "input": "What is it?", "output": "A pet."}'),
    Shape(
        "questions with answers",
        lambda row: is_set(row.get("questions")) and is_set(row.get("answers")),
        read_question_lists,
        lambda row: {"questions", "answers", first_set(row, SYSTEM_KEYS)},
        '{"image": "cat.png", "questions": ["What is it?", "Its color?"], "answers": ["A pet.", "Teal."]}',
    ),
    Shape(
        "images and texts in turn (OBELICS)",
        _is_interleaved,
        read_interleaved,
        lambda row: {"texts"},
        '{"images": [null, "cat.png", null], "texts": ["My cat.", null, "She is young."]}',
    ),
    Shape(
        "text_list with image_info (MMC4)",
        _has("text_list"),
        read_matched,
        lambda row: {"text_list", "image_info"},
        '{"text_list": ["My cat."], "image_info": [{"image_name": "cat.png", "matched_text_index": 0}]}',
    ),
    Shape(
        "file_name or image, with text, caption or captions",
        lambda row: first_set(row, TEXT_KEYS) and first_set(row, PICTURE_KEYS),
        read_caption,
        lambda row: {first_set(row, TEXT_KEYS)},
        '{"file_name": "cat.png", "text": "a cat"}',
    ),
)
"""All shapes that are read. The last one, captions, is for rows of no other."""
CAPTION = SHAPES[-1]
QUESTION = SHAPES[3]
MMC4 = SHAPES[-2]


def is_caption(row: Row) -> bool:
    """Return whether a row has the keys of no shape but captions."""
    return not any(shape.fits(row) for shape in SHAPES[:-1]) and not first_set(row, ANSWER_KEYS)


def lacks_picture(row: Row) -> bool:
    """Return whether a row that is no caption names no picture, so that one that belongs to it can be added."""
    return not MMC4.fits(row) and not first_set(row, PICTURE_KEYS) and not has_part_pictures(row)


KINDS: dict[str, Any] = {
    "empty": "",
    "text": "text",
    "number": 0,
    "list of texts": [None, "text"],
    "other": [{}],
    PICTURE: {"bytes": b"\xff\xd8\xff", "path": None},
    PICTURE_NAME: "0.png",
    PICTURE_URL: "https://example.org/0.png",
    FILM: {"bytes": b"ID3", "path": None},
    FILM_NAME: "0.mp4",
}
"""A value of each kind by which shapes tell rows apart; see `_kind_of`."""
KINDS |= {f"list of {kind}": [None, KINDS[kind]] for kind in (PICTURE, PICTURE_NAME, PICTURE_URL, FILM, FILM_NAME)}
Kinds = tuple[tuple[str, str], ...]


def _kinds_of(row: Row) -> Kinds:
    """Return the keys of a row that are not null, each with the kind of its value.

    Rows of one source have few combinations of them, so what follows from the kinds alone is computed once.
    """
    return tuple([(key, _kind_of(value)) for key, value in row.items() if value is not None])


def _kind_of(value: Any) -> str:
    if isinstance(value, (int, float)):
        return "number"
    media = media_of(value)
    if media:
        return f"list of {media}" if isinstance(value, (list, tuple)) else media
    if isinstance(value, str):
        return "text" if value and not value.isspace() else "empty"
    if isinstance(value, (list, tuple, dict)):
        if not value:
            return "empty"
        if not isinstance(value, dict) and all(item is None or isinstance(item, str) for item in value):
            return "list of texts"
    return "other"


@dataclass(frozen=True)
class _Known:
    """Holds what the keys of a row and the kinds of their values tell."""

    shape: Shape | None
    problem: str
    """The reason why the row is of no shape."""
    pictures: str
    """The key of its pictures, where that is known by their values; see `column_of_pictures`."""
    read: frozenset[str]
    """The keys that are read."""
    unread: frozenset[str]
    """The keys that have content and are not read."""


def _known_of(row: Row) -> _Known:
    """Return what is known of a row by its keys and the kinds of their values."""
    return _known_of_kinds(_kinds_of(row), has_part_pictures(row))


@lru_cache(4096)
def _known_of_kinds(kinds: Kinds, parts_have_pictures: bool) -> _Known:
    row = {key: KINDS[kind] for key, kind in kinds}
    pictures = column_of_pictures(row, parts_have_pictures=parts_have_pictures)
    # Shapes look for pictures under their usual keys.
    moved = with_pictures(row, pictures)
    try:
        shape = _find_shape(moved, keys_of(row))
    except Unreadable as error:  # the row is refused by name when it is read
        unread = unread_keys(row, {*PICTURE_KEYS, *TEXT_KEYS, pictures})
        return _Known(None, str(error), pictures, frozenset(), frozenset(unread))
    read = _read_keys(moved, shape)
    if pictures:
        read = read - {"image", "images"} | {pictures}
    return _Known(shape, "", pictures, frozenset(read), frozenset(unread_keys(row, read)))


def shape_of(row: Row) -> Shape:
    """Return the shape of a row. Raises Unreadable for a row of two shapes, or of none."""
    known = _known_of(row)
    if known.shape is None:
        raise Unreadable(known.problem)
    return known.shape


def _find_shape(row: Row, its_keys: str) -> Shape:
    """Return the shape of a row by its keys. Raises Unreadable for a row of two shapes, or of none.

    its_keys: the keys that it has, in words, before its pictures were put under 'image'.
    """
    shapes = [shape for shape in SHAPES[:-1] if shape.fits(row)]
    if len(shapes) > 1:
        words = " and ".join(shape.words for shape in shapes)
        raise Unreadable(f"is of {len(shapes)} shapes: it has {words}; keep the keys of one")
    if shapes:
        return shapes[0]
    # A question without an answer is no caption, though it may have a picture and a text.
    if question_key(row):
        return QUESTION  # which names the answer that is missing
    if not CAPTION.fits(row):
        missing = "caption" if first_set(row, PICTURE_KEYS) else "file_name"
        known = "; ".join(shape.words for shape in SHAPES)
        raise Unreadable(f"has no {missing} (it has {its_keys}); rows are read that have: {known}")
    return CAPTION


def parse_row(text: str | bytes, *, name: str) -> dict[str, Any]:
    """Return a JSON object. Raises CorruptRecord with that name."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CorruptRecord(name, f"is not JSON ({error})") from None
    return check_row(row, name=name)


def check_row(row: Any, *, name: str) -> dict[str, Any]:
    """Return a row. Raises CorruptRecord if it is no dict with names, or holds text that no tokenizer and no log takes.

    A row need not be of JSON: pictures, bytes and other objects in it are left as they are.
    """
    if not isinstance(row, dict):
        raise CorruptRecord(name, "is not a JSON object with fields")
    try:
        # Walks through all texts in C: half of a surrogate pair cannot be encoded.
        json.dumps(row, ensure_ascii=False, default=_no_text).encode()
    except UnicodeEncodeError:
        raise CorruptRecord(name, "holds an unpaired surrogate, half a character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptRecord(name, f"is no row of names and values ({error})") from None
    if not all(isinstance(key, str) for key in row):
        raise CorruptRecord(name, "has a key that is no text")
    return row


def _no_text(value: Any) -> str:
    """Return what stands for an object without text in the check of texts."""
    return ""


def check_file_name(file: str, *, name: str) -> None:
    """Raise CorruptRecord for record `name` where a picture's file name is a URL, or a picture in base64."""
    try:
        row_values.check_file_name(file)
    except Unreadable as error:
        raise CorruptRecord(name, str(error)) from None


def keys_not_read(row: Row) -> set[str]:
    """Return the keys of a row that have content and that no reader looks at."""
    return set(_known_of(row).unread)


def _read_keys(row: Row, shape: Shape) -> set[str]:
    """Return the keys that are read in a row of a shape."""
    keys = shape.keys(row)
    if shape is MMC4:
        return keys
    key = first_set(row, PICTURE_KEYS)
    return keys | ({"image", "images"} if key in ("image", "images") else {key})


TURN_LISTS = frozenset(("messages", *CONVERSATION_KEYS, *PAIR_LISTS, "questions", "history"))
"""Keys under which a row may have several turns."""


def has_turns(row: Row) -> bool:
    """Return whether a row has a conversation of several questions."""
    if row.keys().isdisjoint(TURN_LISTS):
        return False
    for key in ("messages", *CONVERSATION_KEYS):
        turns = row.get(key)
        if isinstance(turns, list):
            # One more than two may be a system text, or an answer to nothing.
            return len(turns) > (1 if turns and is_pair(turns[0]) else 3)
    if is_set(row.get("history")):
        return True
    lists = [row.get(key) for key in (*PAIR_LISTS, "questions")]
    return any(isinstance(pairs, list) and len(pairs) > 1 for pairs in lists) and not _is_interleaved(row)


def has_system(row: Row) -> bool:
    """Return whether a row has a system text."""
    if first_set(row, SYSTEM_KEYS):
        return True
    for key in ("messages", *CONVERSATION_KEYS, "prompt"):
        turns = row.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
            return "system" in (role_of(turns[0].get("role")), role_of(turns[0].get("from")))
    return False


def sample_of(row: Row, params: SourceParams, *, name: str, find: FindPicture) -> Sample:
    """Return the sample of a row of one of SHAPES.

    Args:
        row: the row, from JSON or elsewhere: its pictures may also be bytes, `{bytes, path}` or pictures of PIL.
        params: what of a document is read, and how large a picture may be.
        name: the name of the sample, in errors, too.
        find: returns where a picture is that the row names by its file.

    Raises CorruptRecord with that name if the row or one of its pictures cannot be used, or if it has content that is
    not read.
    """
    known = _known_of(row)
    try:
        shape = shape_of(row)
        moved = with_pictures(row, known.pictures)
        has_pictures = shape is not MMC4 and (first_set(moved, PICTURE_KEYS) or has_part_pictures(row))
        check_keys(row, known.read, has_pictures=bool(has_pictures))
        check_verdicts(row, known.read)
        content = shape.read(moved, params)
        check_texts(content.messages)
    except Unreadable as error:
        column = f"; its pictures are read under {known.pictures!r}" if known.pictures else ""
        raise CorruptRecord(name, f"{error}{column}") from None
    pictures = []
    for picture in content.pictures:
        source = find(picture) if isinstance(picture, str) else picture
        limit, value_range = params.max_megapixels, params.picture_range
        pictures.append(open_picture(source, name=name, max_megapixels=limit, value_range=value_range))
    return Sample(content.messages, tuple(pictures), name, verbatim=content.verbatim)
