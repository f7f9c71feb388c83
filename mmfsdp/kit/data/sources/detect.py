"""detect: look at a folder or file and say which source reads it, with which fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ....params import DataParams, DataSource, ParamError
from ..batch import Sample
from ..corrupt import CorruptRecord
from ..open_sources import Splits, open_splits
from ..rows.rows import SHAPES, shape_of
from .find_files import JSON_SUFFIXES, TABLE_SUFFIXES
from .hub import HUB_NAME, SAVED
from .picture_folder import METADATA, PICTURE_SUFFIXES, NamedPictures
from .records import Records
from .shards import SHARD_SUFFIXES
from .stream import IndexedSource

PARQUET_SUFFIXES = (".parquet",)
LISTED_FILES = 20_000
"""Files of a folder that are looked at to tell what it holds."""


@dataclass(frozen=True)
class Detected:
    """A source that reads a path."""

    params: DataParams
    splits: Splits

    def samples(self, count: int) -> list[Sample]:
        """Return the first usable samples that train."""
        return list(islice((loaded for loaded in self.splits["train"].loaded() if isinstance(loaded, Sample)), count))

    def formats(self) -> list[str]:
        """Return the names of the files of rows, each with its format."""
        records = self._records()
        if records is None:
            return [str(self.params.path)]
        formats = []
        for file in records.files:
            name = "" if isinstance(file, NamedPictures) else f"{file.relative}: "
            formats.append(f"{name}{file.format}")
        return formats

    def _records(self) -> Records | None:
        """Return the records that train; None for shards."""
        source = self.splits["train"]
        records = getattr(source.load, "__self__", None) if isinstance(source, IndexedSource) else None
        return records if isinstance(records, Records) else None

    def shape(self) -> str:
        """Return the shape of the first usable row that trains, in words."""
        records = self._records()
        if records is not None:
            for index in range(len(records)):
                try:
                    records.load(index)
                except CorruptRecord:
                    continue
                return shape_of(records.record(index).row).words
        sample = self.samples(1)[0]
        if sample.is_document:
            return "interleaved documents"
        return "conversations" if sample.more else "a question or a caption for each picture"


def detect(path: str) -> Detected:
    """Return the source that reads a path, opened. Raises ParamError that names what was tried, and why it failed."""
    place = Path(path).expanduser()
    # A name of one part is more likely that of a file which is not there.
    if not place.exists() and "/" in path and HUB_NAME.fullmatch(path):
        return _open(DataParams(source=DataSource.HUB, path=path))
    reasons = []
    for source in _sources_of(place, path):
        for pictures in _picture_folders(source, place):
            params = DataParams(source=source, path=str(place.absolute()), pictures=pictures)
            try:
                return _open(params)
            except ParamError as error:
                reasons.append(f"as {source}: {error.message}")
    if reasons:
        raise ParamError("pictures", f"{path!r} cannot be read {reasons[0]}")
    if not place.exists():
        raise ParamError("pictures", f"{path!r} is neither here nor a name of the hub, such as org/name")
    shapes = "; ".join(shape.words for shape in SHAPES)
    words = (
        f"{path!r} holds nothing that is read: give pictures with {' or '.join(METADATA)}, with 1.txt beside 1.png or "
        f"in class folders; rows in .json, .jsonl, .csv, .tsv or .parquet; .tar shards; or a folder of save_to_disk. "
        f"Rows are read that have: {shapes}"
    )
    raise ParamError(
        "pictures", words if place.exists() else f"{path!r} is neither here nor a name of the hub, org/name"
    )


def _open(params: DataParams) -> Detected:
    return Detected(params, open_splits(params, image_size=1))


def _sources_of(place: Path, path: str) -> Iterator[DataSource]:
    """Yield the sources that may read a path by its name or by the names in it, the most likely first."""
    names = [place.name.lower()]
    if place.is_dir():
        files = islice((file for file in sorted(place.iterdir()) if file.is_file()), LISTED_FILES)
        names = [file.name.lower() for file in files]
        below = [file.name.lower() for file in islice(place.rglob("*"), LISTED_FILES)]
        if any(name in SAVED for name in names):
            yield DataSource.HUB
        if any(name in METADATA for name in below):
            yield DataSource.FOLDER
        names_or_below = names if any(name.endswith(PARQUET_SUFFIXES) for name in names) else below
    elif not place.is_file():  # braces or wildcards
        names = names_or_below = [path.lower()]
    else:
        below, names_or_below = [], names
    for suffixes, source, listed in (
        (SHARD_SUFFIXES, DataSource.WEBDATASET, names),
        (PARQUET_SUFFIXES, DataSource.PARQUET, names_or_below),
        ((*JSON_SUFFIXES, *TABLE_SUFFIXES), DataSource.JSON, names),
    ):
        if any(name.endswith(suffixes) for name in listed):
            yield source
    if place.is_dir() and any(name.endswith(PICTURE_SUFFIXES) for name in below):
        yield DataSource.FOLDER


def _picture_folders(source: DataSource, place: Path) -> Iterator[str | None]:
    """Yield the folders in which the pictures of a file of rows may lie: its own, then those in it."""
    yield None
    if source not in (DataSource.JSON, DataSource.PARQUET):
        return
    folder = place if place.is_dir() else place.parent
    for below in islice((inner for inner in sorted(folder.iterdir()) if inner.is_dir()), 20):
        if not below.name.startswith("."):
            yield str(below.absolute())
