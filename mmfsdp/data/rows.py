"""Turn a row of JSON into a sample: a picture with its caption, a conversation, or an interleaved document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from ..params import SourceParams
from .batch import QUESTION, Sample
from .corrupt import CorruptRecord, shorten
from .pictures import open_picture
from .processor import END_OF_CHUNK, IMAGE
from .unread import QUESTION_KEYS, check_keys, check_tags, check_turn_keys, is_set, keys_of, unread_keys

FindPicture = Callable[[str], Path | bytes]
"""Returns the path or the bytes of a picture that a row names. Raises CorruptRecord."""
Kind = TypeVar("Kind", bound=BaseModel)
QUESTIONERS, ANSWERERS = ("human", "user"), ("gpt", "assistant")

PICTURE_KEYS, TEXT_KEYS = ("file_name", "image"), ("text", "caption")
CAPTION_KEYS = {*PICTURE_KEYS, *TEXT_KEYS}
CONVERSATION_KEYS = {"conversations", "image", "images"}
TURN_KEYS = {"from", "value"}
DOCUMENT_KEYS = {"text_list", "image_info"}
MAX_FILE_NAME = 255
"""Letters that file systems allow in a name."""
BASE64 = re.compile(r"[A-Za-z0-9+/=_\s-]+")
SHAPES = (
    "rows are read that have file_name or image, with text or caption; conversations of from and value, with image or "
    "images (LLaVA); or text_list, with image_info (MMC4)"
)


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


def check_file_name(file: str, *, name: str) -> None:
    """Raise CorruptRecord for record `name` where a picture's file name is a URL, or a picture in base64."""
    if file.startswith("data:") or (len(file) > MAX_FILE_NAME and BASE64.fullmatch(file)):
        fix = "write the picture to a file and give the file's name"
        raise CorruptRecord(name, f"holds a picture in base64 ({len(file)} letters) in place of a file's name; {fix}")
    if "://" in file:
        raise CorruptRecord(name, f"names the URL {shorten(file)!r}; download it, and give the file's name")


def picture_name(row: Mapping[str, Any]) -> str:
    """Return the picture that a row names under `file_name` or `image`; empty if there is none."""
    return _first_text(row, PICTURE_KEYS)


def _first_text(row: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the text of the first key that has one; empty if none has."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def read_keys(row: Mapping[str, Any]) -> set[str]:
    """Return the keys that are read in a row of this shape."""
    if row.get("conversations") is not None:
        return CONVERSATION_KEYS
    return DOCUMENT_KEYS if row.get("text_list") is not None else CAPTION_KEYS


def keys_not_read(row: Mapping[str, Any]) -> set[str]:
    """Return the keys of a row that have content and that no reader looks at."""
    return unread_keys(row, read_keys(row))


def has_turns(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a conversation of several questions."""
    conversation = row.get("conversations")
    return isinstance(conversation, list) and len(conversation) > 3  # one more than two may be an answer to nothing


def sample_of(row: Mapping[str, Any], params: SourceParams, *, name: str, find: FindPicture) -> Sample:
    """Return the sample of a row: by its keys `conversations` (LLaVA), `text_list` (MMC4), else a captioned picture.

    Raises CorruptRecord with that name if the row or one of its pictures cannot be used, or if it has content that is
    not read.
    """
    keys = read_keys(row)
    reader = _Reader(params, name, find)
    if keys is CAPTION_KEYS:
        reader.check_caption(row)
    has_pictures = any(is_set(row.get(key)) for key in (*PICTURE_KEYS, "images") if key in keys)
    check_keys(row, keys, has_pictures=has_pictures, name=name)
    if keys is CONVERSATION_KEYS:
        sample = reader.conversation(row)
    elif keys is DOCUMENT_KEYS:
        sample = reader.document(row)
    else:
        sample = reader.caption(row)
    check_tags([message.text for message in sample.messages], name=name)
    return sample


class _Message(BaseModel):
    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    conversations: list[_Message]
    image: str | list[str] | None = None
    images: str | list[str] | None = None


class _ImageInfo(BaseModel):
    matched_text_index: int = Field(ge=0)
    matched_sim: float = 1.0
    image_name: str | None = None
    image_base64: Base64Bytes | None = None


class _Document(BaseModel):
    text_list: list[str]
    image_info: list[_ImageInfo]


@dataclass(frozen=True)
class _Reader:
    """Reads one row."""

    params: SourceParams
    name: str
    find: FindPicture

    def check_caption(self, row: Mapping[str, Any]) -> None:
        """Raise CorruptRecord for a row that is no picture with a caption, and so of no shape that is read."""
        file, text = picture_name(row), _first_text(row, TEXT_KEYS)
        for key in (*PICTURE_KEYS, *TEXT_KEYS):
            if is_set(row.get(key)) and not isinstance(row[key], str):
                raise self._corrupt(f"has {key!r}, which is of type {type(row[key]).__name__} and no text; {SHAPES}")
        if not file or not text:
            missing = "caption" if file else "file_name"
            raise self._corrupt(f"has no {missing} (it has {keys_of(row)}); {SHAPES}")
        for key in QUESTION_KEYS.intersection(row):
            if is_set(row[key]):
                raise self._corrupt(f"has {key!r}, which is not read with a caption; {SHAPES}")

    def caption(self, row: Mapping[str, Any]) -> Sample:
        """Return the sample of a picture with a caption."""
        picture = self._open(self.find(picture_name(row)))
        return Sample.of(IMAGE, _first_text(row, TEXT_KEYS), (picture,), self.name)

    def conversation(self, row: Mapping[str, Any]) -> Sample:
        """Return the sample of LLaVA's `conversations`: questions are given, answers are learned, in every turn."""
        for turn in row["conversations"] if isinstance(row["conversations"], list) else ():
            if isinstance(turn, dict):
                check_turn_keys(turn, TURN_KEYS, name=self.name)
                if not TURN_KEYS & turn.keys():
                    raise self._corrupt(f"has a turn with {keys_of(turn)}; {SHAPES}")
        conversation = self._read_as(_Conversation, row)
        messages = conversation.conversations
        if messages and messages[0].speaker in ANSWERERS:
            messages = messages[1:]  # an answer to nothing: LLaVA's own reader drops it, too
        asks = all(message.speaker in QUESTIONERS for message in messages[::2])
        answers = all(message.speaker in ANSWERERS for message in messages[1::2])
        if not messages or len(messages) % 2 or not asks or not answers:
            speakers = shorten(", ".join(message.speaker for message in messages))
            raise self._corrupt(f"has turns of {speakers}; they must be human, gpt, ...")
        turns = []
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            turns.append((QUESTION.format(question.value.strip()), answer.value.strip()))
        files = self._picture_files(conversation)
        if not files and any(IMAGE in question.value for question in messages[::2]):
            raise self._corrupt(f"asks about an {IMAGE} but names no picture under 'image'")
        pictures = tuple(self._open(self.find(file)) for file in files)
        prompt, text = turns[0]
        return Sample.of(prompt, text, pictures, self.name, tuple(turns[1:]))

    def _picture_files(self, conversation: _Conversation) -> list[str]:
        """Return the files under `image` or `images`. Raises CorruptRecord if both have other ones."""
        named = []
        for files in (conversation.image, conversation.images):
            if files:
                named.append([files] if isinstance(files, str) else files)
        if len(named) == 2 and named[0] != named[1]:
            raise self._corrupt("names pictures under 'image' and others under 'images'; keep one of the keys")
        return named[0] if named else []

    def document(self, row: Mapping[str, Any]) -> Sample:
        """Return the sample of MMC4's `text_list` and `image_info` (arXiv 2304.06939), joined as OpenFlamingo does.

        Each picture comes before its sentence, and an end-of-chunk before each picture but the first.
        """
        content = self._read_as(_Document, row)
        infos = [info for info in content.image_info if info.matched_sim >= self.params.min_similarity]
        infos = sorted(infos, key=lambda info: info.matched_text_index)[: self.params.max_pictures]
        if not infos:
            words = f"has no picture that matches its text by min_similarity {self.params.min_similarity}"
            raise self._corrupt(words)
        matched = [info.matched_text_index for info in infos]
        if matched[-1] >= len(content.text_list):
            raise self._corrupt(f"has matched_text_index {matched[-1]}, beyond its text_list")
        document = ""
        for i, sentence in enumerate(content.text_list):
            if i in matched and i > matched[0]:
                document += END_OF_CHUNK
            elif i > 0:
                document += " "
            document += IMAGE * matched.count(i) + sentence.strip()
        pictures = []
        for info in infos:
            pictures.append(self._open(info.image_base64 or self.find(info.image_name or "")))
        before, text = document.split(IMAGE, 1)  # nothing is learned before the first picture
        return Sample.of(before + IMAGE, text, tuple(pictures), self.name)

    def _open(self, picture: Path | bytes) -> Image.Image:
        return open_picture(picture, name=self.name, max_megapixels=self.params.max_megapixels)

    def _corrupt(self, reason: str) -> CorruptRecord:
        return CorruptRecord(self.name, reason)

    def _read_as(self, kind: type[Kind], row: Mapping[str, Any]) -> Kind:
        """Return the fields of a row that are used. Raises CorruptRecord naming the first that is wrong."""
        try:
            return kind.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._corrupt(f"has a wrong {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
