"""Turn a row of JSON into a sample: a picture with its caption, a conversation, or an interleaved document."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasChoices, Base64Bytes, BaseModel, Field, ValidationError

from ..params import SourceParams
from .batch import QUESTION, Sample
from .pictures import CorruptRecord, open_picture
from .processor import END_OF_CHUNK, IMAGE

FindPicture = Callable[[str], Path | bytes]
"""Returns the path or the bytes of a picture that a row names. Raises CorruptRecord."""
Kind = TypeVar("Kind", bound=BaseModel)
QUESTIONERS, ANSWERERS = ("human", "user"), ("gpt", "assistant")


def parse_row(text: str | bytes, *, name: str) -> dict[str, Any]:
    """Return a JSON object. Raises CorruptRecord with that name."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CorruptRecord(name, f"is not JSON ({error})") from None
    return check_row(row, name=name)


def check_row(row: Any, *, name: str) -> dict[str, Any]:
    """Return a row. Raises CorruptRecord if it is no JSON object, or holds text that no tokenizer and no log takes."""
    if not isinstance(row, dict):
        raise CorruptRecord(name, "is not a JSON object with fields")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CorruptRecord(name, "holds an unpaired surrogate, half a character") from None
    return row


def picture_name(row: Mapping[str, Any]) -> str:
    """Return the picture that a row names under `file_name` or `image`; empty if there is none."""
    file = row.get("file_name", row.get("image"))
    return file.strip() if isinstance(file, str) else ""


def sample_of(row: Mapping[str, Any], params: SourceParams, *, name: str, find: FindPicture) -> Sample:
    """Return the sample of a row: by its keys `conversations` (LLaVA), `text_list` (MMC4), else a captioned picture.

    Raises CorruptRecord with that name if the row or one of its pictures cannot be used.
    """
    if "conversations" in row:
        return _conversation(row, name, find)
    if "text_list" in row:
        return _document(row, params, name, find)
    if not picture_name(row):
        raise CorruptRecord(name, "has no file_name")
    text = row.get("text", row.get("caption"))
    if not isinstance(text, str) or not text.strip():
        raise CorruptRecord(name, "has no caption")
    return Sample(IMAGE, text.strip(), (open_picture(find(picture_name(row)), name=name),), name)


class _Message(BaseModel):
    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    conversations: list[_Message]
    image: str | list[str] | None = Field(None, validation_alias=AliasChoices("image", "images"))


class _ImageInfo(BaseModel):
    matched_text_index: int = Field(ge=0)
    matched_sim: float = 1.0
    image_name: str | None = None
    image_base64: Base64Bytes | None = None


class _Document(BaseModel):
    text_list: list[str]
    image_info: list[_ImageInfo]


def _read_as(kind: type[Kind], row: Mapping[str, Any], name: str) -> Kind:
    """Return the fields of a row that are used. Raises CorruptRecord naming the first that is wrong."""
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptRecord(name, f"has a wrong {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _conversation(row: Mapping[str, Any], name: str, find: FindPicture) -> Sample:
    """Return the sample of LLaVA's `conversations`: questions are given, answers are learned, in every turn."""
    conversation = _read_as(_Conversation, row, name)
    messages = conversation.conversations
    if messages and messages[0].speaker in ANSWERERS:
        messages = messages[1:]  # an answer to nothing: LLaVA's own reader drops it, too
    asks = all(message.speaker in QUESTIONERS for message in messages[::2])
    answers = all(message.speaker in ANSWERERS for message in messages[1::2])
    if not messages or len(messages) % 2 or not asks or not answers:
        speakers = ", ".join(message.speaker for message in messages)
        raise CorruptRecord(name, f"has turns of {speakers}; they must be human, gpt, ...")
    turns = []
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        turns.append((QUESTION.format(question.value.strip()), answer.value.strip()))
    files = conversation.image or []
    files = [files] if isinstance(files, str) else files
    if not files and any(IMAGE in question.value for question in messages[::2]):
        raise CorruptRecord(name, f"asks about an {IMAGE} but names no picture under 'image'")
    pictures = tuple(open_picture(find(file), name=name) for file in files)
    prompt, text = turns[0]
    return Sample(prompt, text, pictures, name, tuple(turns[1:]))


def _document(row: Mapping[str, Any], params: SourceParams, name: str, find: FindPicture) -> Sample:
    """Return the sample of MMC4's `text_list` and `image_info` (arXiv 2304.06939), joined as OpenFlamingo does.

    Each picture comes before its sentence, and an end-of-chunk before each picture but the first.
    """
    content = _read_as(_Document, row, name)
    infos = [info for info in content.image_info if info.matched_sim >= params.min_similarity]
    infos = sorted(infos, key=lambda info: info.matched_text_index)[: params.max_pictures]
    if not infos:
        raise CorruptRecord(name, f"has no picture that matches its text by min_similarity {params.min_similarity}")
    matched = [info.matched_text_index for info in infos]
    if matched[-1] >= len(content.text_list):
        raise CorruptRecord(name, f"has matched_text_index {matched[-1]}, beyond its text_list")
    document = ""
    for i, sentence in enumerate(content.text_list):
        if i in matched and i > matched[0]:
            document += END_OF_CHUNK
        elif i > 0:
            document += " "
        document += IMAGE * matched.count(i) + sentence.strip()
    pictures = []
    for info in infos:
        pictures.append(open_picture(info.image_base64 or find(info.image_name or ""), name=name))
    before, text = document.split(IMAGE, 1)  # nothing is learned before the first picture
    return Sample(before + IMAGE, text, tuple(pictures), name)
