"""CorruptRecord: a record that cannot be used, by a name that a log can show."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

MAX_NAME = 80
"""Letters of a name that are shown: a picture in base64 may stand where a file's name is expected."""
REASONS_SHOWN = 3


class Unreadable(ValueError):
    """The reason why a row cannot be used, before its name is added: it becomes a CorruptRecord."""


class CorruptRecord(ValueError):
    """A record that cannot be used, by name. Loaders skip, count and report it."""

    def __init__(self, name: str, reason: str, where: str = ""):
        self.name, self.reason, self.where = shorten(name), printable(reason), where
        super().__init__(f"{self.name!r} {self.reason}")

    def at(self, where: str) -> CorruptRecord:
        """Return the same with its place in its file."""
        return CorruptRecord(self.name, self.reason, where)

    @property
    def label(self) -> str:
        """Return what tells this record from all others of its source; see `Sample.label`."""
        return label_of(self.name, self.where)


def label_of(name: str, where: str) -> str:
    """Return a record's name and, where others may share it, its place in its file: skipped records are its keys."""
    return f"{shorten(name)} ({where})" if where else shorten(name)


def shorten(text: str) -> str:
    """Return a text of at most 80 letters: of a longer one its start, a checksum and its end.

    The checksum keeps apart long names that differ in a few letters: skipped records are counted by name.
    """
    if len(text) <= MAX_NAME:
        return text
    checksum = f"…{crc32(text.encode('utf-8', 'replace')):08x}…"
    start = MAX_NAME // 2
    return text[:start] + checksum + text[len(text) - (MAX_NAME - start - len(checksum)) :]


def printable(text: str) -> str:
    """Return a text with its control characters written out: it may come from a file, and go to a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def first_reasons(skipped: Mapping[str, str]) -> str:
    """Return the first three different reasons of skipped records, each with the first label that has it."""
    labels: dict[str, list[str]] = {}
    for label, reason in skipped.items():
        labels.setdefault(reason, []).append(label)
    texts = []
    for reason, same in list(labels.items())[:REASONS_SHOWN]:
        others = f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        texts.append(f"{same[0]}{others} {reason}")
    return "; ".join(texts)
