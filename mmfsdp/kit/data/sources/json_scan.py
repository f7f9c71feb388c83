"""Walk a list of JSON values in a file: each value with the range of bytes that it has there, and none is kept."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from .file_bytes import FileBytes

PIECE = 1 << 20
"""Bytes that are read at a time, twice as many each time that a value does not end in them."""
BOM = b"\xef\xbb\xbf"
Item = tuple[int, int, Any]
"""The first byte of a value, the byte behind it, and the value."""
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
HALF_CHARACTER_BYTES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Bytes in the text of JSON with an unpaired surrogate, half a character; also whole characters may have the first."""

_skip_space = re.compile(r"[ \t\n\r]*").match
_decode = json.JSONDecoder().raw_decode


class NotScanned(ValueError):
    """A text that is not JSON. `json.loads` of the whole text says why in the usual words."""


class JsonCursor:
    """A place in a JSON text, of which only the piece around the place is in memory."""

    def __init__(self, content: FileBytes):
        self.content = content
        self.byte = len(BOM) if content.read(0, len(BOM)) == BOM else 0
        """The place in the file."""
        self._text = ""
        self._place = 0
        """Place in the piece of the file that is in memory."""
        self._next = self.byte
        """The first byte that has not been read."""
        self._piece = PIECE
        self._complete = False
        """True if the piece reaches the end of the file."""
        self.may_have_half = False
        """True if the last value has the text of half a character."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")  # as json.loads decodes bytes
        self._read_on()

    def _read_on(self) -> None:
        """Add the next bytes of the file to the piece, and drop what is before the place."""
        part = self.content.read(self._next, self._next + self._piece)
        self._next += len(part)
        self._complete = len(part) < self._piece
        self._text = self._text[self._place :] + self._decoder.decode(part, final=self._complete)
        self._place = 0
        self._is_ascii = self._text.isascii()
        self._has_halves = not self._is_ascii and bool(HALF_CHARACTER.search(self._text))

    def _move(self, place: int) -> None:
        if self._is_ascii:
            self.byte += place - self._place
        else:
            self.byte += len(self._text[self._place : place].encode("utf-8", "surrogatepass"))
        self._place = place

    def peek(self) -> str:
        """Return the next character behind white space; "" at the end of the file."""
        while True:
            match = _skip_space(self._text, self._place)
            assert match is not None  # it matches no character, too
            self._move(match.end())
            if self._place < len(self._text) or self._complete:
                return self._text[self._place : self._place + 1]
            self._read_on()

    def take(self, characters: str) -> str:
        """Return the next character, which must be one of these, and go behind it. Raises NotScanned."""
        character = self.peek()
        if not character or character not in characters:
            raise NotScanned
        self._move(self._place + 1)
        return character

    def value(self) -> Item:
        """Return the next value, and go behind it. Raises NotScanned."""
        self.peek()
        start = self.byte
        while True:
            try:
                value, end = _decode(self._text, self._place)
            except RecursionError:
                raise NotScanned from None
            except ValueError:  # it is no JSON, or ends in the next piece
                if self._complete:
                    raise NotScanned from None
            else:
                if end < len(self._text) or self._complete:  # otherwise a number may go on
                    break
            self._read_on()
            self._piece *= 2
        self._piece = PIECE
        # Nearly all values have no escaped character, which `find` tells in a fraction of the time of a search.
        is_doubtful = self._has_halves or self._text.find("\\u", self._place, end) >= 0
        self.may_have_half = is_doubtful and bool(HALF_CHARACTER.search(self._text, self._place, end))
        self._move(end)
        return start, self.byte, value

    def items(self) -> Iterator[Item]:
        """Yield the values of a list, and go behind it. Raises NotScanned."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return

    def keys(self) -> Iterator[str]:
        """Yield the keys of an object; whoever asks takes the value behind each. Raises NotScanned."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            _, _, key = self.value()
            if not isinstance(key, str):
                raise NotScanned
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def end(self) -> None:
        """Raise NotScanned if the text goes on."""
        if self.peek():
            raise NotScanned
