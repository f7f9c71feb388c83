"""A person's own reader, `data.reader`: rows of an object with `__len__` and `__getitem__`, or of an iterable."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from itertools import count, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ....own.calls import OwnCodeError, call_own, own_errors, own_place, own_traceback
from ....own.modules import code_in_use, finding, use_code
from ....params import DataParams, ParamError, SourceParams
from ....params.own import path_of
from ..batch import Sample
from ..corrupt import CorruptRecord
from ..pictures import to_rgb
from ..rows.rows import check_row, keys_not_read, sample_of
from ..rows.unread import unread_note
from .splits import HELD_OUT, TRAIN, check_published, heldout_limit, is_in_split, published_split
from .stream import DataSlice, GivenRow, IndexedSource, Loaded, Source, at_epoch, load_or_corrupt

FIELD = "reader"
_END = object()
NO_INDEX = (
    "gives an iterable, without __len__ and __getitem__: its rows are not shuffled, each rank and each data worker "
    "reads all of them and keeps its own, and a resumed run reads them from the start again"
)


@dataclass
class OwnRows:
    """Rows that a person's reader gives. Each process calls it: a file that is held open cannot be sent to another."""

    params: SourceParams
    as_given: bool = False
    """Rows are handed on as the reader gave them, not as samples: for a model of one's own."""
    split: str = ""
    """The key of the split, where the reader gives a dict of splits."""
    code: Path | None = dataclass_field(default_factory=code_in_use)
    """The copy of own code that a rank uses: so does its data worker."""
    unread: set[str] = dataclass_field(default_factory=set)
    """Keys of the rows read so far that nobody reads."""
    has_turns: bool = False
    """A row read so far is a conversation of several turns."""
    has_system: bool = False
    """A row read so far has a system text."""
    traceback: str = ""
    """The person's own lines of the first row that raised."""
    given: Any = None
    """The value that the reader returned in this process; None before it was called."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process opens the rows by."""
        return vars(self) | {"given": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up the rows in another process."""
        vars(self).update(state)
        if self.code is not None:
            use_code(self.code)

    @property
    def path(self) -> str:
        """The import path of the reader."""
        assert self.params.reader is not None
        return path_of(self.params.reader)

    def open(self) -> Any:
        """Return the rows. Raises OwnCodeError."""
        if self.given is None:
            assert self.params.reader is not None
            self.given = call_own(FIELD, self.params.reader)
        return self.given[self.split] if self.split else self.given

    def splits(self) -> dict[str, OwnRows]:
        """Return the rows of each side where the reader gives a dict of splits; {} where it gives rows.

        Raises OwnCodeError for a dict without a split to train on, or without one to hold out.
        """
        given = self.open()
        if not isinstance(given, Mapping):
            return {}
        published = {str(key): published_split(PurePosixPath(), str(key)) for key in given}
        keys = {TRAIN: [key for key in published if published[key] == "train"]}
        keys[HELD_OUT] = [key for key in published if key == HELD_OUT]
        for split in ("validation", "test"):
            keys[HELD_OUT] += [key for key in published if published[key] == split]
        if not keys[TRAIN] or not keys[HELD_OUT]:
            words = (
                f"gives a dict of {', '.join(map(repr, published)) or 'nothing'}; a dict holds the splits 'train' and"
            )
            raise OwnCodeError(FIELD, f"{self.path!r} {words} 'heldout' (or 'validation'), each an object with rows")
        sides = {}
        for side in (TRAIN, HELD_OUT):
            sides[side] = copy.copy(self)
            sides[side].split, sides[side].unread = keys[side][0], set()
        return sides

    def has_index(self) -> bool:
        """Return True for rows that can be read in any order. Raises OwnCodeError for what gives no rows at all."""
        rows = self.open()
        if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, (str, IterableDataset)):
            return True
        if isinstance(rows, str) or not hasattr(rows, "__iter__"):
            words = f"{self.path!r} gives a {type(rows).__name__}; it must give an object with __len__ and __getitem__"
            raise OwnCodeError(FIELD, f"{words}, such as a list of rows or a Dataset of torch")
        return False

    def length(self) -> int:
        """Return the number of rows. Raises OwnCodeError if there are none."""
        of_split = f" in its split {self.split!r}" if self.split else ""
        rows = self.open()
        with own_errors(FIELD, f"{self.path!r} gives rows{of_split} whose length raised"):
            length = len(rows)
        if not length:
            raise OwnCodeError(FIELD, f"{self.path!r} gives no rows{of_split}: their length is 0")
        return length

    def load(self, index: int) -> Sample | GivenRow:
        """Return a row by its index. Raises CorruptRecord, also for what the reader raises."""
        name, rows = name_of(index), self.open()
        try:
            with finding(self.path.partition(":")[0]):
                row = rows[index]
        except (Exception, SystemExit) as error:
            place = own_place(error)
            self.traceback = self.traceback or "".join(own_traceback(error))
            words = f"raised {type(error).__name__}: {error}" + (f" ({place})" if place else "")
            raise CorruptRecord(name, words) from None
        return self.sample(row, name)

    def sample(self, row: Any, name: str) -> Sample | GivenRow:
        """Return what a row holds. Raises CorruptRecord with that name."""
        if isinstance(row, Sample):
            self.has_turns = self.has_turns or bool(row.more)
            images = tuple(to_rgb(image, self.params.picture_range) for image in row.images)
            return replace(row, name=row.name or name, where=name if row.name else "", images=images)
        if self.as_given:
            return GivenRow(row, name)
        if not isinstance(row, Mapping):
            raise CorruptRecord(name, f"is a {type(row).__name__}; a row is a dict, or a Sample")
        row = check_row({key: _named(value) for key, value in row.items()}, name=name)
        self.unread |= keys_not_read(row)
        sample = sample_of(row, self.params, name=name, find=lambda file: Path(file).expanduser())
        self.has_turns = self.has_turns or bool(sample.more)
        self.has_system = self.has_system or bool(sample.system)
        return sample

    def records(self) -> Iterator[tuple[str, Loaded]]:
        """Yield the name of each row, and what it holds. Raises OwnCodeError for an object without rows."""
        if self.has_index():
            for index in range(self.length()):
                yield name_of(index), load_or_corrupt(self.load, index)
        else:
            for number, row in enumerate(self.iterate()):
                yield name_of(number), load_or_corrupt(self.sample, row, name_of(number))

    def iterate(self) -> Iterator[Any]:
        """Yield all rows of an iterable once. Raises OwnCodeError for what it raises."""
        with own_errors(FIELD, f"{self.path!r} gives an iterable that raised"):
            rows = self.open()
            iterator = iter(rows)
            if iterator is rows:  # a generator: there is one pass in it, and the reader is called again for the next
                self.given = None
        row, number = None, 0
        while row is not _END:
            with own_errors(FIELD, f"{self.path!r} gives an iterable that, after {number} rows, raised"):
                row = next(iterator, _END)
            if row is not _END:
                yield row
            number += 1


def open_reader(params: DataParams, *, image_size: int, seed: int, as_given: bool = False) -> dict[str, Source]:
    """Return the training and the held-out rows of a person's reader. See sources.py.

    as_given: rows are not turned into samples. Raises OwnCodeError for what the person's code raises, and ParamError if
    a split has no usable row.
    """
    rows = OwnRows(params, as_given)
    sides = rows.splits() or {TRAIN: rows, HELD_OUT: copy.copy(rows)}
    skipped: dict[str, str] = {}
    limit = None
    try:
        if not sides[TRAIN].split:
            limit = heldout_limit(rows.records(), params, skipped, path=rows.path, field=FIELD)
        for each in sides.values():
            if each.split:
                check_published((row for _, row in each.records()), each.split, rows.path, skipped, field=FIELD)
    except OwnCodeError:
        raise
    except ParamError as error:  # no row can be used: show why the first one raised
        raise OwnCodeError(error.field, error.message, rows.traceback or sides[TRAIN].traceback) from None
    notes = unread_note(side.unread for side in sides.values())
    splits: dict[str, Source] = {}
    for side in (TRAIN, HELD_OUT):
        keep = None if limit is None else partial(is_in_split, limit, side)
        source: Source
        if sides[side].has_index():
            source = IndexedSource(*_picked(sides[side], keep), seed, params.resample, dict(skipped), list(notes))
            source.may_be_random = True
        else:
            source = IterableSource(sides[side], keep, dict(skipped), [f"{rows.path!r} {NO_INDEX}", *notes])
        opened = [rows, *sides.values()]
        source.field = FIELD
        source.has_turns = any(each.has_turns for each in opened)
        source.has_system = any(each.has_system for each in opened)
        splits[side] = source
    return splits


def as_sample(item: Sample | GivenRow, params: SourceParams) -> Sample | None:
    """Return the sample of an item of a source; None for a given row in no shape that is read."""
    if isinstance(item, Sample):
        return item
    try:
        sample = OwnRows(params).sample(item.row, item.name)
    except CorruptRecord:
        return None
    return sample if isinstance(sample, Sample) else None


def _named(value: Any) -> Any:
    """Return a value of a row with paths as texts."""
    if isinstance(value, Path):
        return str(value)
    return [_named(each) for each in value] if isinstance(value, (list, tuple)) else value


def _picked(rows: OwnRows, keep: Callable[[str], bool] | None) -> tuple[Callable[[int], Any], int]:
    """Return what loads a row of a side by its place there, and how many rows it has."""
    if keep is None:
        return rows.load, rows.length()
    indices = np.array([index for index in range(rows.length()) if keep(name_of(index))], dtype=np.int64)
    return partial(_load, rows, indices), len(indices)


def _load(rows: OwnRows, indices: np.ndarray, place: int) -> Sample | GivenRow:
    return rows.load(int(indices[place]))


@dataclass
class IterableSource(Source):
    """Rows of an iterable, in its own order, pass after pass. Each rank and worker reads all, and keeps its own."""

    rows: OwnRows
    keep: Callable[[str], bool] | None = None
    """Returns true for the name of a row of this side; None: all are."""
    skipped: dict[str, str] = dataclass_field(default_factory=dict)
    notes: list[str] = dataclass_field(default_factory=list)
    length: int | None = None
    can_be_read_again: bool = False

    def loaded(self) -> Iterator[Loaded]:
        """Yield all rows once."""
        for name, row in self._pass():
            yield load_or_corrupt(self.rows.sample, row, name)

    def batches(self, data_slice: DataSlice) -> Iterator[list[Loaded]]:
        """Yield the slice's batches, without end. Rows of other ranks and workers are read, and not opened."""
        position, rows = 0, self._stream()
        for step in data_slice.steps():
            wanted = data_slice.positions(step)
            own = islice(rows, wanted.start - position, wanted.stop - position)
            position = wanted.stop
            yield [at_epoch(load_or_corrupt(self.rows.sample, row, name), epoch) for epoch, name, row in own]

    def _pass(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the content of each row of this side."""
        for number, row in enumerate(self.rows.iterate()):
            if self.keep is None or self.keep(name_of(number)):
                yield name_of(number), row

    def _stream(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the pass, the name and the content of each row, pass after pass."""
        for epoch in count():
            is_empty = True
            for name, row in self._pass():
                is_empty = False
                yield epoch, name, row
            if is_empty:
                raise OwnCodeError(FIELD, f"{self.rows.path!r} gives no rows any more, in pass {epoch + 1}")


def name_of(index: int) -> str:
    """Return the name of a row in reports; its hash says if the row is held out."""
    return f"row {index}"
