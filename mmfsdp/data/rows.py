"""A row of JSON as a sample: a picture with its caption, a conversation about pictures, or an interleaved document."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..params import SourceParams
from .batch import Sample
from .pictures import CorruptRecord, open_picture
from .processor import END_OF_CHUNK, IMAGE

Find = Callable[[str], Path | bytes]
"""Where a picture that a row names is, or its bytes. Raises CorruptRecord."""
ASKS, ANSWERS = ("human", "user"), ("gpt", "assistant")


def parse(text: str | bytes, *, name: str, what: str = "") -> dict[str, Any]:
    """A JSON object. Raises CorruptRecord with that name, the reason beginning with `what`."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CorruptRecord(name, f"{what}is not JSON ({error})") from None
    return checked(row, name=name, what=what)


def checked(row: Any, *, name: str, what: str = "") -> dict[str, Any]:
    """A row that is an object of whole letters, as no tokenizer and no log takes half ones. Raises CorruptRecord."""
    if not isinstance(row, dict):
        raise CorruptRecord(name, f"{what}is not a JSON object with fields")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CorruptRecord(name, f"{what}holds half a letter, an unpaired surrogate") from None
    return row


def picture_of(row: Mapping[str, Any]) -> str:
    """The one picture that a row names, under `file_name` or `image`; empty if there is none."""
    file = row.get("file_name", row.get("image"))
    return file.strip() if isinstance(file, str) else ""


def sample_of(row: Mapping[str, Any], params: SourceParams, *, name: str, find: Find) -> Sample:
    """The sample of a row: by its keys `conversations` (LLaVA), `text_list` (MMC4), else a captioned picture.

    Raises CorruptRecord with that name if the row or one of its pictures cannot be used.
    """
    if "conversations" in row:
        return _conversation(row, name, find)
    if "text_list" in row:
        return _document(row, params, name, find)
    return _captioned(row, name, find)


def _captioned(row: Mapping[str, Any], name: str, find: Find) -> Sample:
    if not picture_of(row):
        raise CorruptRecord(name, "has no file_name")
    text = row.get("text", row.get("caption"))
    if not isinstance(text, str) or not text.strip():
        raise CorruptRecord(name, "has no caption")
    return Sample(IMAGE, text.strip(), (open_picture(find(picture_of(row)), name=name),), name)


def _conversation(row: Mapping[str, Any], name: str, find: Find) -> Sample:
    """LLaVA's `conversations`: what a person asks is given, what the model answers is learned, in every turn."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(_says(turn) for turn in turns):
        raise CorruptRecord(name, "has conversations that are no list of {from, value}")
    said = [(turn["from"], turn["value"].strip()) for turn in turns]
    said = said[1:] if said and said[0][0] in ANSWERS else said  # an answer to nothing, as LLaVA's own reader does
    pairs = list(zip(said[::2], said[1::2], strict=False))
    if not pairs or len(said) % 2 or any(q[0] not in ASKS or a[0] not in ANSWERS for q, a in pairs):
        raise CorruptRecord(name, f"has turns of {', '.join(who for who, _ in said)}; they must be human, gpt, ...")
    (prompt, text), *more = [(f"USER: {q}\nASSISTANT:\n", a) for (_, q), (_, a) in pairs]
    files = row.get("image", row.get("images")) or []
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise CorruptRecord(name, f"has an image that is no file name: {files!r:.100}")
    return Sample(prompt, text, tuple(open_picture(find(file), name=name) for file in files), name, tuple(more))


def _says(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("from", "value"))


def _document(row: Mapping[str, Any], params: SourceParams, name: str, find: Find) -> Sample:
    """MMC4's `text_list` and `image_info` (arXiv 2304.06939), put together as OpenFlamingo does: each picture before
    the sentence that it matches, and an end-of-chunk before each picture but the first."""
    texts, infos = row["text_list"], row.get("image_info")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CorruptRecord(name, "has a text_list that is no list of texts")
    if not isinstance(infos, list) or not all(_matches(info, len(texts)) for info in infos):
        raise CorruptRecord(name, "has image_info without a matched_text_index within its text_list")
    infos = [info for info in infos if info.get("matched_sim", 1.0) >= params.min_similarity]
    infos = sorted(infos, key=lambda info: info["matched_text_index"])[: params.max_pictures]
    if not infos:
        raise CorruptRecord(name, f"has no picture that matches its text by min_similarity {params.min_similarity}")
    places = [info["matched_text_index"] for info in infos]
    text = ""
    for i, sentence in enumerate(texts):
        text += END_OF_CHUNK if i in places and i > places[0] else " " if i else ""
        text += IMAGE * places.count(i) + sentence.strip()
    prompt, said = text.split(IMAGE, 1)  # before the first picture nothing is learned
    return Sample(prompt + IMAGE, said, tuple(_picture(info, name, find) for info in infos), name)


def _matches(info: Any, sentences: int) -> bool:
    if not isinstance(info, dict) or not isinstance(info.get("matched_sim", 1.0), (int, float)):
        return False
    place = info.get("matched_text_index")
    return isinstance(place, int) and 0 <= place < sentences


def _picture(info: Mapping[str, Any], name: str, find: Find) -> Any:
    if isinstance(encoded := info.get("image_base64"), str):
        try:
            return open_picture(base64.b64decode(encoded, validate=True), name=name)
        except ValueError as error:
            raise CorruptRecord(name, f"has an image_base64 that is not base64 ({error})") from None
    file = info.get("image_name")
    if not isinstance(file, str) or not file:
        raise CorruptRecord(name, "has image_info with neither image_base64 nor image_name")
    return open_picture(find(file), name=name)
