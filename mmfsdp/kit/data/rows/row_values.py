"""Values of a row: texts, lists and pictures, as JSON, tables, Parquet files and a person's own reader have them.

Each function raises Unreadable for a value of another type.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image, UnidentifiedImageError

from ..batch import IMAGE, USER, Message
from ..corrupt import Unreadable, shorten
from .unread import is_set, keys_of

Row = Mapping[str, Any]
Picture = str | bytes | Image.Image
"""A picture of a row: the name of its file, its file's bytes, or the picture itself."""

PICTURE_KEYS = (
    *("file_name", "image", "images", "image_path", "image_paths", "image_file", "image_bytes", "img", "img_path"),
    *("decoded_image", "picture", "photo", "filename", "filepath", "image_name", "jpg", "jpeg", "png", "webp"),
)
"""Keys under which a row has its pictures: the first that is set is read."""
MAX_FILE_NAME = 255
"""Letters that file systems allow in a name."""
BASE64 = re.compile(r"[A-Za-z0-9+/=_\s-]+")
CONTENT_KEY = re.compile(r"(^|[._])(bytes|base64)(\.\d+)?$")
"""Keys that hold a picture itself and not the name of its file: image_bytes, image.bytes."""
AS_A_FILE = "write the picture to a file and give the file's name"
NUMBERED_IMAGE = re.compile(r"<image_\d+>")
"""Places of pictures by name, in rows whose `image` is a dict of them (MiniCPM-V)."""


@dataclass(frozen=True)
class Content:
    """Holds what a row says: the messages of its sample, and its pictures, which are not opened yet."""

    messages: tuple[Message, ...]
    pictures: tuple[Picture, ...]
    verbatim: bool = False
    """See `Sample.verbatim`."""


def first_set(row: Row, keys: Iterable[str]) -> str:
    """Return the first of some keys that has content in a row; "" if none has."""
    for key in keys:
        value = row.get(key)
        if is_set(value) and not (isinstance(value, str) and value.isspace()):
            return key
    return ""


def first_key(row: Row, keys: Iterable[str]) -> str:
    """Return the first of some keys that a row has, also with an empty value; "" if it has none. Null is none."""
    return next((key for key in keys if row.get(key) is not None), "")


def text_in(row: Row, key: str) -> str:
    """Return the text under a key, without spaces around it; "" if there is none."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unreadable(f"has {key!r}, which is of type {type(value).__name__} and no text")
    return value.strip()


def list_in(row: Row, key: str) -> list[Any]:
    """Return the list under a key; a table may hold it as text in JSON."""
    value = row.get(key)
    if value is None:
        raise Unreadable(f"has no {key!r}, which it needs (it has {keys_of(row)})")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"has {key!r}, a text that is no list in JSON ({error})") from None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise Unreadable(f"has a wrong {key}: it should be a list, and is of type {type(value).__name__}")
    return list(value)


def texts_in(row: Row, key: str, inner_keys: Sequence[str] = (), *, numbers: bool = False) -> list[str]:
    """Return the texts under a key: one, a list of them, or dicts with a text under one of `inner_keys`.

    Empty texts are left out. numbers: a number is taken as a text.
    """
    value = row.get(key)
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = []
    for item in values:
        if isinstance(item, Mapping):
            inner = first_set(item, inner_keys)
            if not inner:
                words = f"; a dict there needs {' or '.join(inner_keys)}" if inner_keys else ""
                raise Unreadable(f"has {key!r}, a dict and no text{words}")
            item = item[inner]
        if numbers and isinstance(item, Real) and not isinstance(item, bool):
            item = str(item)
        texts.append(text_in({key: item}, key))
    return [text for text in texts if text]


def check_file_name(file: str) -> None:
    """Raise Unreadable where a picture's file name is a URL, or a picture in base64."""
    if file.startswith("data:") or _is_base64_picture(file):
        raise Unreadable(f"holds a picture in base64 ({len(file)} letters) in place of a file's name; {AS_A_FILE}")
    if "://" in file:
        raise Unreadable(f"names the URL {shorten(file)!r}; download it, and give the file's name")


def _is_base64_picture(text: str) -> bool:
    """Return whether a text is a picture in base64, and no file's name: by its length, or by what it decodes to."""
    if not BASE64.fullmatch(text):
        return False
    # No file system has names of that length.
    if len(text) > MAX_FILE_NAME:
        return True
    try:
        content = base64.b64decode(text.replace("-", "+").replace("_", "/") + "===")  # ignores what is too much
        Image.open(io.BytesIO(content)).close()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):  # PIL's decoders raise several kinds
        return False
    return True


def picture_from(value: Any, key: str) -> Picture:
    """Return one picture: a name, bytes, a dict of `bytes` and `path` as Parquet files of datasets have it, or itself.

    `key` is where it was found, for errors.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        if value.get("bytes"):
            return picture_from(value["bytes"], f"{key}.bytes")
        value = value.get("path")
    elif isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Image.Image):
        return value
    if not isinstance(value, str):
        kind = type(value).__name__
        raise Unreadable(f"has a wrong {key}: a picture is a file's name, bytes or a picture of PIL, and not a {kind}")
    name = path_named(value)
    if not name:
        raise Unreadable(f"has a wrong {key}: a picture without a name")
    if CONTENT_KEY.search(key):
        words = f"a text of {len(name)} letters and no bytes, which JSON and tables of text cannot hold"
        raise Unreadable(f"has a wrong {key}: {words}; {AS_A_FILE}")
    check_file_name(name)
    return name


def path_named(name: str) -> str:
    """Return the path of a file that is named by it or by a file:// address."""
    name = name.strip()
    return unquote(urlsplit(name).path) if name.startswith("file://") else name


def pictures_in(row: Row) -> list[Picture]:
    """Return the pictures of a row, of the first of PICTURE_KEYS that is set."""
    key = first_set(row, PICTURE_KEYS)
    if not key:
        return []
    pictures = _pictures_under(row, key)
    # Some data sets have the first picture under `image`, and all of them under `images`.
    if key == "image" and is_set(row.get("images")) and pictures != _pictures_under(row, "images"):
        raise Unreadable("names pictures under 'image' and others under 'images'; keep one of the keys")
    return pictures


def _pictures_under(row: Row, key: str) -> list[Picture]:
    value = row[key]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = list_in(row, key)
    if named_pictures(value):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [picture_from(item, f"{key}.{i}") for i, item in enumerate(value)]
    return [picture_from(value, key)]


def named_pictures(value: Any) -> bool:
    """Return whether a value is a dict of pictures by their places in the texts, <image_00> and so on."""
    return isinstance(value, Mapping) and bool(value) and all(NUMBERED_IMAGE.fullmatch(str(key)) for key in value)


def file_name_of(value: Any) -> str:
    """Return the file's name of one picture; "" for one that is in the row itself."""
    if isinstance(value, Mapping):
        value = None if value.get("bytes") else value.get("path") or value.get("url")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return path_named(value) if isinstance(value, str) else ""


def place_pictures(
    messages: Sequence[Message], places: Sequence[Picture | None], pictures: Sequence[Picture], *, in_front: bool
) -> Content:
    """Return messages with their pictures in the order of their places in the texts.

    Args:
        messages: the messages, with IMAGE at each place.
        places: for each place in order its own picture, or None for the next of `pictures`.
        pictures: those that the row names outside of its messages.
        in_front: without any place, the pictures stand before the first text of the user.
    """
    open_places = list(places).count(None)
    if pictures and not places and in_front:
        first = next((i for i, message in enumerate(messages) if message.role == USER), None)
        if first is not None:
            text = messages[first].text
            text = IMAGE * len(pictures) + ("\n" + text if text else "")
            placed = [*messages[:first], Message(USER, text), *messages[first + 1 :]]
            return Content(tuple(placed), tuple(pictures))
    if open_places and len(places) > open_places and open_places != len(pictures):
        words = f"has {IMAGE} in a text, which is the place of a picture under 'image' or 'images'"
        fix = f"remove the word {IMAGE} from the text"
        raise Unreadable(f"{words}, beside pictures that are parts of messages; {fix}")
    if open_places and not pictures:
        raise Unreadable(f"asks about an {IMAGE} but names no picture under 'image'")
    if len(places) > open_places and len(pictures) > open_places:
        raise Unreadable("has pictures in its messages and others under 'image' or 'images'; keep one of them")
    if open_places != len(pictures):
        words = f"has {open_places} {IMAGE} placeholders but {len(pictures)} pictures; "
        raise Unreadable(words + "give one placeholder per picture")
    rest = iter(pictures)
    return Content(tuple(messages), tuple(next(rest) if place is None else place for place in places))
