"""ParquetRows: rows of a Parquet file, read by pyarrow a row group at a time. Needs the extra `parquet`.

Only whole row groups can be read: of a page in the middle pyarrow does not know where it is. A process keeps the row
groups that it used last, and an epoch's order takes rows of a few row groups at a time (`Blocks`), so that each is read
once in an epoch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ....params import ParamError
from ....params.in_words import size
from ..rows.row_pictures import columns_of_names
from .file_bytes import State, check_unchanged, state_of
from .first_bytes import START_BYTES, what_it_is
from .row_files import FIRST_ROWS, FoundRow, RowFile, named_by_id

CACHE_BYTES = 256 * 2**20
"""Bytes of the row groups that a process keeps. An epoch mixes the rows of half as many at a time."""
PARQUET = b"PAR1"
MISSING = 'source parquet needs pyarrow, which is not installed; run: pip install "mmfsdp[parquet]"'


class ParquetRows(RowFile):
    """A row is a dict of column -> value; a picture is {bytes, path}, as datasets writes it, or a file's name."""

    format = "Parquet"
    scans_whole_rows = False

    def __init__(self, path: Path):
        super().__init__(path)
        if find_spec("pyarrow") is None:
            raise ParamError("source", MISSING)
        self._state: State = state_of(path.stat())
        metadata = self._open().metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        """(G,) the number of rows up to the end of each row group."""
        self.block_bytes = np.array([group.total_byte_size for group in groups], dtype=np.int64)

    def scan(self) -> Iterator[FoundRow]:
        """Yield of each row its id and the names of its pictures alone: pictures and texts stay in the file."""
        columns = self._naming_columns()
        i = 0
        for group, end in enumerate(self._ends):
            try:
                batches = self._open().iter_batches(row_groups=[group], columns=columns, use_threads=False)
                for batch in batches if columns else ():
                    for row in batch.to_pylist():
                        yield named_by_id(i, row)
                        i += 1
            except (OSError, ValueError):
                pass  # reading its rows says what is wrong with them
            for number in range(i, int(end)):
                yield named_by_id(number, {})
            i = int(end)

    def read(self, i: int) -> FoundRow:
        """Return the row of that number. Raises ValueError if its row group is damaged."""
        group = int(self.block_of(np.array([i]))[0])
        # With the state of the file: one that was written again has other groups.
        key, nbytes = (self.path, self._state, group), int(self.block_bytes[group])
        table = kept_groups.get(key, nbytes, lambda: self._open().read_row_group(group, use_threads=False))
        first = int(self._ends[group - 1]) if group else 0
        return named_by_id(i, table.slice(i - first, 1).to_pylist()[0])

    def block_of(self, rows: np.ndarray) -> np.ndarray:
        """Return (N,) the row group of each row."""
        return np.searchsorted(self._ends, rows, side="right")

    def first_rows(self) -> list[dict[str, Any]]:
        """Return the first rows whole; none if they cannot be read."""
        batches = self._open().iter_batches(batch_size=FIRST_ROWS, use_threads=False)
        try:
            return next(batches).to_pylist()
        except (StopIteration, OSError, ValueError):
            return []

    def notes(self) -> list[str]:
        """Return what a person should know of the file."""
        if not len(self.block_bytes) or self.block_bytes.max() <= CACHE_BYTES:
            return []
        largest = size(int(self.block_bytes.max()))
        fix = "write it again with smaller ones, as pyarrow.parquet.write_table(table, path, row_group_size=100)"
        return [f"a row group of {self.path.name} has {largest}, which each rank reads as a whole; {fix}"]

    def _naming_columns(self) -> list[str]:
        """Return the paths of the columns that hold ids and names of pictures, without bytes of pictures."""
        schema = self._open().schema
        naming = columns_of_names(self.first_rows())
        columns = []
        for i in range(len(schema)):
            column = schema.column(i)
            top = column.path.partition(".")[0]
            # Bytes of pictures stand under the same names; they are no texts.
            if top == "id" or (top in naming and column.logical_type.type == "STRING"):
                columns.append(column.path)
        return columns

    def _open(self) -> Any:
        """Return pyarrow's ParquetFile. Raises ParamError if it is none, OSError if it has changed."""
        with self.path.open("rb") as file:
            check_unchanged(file, self._state)
            start = file.read(START_BYTES)
        try:
            return _parquet_file(self.path, self._state, threading.get_ident())
        except Exception as error:  # pyarrow's errors derive from several classes
            known = "" if start.startswith(PARQUET) else what_it_is(start)
            words = f"it {known}" if known else f"it is damaged, or is something else ({error})"
            raise ParamError("path", f"{str(self.path)!r} is no Parquet file: {words}") from None


@lru_cache(64)
def _parquet_file(path: Path, state: State, thread: int) -> Any:
    """Return pyarrow's file for one thread: a reader of its keeps settings, such as the size of a batch, in itself."""
    parquet = import_module("pyarrow.parquet")
    # Checksums are checked where the file has them. Nothing is read ahead: row groups are read as a whole.
    return parquet.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)


class GroupCache:
    """The row groups that a process used last, up to a number of bytes, and at least one."""

    def __init__(self, limit: int):
        self.limit = limit
        self.misses = 0
        self._tables: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, nbytes: int, read: Callable[[], Any]) -> Any:
        """Return the table of a key, from `read` if it is not kept.

        nbytes: its bytes as the file gives them, by which an epoch is planned; in memory they may be more, where a text
        is repeated. Raises ValueError if it cannot be read.
        """
        with self._lock:  # all threads of a process share the cache
            if key not in self._tables:
                self._keep(key, nbytes, read)
            self._tables.move_to_end(key)
            table, _ = self._tables[key]
        if isinstance(table, ValueError):
            raise ValueError(str(table))
        return table

    def _keep(self, key: Any, nbytes: int, read: Callable[[], Any]) -> None:
        self.misses += 1
        try:
            table = read()
        except (OSError, ValueError) as error:  # the next row of a damaged group would read it again
            table = ValueError(str(error))
        self._tables[key] = table, nbytes
        self._bytes += nbytes
        # At least one stays, or each row of a large group would read the group again.
        while self._bytes > self.limit and len(self._tables) > 1:
            _, (_, oldest) = self._tables.popitem(last=False)
            self._bytes -= oldest


kept_groups = GroupCache(CACHE_BYTES)
"""One for all sources of a process: they share its memory."""
