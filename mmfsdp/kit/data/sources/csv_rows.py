"""TableRows: rows of .csv and .tsv files with the names of their columns in the first line."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....params import ParamError
from ..corrupt import CorruptRecord
from .file_bytes import FileBytes
from .first_bytes import what_it_is
from .json_scan import BOM
from .row_files import FoundRow, Ranges, RowFile

TAB = "\t"


class TableRows(RowFile):
    """A dict of column -> text in each row. A cell without text is not set."""

    format = "a table with named columns"
    named_by_picture = True

    def __init__(self, path: Path, *, delimiter: str):
        super().__init__(path)
        self.delimiter = delimiter
        self.columns: list[str] = []
        self._content = FileBytes(path)
        self._ranges = Ranges()
        self._numbers = array("q")
        """Numbers of the lines in which rows begin."""

    def scan(self) -> Iterator[FoundRow]:
        """Yield the number of its first line, an empty place and the row, or the CorruptRecord that it is."""
        known = what_it_is(self._content.start())
        if known:
            raise ParamError("path", f"{str(self.path)!r} is no table: it {known}")
        lines = _Lines(self._content.lines())
        first = next(lines, "")
        if self.delimiter == "," and "," not in first:
            # Where the comma is the decimal sign, spreadsheets write semicolons; Flickr30k's captions have `|`.
            self.delimiter = next((sign for sign in (";", TAB, "|") if sign in first), ",")
        self.columns = self._column_names(first)
        rows = self._reader(lines)
        while True:
            # A quoted cell may have line ends, so a row is as many lines as csv takes for it.
            start, number = lines.end, lines.number + 1
            try:
                # strict=True: csv raises for text behind a closing quote, which it would otherwise join to the cell.
                cells: list[str] | csv.Error | None = next(rows, None)
            except csv.Error as error:
                cells = error
            if cells is None:
                return
            if cells:
                self._ranges.add(start, lines.end)
                self._numbers.append(number)
                yield str(number), "", self._row(cells, number)

    def read(self, i: int) -> FoundRow:
        """Return the row of that number."""
        number = self._numbers[i]
        lines = _Lines(io.BytesIO(self._content.read(*self._ranges[i])))
        try:
            cells: list[str] | csv.Error = next(self._reader(lines), [])
        except csv.Error as error:
            cells = error
        return str(number), "", self._row(cells, number)

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Yield the cells of each row. Spaces after a `|` are for the eye."""
        return csv.reader(lines, delimiter=self.delimiter, skipinitialspace=self.delimiter == "|", strict=True)

    def _column_names(self, line: str) -> list[str]:
        """Return the names of the columns. Raises ParamError for a name that is there twice."""
        try:
            names = [name.strip() for name in next(self._reader([line]), [])]
        except csv.Error as error:
            raise ParamError("path", f"{str(self.path)!r}: its first line names no columns ({error})") from None
        names = [name or f"column {i}" for i, name in enumerate(names, start=1)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            message = f"{str(self.path)!r} has two columns {twice[0]!r}; its first line must name each column once"
            raise ParamError("path", message)
        return names

    def _row(self, cells: list[str] | csv.Error, number: int) -> dict[str, str] | CorruptRecord:
        name = f"{self.relative.as_posix()}:{number}"
        if isinstance(cells, csv.Error):
            words = f"is no row of a table ({cells}); a quote within quotes is written twice"
            return CorruptRecord(name, words)
        # surrogateescape has put these in the place of bytes that are not UTF-8.
        if any("\udc80" <= letter <= "\udcff" for cell in cells if not cell.isascii() for letter in cell):
            return CorruptRecord(name, "is not UTF-8; save the table in UTF-8")
        if len(cells) > len(self.columns):
            sign = {",": "a comma", TAB: "a tab"}.get(self.delimiter, f"a {self.delimiter!r}")
            words = f"has {len(cells)} cells and the table has {len(self.columns)} columns; quote a text with {sign}"
            return CorruptRecord(name, words)
        row = {}
        for column, cell in zip(self.columns, cells, strict=False):
            if cell.strip():
                row[column] = cell
        return row


class _Lines:
    """Lines of text, counted, with the byte behind the last one."""

    def __init__(self, lines: Iterable[bytes]):
        self._lines = iter(lines)
        self.number = 0
        self.end = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.end += len(line)
        if self.number == 1:
            line = line.removeprefix(BOM)
        # What is not UTF-8 becomes halves of characters, by which its row is found: the others stay usable.
        return line.decode("utf-8", "surrogateescape")
