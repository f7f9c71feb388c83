"""Tell pictures, videos and sounds in the values and texts of a row by what they are, whatever their keys are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from .batch import IMAGE
from .sources.first_bytes import is_film, is_picture

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
FILM_SUFFIXES = (
    *(".mp4", ".webm", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg"),
    *(".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus", ".aac"),
)
"""Endings of files of videos and sounds."""

PICTURE, PICTURE_NAME, PICTURE_URL = "a picture", "the name of a picture's file", "the URL of a picture"
FILM, FILM_NAME = "a video or sound", "the name of a video or sound"
"""Words for a value: the thing itself, or its name."""

MAX_NAME, MAX_URL = 255, 2048
"""Letters of a file's name, as file systems allow, and of a URL."""
CONTENT_STARTS = ("data:", "/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""Beginnings of the content of a file in a text: as a data URI, or with the first bytes of JPEG, PNG, GIF or WebP in
base64."""
BASE64 = re.compile(r"[A-Za-z0-9+/]{64}")
MAX_DEPTH = 4
"""Dicts and lists inside of each other that are looked into."""


def media_of(value: Any) -> str:
    """Return what a value is: PICTURE, PICTURE_NAME, PICTURE_URL, FILM or FILM_NAME; "" for anything else.

    A list is what all of its values are. A dict is `{bytes, path}`, as datasets writes pictures and sounds, or `{url}`.
    """
    if isinstance(value, str):  # the types of JSON first: those below take more time to ask for
        return _of_text(value)
    if isinstance(value, (list, tuple)):
        return _of_list(value)
    if isinstance(value, dict):
        return _of_dict(value)
    if value is None or isinstance(value, (int, float)):
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _of_bytes(bytes(value[:512]))
    if isinstance(value, os.PathLike):
        return _of_text(os.fspath(value))
    if isinstance(value, Mapping):
        return _of_dict(value)
    return PICTURE if isinstance(value, Image.Image) else ""


def media_inside(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return the first of what `media_of` tells of a value, or of the values in its dicts and lists."""
    media = media_of(value)
    if media or not depth:
        return media
    inner_values: Any = ()
    if isinstance(value, Mapping):
        inner_values = value.values()
    elif isinstance(value, (list, tuple)):
        inner_values = [inner for inner in value if isinstance(inner, (Mapping, list, tuple))]
    for inner in inner_values:
        media = media_inside(inner, depth - 1)
        if media:
            return media
    return ""


def _of_text(text: str) -> str:
    if text.startswith(CONTENT_STARTS):
        if text.startswith("data:image/") or BASE64.match(text):
            return PICTURE
        if text.startswith(("data:video/", "data:audio/")):
            return FILM
    # Before anything else: texts may be of a megabyte.
    if len(text) > MAX_URL:
        return ""
    ending = text[-6:].rstrip().lower()
    # A cell of a table may hold a list of names.
    if ending.endswith("]") and text.lstrip().startswith("["):
        return _of_json(text)
    is_url = "://" in text and not text.startswith("file://")
    if is_url:
        ending = urlsplit(text).path[-6:].lower() if re.fullmatch(r"\S+", text) else ""
    elif len(text) > MAX_NAME or "\n" in text.strip():
        return ""
    if ending.endswith(PICTURE_SUFFIXES):
        return PICTURE_URL if is_url else PICTURE_NAME
    return FILM_NAME if ending.endswith(FILM_SUFFIXES) else ""


def _of_json(text: str) -> str:
    """Return what the list is that a cell of a table holds as a text in JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return _of_list(value) if isinstance(value, list) else ""


def _of_bytes(start: bytes) -> str:
    if is_picture(start):
        return PICTURE
    return FILM if is_film(start) else ""


def _of_dict(value: Mapping[str, Any]) -> str:
    if "array" in value and "sampling_rate" in value:  # a sound that datasets has decoded
        return FILM
    if value.get("bytes") and isinstance(value["bytes"], (bytes, bytearray, memoryview)):
        media = media_of(value["bytes"])
        named = media_of(value.get("path")) if isinstance(value.get("path"), str) else ""
        if media or not named:
            return media
        return PICTURE if named in (PICTURE, PICTURE_NAME, PICTURE_URL) else FILM  # of an ending, and damaged
    # A larger dict is something else, which has a path among other things.
    for key in ("path", "url"):
        if isinstance(value.get(key), str) and len(value) <= 3:
            return _of_text(value[key])
    return ""


def _of_list(values: Any) -> str:
    kinds: set[str] = set()
    for value in values:
        if value is None or (isinstance(value, str) and not value):
            continue
        media = media_of(value)
        if not media:
            return ""
        kinds.add(media)
    for media in (PICTURE, FILM, PICTURE_NAME, PICTURE_URL, FILM_NAME):
        if media in kinds:
            return media
    return ""


def is_name_alone(text: str) -> bool:
    """Return whether a text is nothing but a picture: its file's name, its URL or its bytes in base64."""
    return media_of(text.strip()) in (PICTURE, PICTURE_NAME, PICTURE_URL)


TAG = re.compile(r"<\|?([A-Za-z]+(?:[ _:-]?[A-Za-z0-9]+)*)\|?/?>")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""A word of a tag: ImageHere and IMG_CONTEXT have two each."""
MEDIA_WORDS = {"image", "img", "picture", "imgpad", "vision", "video", "vid", "audio", "sound", "speech", "media"}
PLACE_WORDS = {
    *("pad", "token", "soft", "placeholder", "here", "start", "end", "begin", "of", "bos", "eos", "in", "out", "input"),
    *("content", "context", "patch", "row", "col", "line", "break", "newline", "new", "thumbnail", "global", "fake"),
    *("around", "low", "res", "atom", "separator", "frame", "embed", "embedding", "feature", "features", "tile", "sep"),
}
"""Words beside those of media in the tags by which models and data sets mark places: <|vision_start|>."""
MEDIA_EDGES = {"boi", "eoi", "boa", "eoa", "bov", "eov"}
"""Begin and end of an image, audio or video, in the names that processors have for their tokens."""
DATA_URI = re.compile(r"data:(image|video|audio)/[\w.+-]+;base64,")


def media_tags(text: str) -> Iterator[str]:
    """Yield the tags in a text that stand for pictures, videos and sounds: <image>, <|video_pad|>, <img>, <image_1>.

    A tag is one of media by its words: one names a medium, and the others a place. So <image_description> is none.
    """
    if "<" not in text:
        return
    for tag in TAG.finditer(text):
        words = {word.lower() for word in WORD.findall(tag[1]) if not word.isdigit()}
        if words & MEDIA_WORDS and words <= MEDIA_WORDS | PLACE_WORDS:
            yield tag[0]


def own_media_tokens(processor: Any) -> frozenset[str]:
    """Return the tokens of pictures, videos and sounds that a processor of transformers writes, without IMAGE."""
    named = dict(getattr(getattr(processor, "tokenizer", None), "special_tokens_map", {}))
    for name in dir(processor):
        if name.endswith("_token"):
            named[name] = getattr(processor, name, None)
    tokens = set()
    for name, token in named.items():
        words = set(name.split("_"))
        if isinstance(token, str) and words & (MEDIA_WORDS | MEDIA_EDGES):
            tokens.add(token)
    return frozenset(tokens) - {IMAGE, ""}
