"""Rows of pictures and texts without questions: captions, and interleaved documents (OBELICS, MMC4)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from ....params import SourceParams
from ..batch import ASSISTANT, IMAGE, USER, Message
from ..corrupt import Unreadable
from ..processor import END_OF_CHUNK
from .row_values import Content, Picture, Row, first_set, list_in, picture_from, pictures_in, place_pictures, texts_in
from .unread import is_set, keys_of

TEXT_KEYS = (
    *("text", "caption", "captions", "sentences", "sentence", "raw", "txt", "TEXT", "alt_text", "description"),
    *("caption_str", "reference_strs", "annotations_captions", "raw_caption", "comment"),
)
"""Keys under which a row has the caption of its picture, or several: the first that is set is read."""
INNER_TEXT_KEYS = ("raw", "caption", "text", "sentence")
"""Keys of the text of a caption that is a dict (COCO's sentences)."""
LIST_IN_JSON = ("captions", "sentences", "raw")
"""Keys of captions that a table holds as a list in JSON (Flickr30k's annotations)."""


def read_caption(row: Row, params: SourceParams) -> Content:
    """Read a picture with its caption, or several. A text with places of pictures is a document."""
    key = first_set(row, TEXT_KEYS)
    pictures = pictures_in(row)
    if not pictures or not key:
        missing = "caption" if pictures else "file_name"
        raise Unreadable(f"has no {missing} (it has {keys_of(row)})")
    if key in LIST_IN_JSON and isinstance(row[key], str) and row[key].lstrip().startswith("["):
        row = {**row, key: list_in(row, key)}
    captions = texts_in(row, key, INNER_TEXT_KEYS)
    if not captions:
        raise Unreadable(f"has no caption: {key!r} is without text (it has {keys_of(row)})")
    places = captions[0].count(IMAGE)
    if len(captions) > 1 and any(IMAGE in caption for caption in captions):
        raise Unreadable(f"has {IMAGE} in one of several captions; a caption has its picture before it")
    if places:
        return place_pictures([Message(ASSISTANT, captions[0])], [None] * places, pictures, in_front=False)
    answer = Message(ASSISTANT, captions[0], tuple(captions[1:]))
    messages = (Message(USER, IMAGE * len(pictures)), answer)
    return Content(messages, tuple(pictures), verbatim=True)


def read_interleaved(row: Row, params: SourceParams) -> Content:
    """Read `images` and `texts` of OBELICS: two lists of one length, in each place a picture or a text."""
    images, texts = list_in(row, "images"), list_in(row, "texts")
    if len(images) != len(texts):
        raise Unreadable(f"has {len(images)} images and {len(texts)} texts; each place needs one and null in the other")
    document = _Document(params.max_pictures)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        # OBELICS has null in one of the lists for each place.
        if is_set(image) == is_set(text):
            raise Unreadable(f"has {'both' if is_set(image) else 'neither'} a picture and a text at place {i}")
        if is_set(image):
            document.add_picture(picture_from(image, f"images.{i}"))
        elif isinstance(text, str):
            document.add_text(text)
        else:
            raise Unreadable(f"has a wrong texts.{i}: it is of type {type(text).__name__} and no text")
    return document.content()


class _Document:
    """A document as OpenFlamingo joins it: an end-of-chunk before each picture that follows a text and a picture."""

    def __init__(self, max_pictures: int):
        self.max_pictures = max_pictures
        self.text = ""
        self.pictures: list[Picture] = []

    def add_picture(self, picture: Picture) -> None:
        """Add a picture, unless there are enough."""
        if len(self.pictures) == self.max_pictures:
            return
        if self.pictures and not self.text.endswith(IMAGE):
            self.text += END_OF_CHUNK
        elif self.text and not self.pictures:
            self.text += " "
        self.text += IMAGE
        self.pictures.append(picture)

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        if IMAGE in text:
            raise Unreadable(f"has {IMAGE} in a text; in a document the lists say where pictures stand")
        if self.text and not self.text.endswith(IMAGE):
            self.text += " "
        self.text += text.strip()

    def content(self) -> Content:
        """Return the document. Raises Unreadable without a picture."""
        if not self.pictures:
            raise Unreadable("has no picture under 'images'")
        return Content((Message(ASSISTANT, self.text),), tuple(self.pictures))


def read_matched(row: Row, params: SourceParams) -> Content:
    """Read MMC4's `text_list` and `image_info` (arXiv 2304.06939), joined as OpenFlamingo does.

    Each picture comes before its sentence, and an end-of-chunk before each picture but the first.
    """
    sentences = list_in(row, "text_list")
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise Unreadable(f"has a wrong text_list.{i}: it is of type {type(sentence).__name__} and no text")
    if row.get("image_info") is None:
        raise Unreadable("has a wrong image_info: Field required")
    infos = [_Info(info, i) for i, info in enumerate(list_in(row, "image_info"))]
    infos = [info for info in infos if info.similarity >= params.min_similarity]
    # In the order of their sentences, and then the first ones: sorting keeps the order of equals.
    infos = sorted(infos, key=lambda info: info.sentence)[: params.max_pictures]
    if not infos:
        raise Unreadable(f"has no picture that matches its text by min_similarity {params.min_similarity}")
    matched = [info.sentence for info in infos]
    if matched[-1] >= len(sentences):
        raise Unreadable(f"has matched_text_index {matched[-1]}, beyond its text_list")
    document = ""
    for i, sentence in enumerate(sentences):
        if i in matched and i > matched[0]:
            document += END_OF_CHUNK
        elif i > 0:
            document += " "
        document += IMAGE * matched.count(i) + sentence.strip()
    return Content((Message(ASSISTANT, document),), tuple(info.picture() for info in infos))


class _Info:
    """One picture of MMC4's `image_info`."""

    def __init__(self, info: Any, place: int):
        self.where = f"image_info.{place}"
        if not isinstance(info, Mapping):
            raise Unreadable(f"has a wrong {self.where}: it is of type {type(info).__name__} and no dict")
        self.info = info
        self.sentence = self._number("matched_text_index", int)
        if self.sentence < 0:
            raise Unreadable(f"has a wrong {self.where}.matched_text_index: {self.sentence}, below 0")
        self.similarity = self._number("matched_sim", float, 1.0)

    def _number(self, key: str, kind: type, default: float | None = None) -> Any:
        value: Any = self.info.get(key)
        if value is None and default is not None:
            return default
        try:
            if isinstance(value, bool) or kind(value) != float(value):
                raise ValueError
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            raise Unreadable(f"has a wrong {self.where}.{key}: {value!r} is no {kind.__name__}") from None

    def picture(self) -> Picture:
        """Return the picture in base64, decoded, or else the name of its file."""
        encoded: Any = self.info.get("image_base64")
        if not is_set(encoded):
            return picture_from(self.info.get("image_name"), f"{self.where}.image_name")
        try:
            return base64.b64decode(encoded)
        except (TypeError, ValueError, binascii.Error):
            raise Unreadable(f"has a wrong {self.where}.image_base64, which is no base64") from None
