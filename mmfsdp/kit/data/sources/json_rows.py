"""JsonLines and JsonList: rows in .jsonl and .json files, with COCO captions."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....params import ParamError
from ..rows.rows import check_row, parse_row
from .file_bytes import FileBytes
from .first_bytes import what_it_is
from .json_scan import HALF_CHARACTER_BYTES, JsonCursor, NotScanned
from .row_files import FoundRow, Ranges, RowFile


class JsonLines(RowFile):
    """A JSON object in each line."""

    format = "JSON lines"
    named_by_picture = True

    def __init__(self, path: Path):
        super().__init__(path)
        self._content = FileBytes(path)
        self._ranges = Ranges()
        self._numbers = array("q")
        """Numbers of the lines that are not empty."""

    def scan(self) -> Iterator[FoundRow]:
        """Yield the number, an empty place and the row of each line that is not empty."""
        # An empty file is no mistake here: read_records names it among what was skipped.
        known = what_it_is(self._content.start() or b"{")
        if known:
            raise ParamError("path", f"{str(self.path)!r} is no JSON lines: it {known}")
        place = 0
        for number, line in enumerate(self._content.lines(), start=1):
            end = place + len(line)
            if line.strip():
                self._ranges.add(place, end)
                self._numbers.append(number)
                yield self._found(number, line)
            place = end

    def read(self, i: int) -> FoundRow:
        """Return the row of that number."""
        return self._found(self._numbers[i], self._content.read(*self._ranges[i]))

    def _found(self, number: int, line: bytes) -> FoundRow:
        try:
            row = json.loads(line)
            # Nearly all lines have no escaped character and none of several bytes, which takes less time to tell.
            if (line.isascii() and b"\\u" not in line) or not HALF_CHARACTER_BYTES.search(line):
                return str(number), "", row
        except (ValueError, RecursionError):
            pass
        return str(number), "", self.checked(str(number), "", lambda name: parse_row(line, name=name))


class JsonList(RowFile):
    """A list of JSON objects, or the images and annotations of COCO's captions."""

    format = "JSON"

    def __init__(self, path: Path):
        super().__init__(path)
        self._content = FileBytes(path)
        self._ranges = Ranges()
        self._coco: _CocoImages | None = None

    def scan(self) -> Iterator[FoundRow]:
        """Yield the id, or else the index, the place and the row of each record."""
        try:
            # Value by value: a list of a million rows in one text would be in memory twice.
            cursor = JsonCursor(self._content)
            if cursor.peek() == "[":
                for start, end, row in cursor.items():
                    self._ranges.add(start, end)
                    yield self._found(len(self._ranges) - 1, row, cursor.may_have_half)
                cursor.end()
                return
            is_coco = self._scan_coco(cursor)
        except (NotScanned, UnicodeDecodeError):
            raise self._not_json() from None
        if not is_coco:
            message = f"{str(self.path)!r} holds neither a list of rows nor COCO's images and annotations"
            raise ParamError("path", message)
        for i in range(len(self._ranges)):
            yield self.read(i)

    def read(self, i: int) -> FoundRow:
        """Return the row of that number."""
        text = self._content.read(*self._ranges[i])
        row = json.loads(text)
        may_have_half = bool(HALF_CHARACTER_BYTES.search(text))
        if self._coco is not None:
            row, in_image = self._coco.row(i, row)
            may_have_half = may_have_half or in_image
        return self._found(i, row, may_have_half)

    def _found(self, i: int, row: Any, may_have_half: bool) -> FoundRow:
        key, where = str(i), ""
        # An id may be there twice, as where files were joined. With its index the name is of one row.
        if self._coco is not None or (isinstance(row, dict) and row.get("id") is not None):
            key, where = str(row.pop("id") if self._coco is not None else row["id"]), f"row {i}"
        if may_have_half:
            row = self.checked(key, where, lambda name: check_row(row, name=name))
        return key, where, row

    def _scan_coco(self, cursor: JsonCursor) -> bool:
        """Return whether the file is COCO's, and learn the places of its annotations and images."""
        if cursor.peek() != "{":
            cursor.value()
            cursor.end()
            return False
        coco = _CocoImages(self._content, self.path)
        lists = set()
        for key in cursor.keys():
            if key not in ("images", "annotations") or cursor.peek() != "[":
                cursor.value()
                continue
            lists.add(key)
            for start, end, value in cursor.items():
                if key == "images":
                    coco.add(start, end, value)
                else:
                    self._ranges.add(start, end)
        cursor.end()
        # One of the two lists alone is some other JSON.
        if len(lists) < 2:
            return False
        # The images may stand behind the annotations, which are therefore read a second time.
        coco.join(json.loads(self._content.read(*self._ranges[i])) for i in range(len(self._ranges)))
        self._coco = coco
        return True

    def _not_json(self) -> ParamError:
        """Return the error that names what is wrong with the text."""
        start = self._content.start()
        text = b"".join(self._content.lines())
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            known = what_it_is(start)
            words = f": it {known}" if known else f" ({error}); JSON lines must be in a .jsonl file"
            return ParamError("path", f"{str(self.path)!r} is not JSON{words}")
        raise AssertionError("the scan refuses what json.loads takes")


class _CocoImages:
    """The images of COCO's captions, by the annotations that are about them."""

    def __init__(self, content: FileBytes, path: Path):
        self._content = content
        self._path = path
        self._ranges = Ranges()
        self._numbers: dict[Any, int] = {}
        """Number of each image by its id, until the annotations are joined."""
        self._of_note = array("q")
        """Number of each annotation's image; -1 if there is none."""

    def add(self, start: int, end: int, image: Any) -> None:
        """Add an image. Raises ParamError if it is none."""
        with _coco_errors(self._path):
            image["file_name"]
            self._numbers[image["id"]] = len(self._ranges)
        self._ranges.add(start, end)

    def join(self, notes: Iterable[Any]) -> None:
        """Learn the image of each annotation. Raises ParamError if one is none."""
        with _coco_errors(self._path):
            for note in notes:
                note.items(), note["id"]
                self._of_note.append(self._numbers.get(note["image_id"], -1))
        self._numbers = {}

    def row(self, i: int, note: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the row of annotation `i`, still with its id, and whether the image may have half a character."""
        row = {key: value for key, value in note.items() if key != "image_id"}
        row["file_name"] = None
        number = self._of_note[i]
        if number < 0:
            return row, False
        image = self._content.read(*self._ranges[number])
        row["file_name"] = json.loads(image)["file_name"]
        return row, bool(HALF_CHARACTER_BYTES.search(image))


@contextmanager
def _coco_errors(path: Path) -> Iterator[None]:
    """Raise what an image or annotation in another form raises as a ParamError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{str(path)!r} is not as COCO's: images need id and file_name, annotations id and image_id"
        raise ParamError("path", f"{message} ({type(error).__name__}: {error})") from None
