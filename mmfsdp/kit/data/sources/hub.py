"""open_hub: a data set of the Hugging Face hub, or a folder of `save_to_disk`. Needs the extra `hub`, for datasets.

Rows stay in datasets' Arrow files, memory-mapped, so that all ranks of a node share them. They are read without its
decoding: our reader opens the pictures, since a picture that datasets cannot decode ends its iteration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from ....params import DataParams, ParamError
from ..rows.row_pictures import columns_of_names
from ..rows.row_values import PICTURE_KEYS
from .records import Records, split_records
from .row_files import FIRST_ROWS, FoundRow, RowFile, named_by_id
from .splits import HELD_OUT, named_split, published_split
from .stream import Source

MISSING = 'source hub needs datasets, which is not installed; run: pip install "mmfsdp[hub]"'
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(:(?P<config>[^/:]+))?")
"""A data set of the hub, with or without a configuration. It does not begin with a dot, as a path of a folder may."""
SAVED = ("dataset_dict.json", "state.json")
"""Files in a folder that `save_to_disk` wrote."""
BATCH_ROWS = 1000


class HubRows(RowFile):
    """The rows of a split. A row is a dict of column -> value; a picture is {bytes, path}; a class is its name."""

    format = "a split that datasets reads"
    scans_whole_rows = False

    def __init__(self, path: Path, name: str, rows: Any):
        """Take the split's name, and its rows as a Dataset of datasets."""
        super().__init__(path)
        self.relative = PurePosixPath(name)
        self.split = published_split(PurePosixPath(name)) or published_split(PurePosixPath(), name)
        self._rows = rows.with_format("arrow")
        self._classes = {}
        for column, feature in rows.features.items():
            if type(feature).__name__ == "ClassLabel":
                self._classes[column] = list(feature.names)
        pictures = {column for column, feature in rows.features.items() if type(feature).__name__ == "Image"}
        # Pictures with a class and nothing else: the name of the class is all there is to learn.
        others = rows.features.keys() - self._classes.keys() - {"id", *PICTURE_KEYS} - pictures
        self._caption = next(iter(self._classes)) if len(self._classes) == 1 and not others else ""
        """The column of classes that are captions, where nothing else says anything about the pictures."""

    def scan(self) -> Iterator[FoundRow]:
        """Yield of each row its id and the names of its pictures alone: pictures and texts stay in the file."""
        naming = {"id"} | columns_of_names(self.first_rows())
        for start in range(0, len(self._rows), BATCH_ROWS):
            table = self._rows[start : start + BATCH_ROWS]
            columns = {name: _names_in(table.column(name)) for name in table.column_names if name in naming}
            for i in range(len(table)):
                row = {name: values[i] for name, values in columns.items() if values is not None}
                yield named_by_id(start + i, row)

    def read(self, i: int) -> FoundRow:
        """Return the row of that number."""
        return named_by_id(i, self._with_classes(self._rows[i].to_pylist()[0]))

    def first_rows(self) -> list[dict[str, Any]]:
        """Return the first rows whole."""
        return [self._with_classes(row) for row in self._rows[:FIRST_ROWS].to_pylist()]

    def notes(self) -> list[str]:
        """Return what a person should know of the split."""
        return [f"captions of {self.relative} are the classes in its column {self._caption!r}"] if self._caption else []

    def _with_classes(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with the names of its classes for their numbers; -1 stands for none in unlabeled splits."""
        for column, names in self._classes.items():
            number = row.get(column)
            if isinstance(number, int):
                row[column] = names[number].replace("_", " ") if 0 <= number < len(names) else None
        if self._caption:
            row["text"] = row.pop(self._caption)
        return row


def _names_in(column: Any) -> list[Any] | None:
    """Return texts, numbers and names of pictures of an Arrow column, without their bytes; None for anything else."""
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    types = arrow.types
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind):
        return column.to_pylist()
    if types.is_struct(kind) and kind.get_field_index("path") >= 0:
        return [{"path": path} for path in compute.struct_field(column, "path").to_pylist()]
    if types.is_list(kind) or types.is_large_list(kind):
        inner = kind.value_type
        if types.is_string(inner):
            return column.to_pylist()
        if types.is_struct(inner) and inner.get_field_index("path") >= 0:
            paths = compute.struct_field(compute.list_flatten(column), "path").to_pylist()
            lengths = compute.list_value_length(column).to_pylist()
            # The paths of all lists in a row; each list takes as many as it is long.
            rest = iter(paths)
            return [[{"path": next(rest)} for _ in range(length or 0)] for length in lengths]
    return None


def open_hub(params: DataParams, *, image_size: int, seed: int) -> dict[str, Source]:
    """Return the training and the held-out rows of a data set. See sources.py."""
    assert params.path is not None
    if find_spec("datasets") is None:
        raise ParamError("source", MISSING)
    files = _open_splits(params.path)
    if params.heldout is not None and not named_split(params.heldout):
        files = _with_heldout(files, params)
    for file in files:
        file.pictures = Path(params.pictures).expanduser() if params.pictures else file.path
    skipped: dict[str, str] = {}
    records = Records(params, files)
    records.scan(skipped)
    return split_records(records, params, skipped, seed)


def _with_heldout(files: list[HubRows], params: DataParams) -> list[HubRows]:
    """Return the splits, with those that `heldout` names in the split heldout: one of them, or another data set."""
    assert params.heldout is not None
    own = [file for file in files if file.relative.name == params.heldout]
    if not own and "/" not in params.heldout and not os.path.exists(params.heldout):
        there = ", ".join(file.relative.name for file in files)
        words = f"{params.heldout!r} is no split of {params.path!r}, which has {there}"
        raise ParamError("heldout", f"{words}; give one of them, or the path of another data set")
    if not own:
        try:
            own = _open_splits(params.heldout)
        except ParamError as error:
            raise ParamError("heldout", error.message) from None
        for file in own:
            # Two data sets may have splits of one name, and records are named after them.
            file.relative = PurePosixPath(HELD_OUT) / file.relative
        files = files + own
    for file in own:
        file.split = HELD_OUT
    return files


def _open_splits(path: str) -> list[HubRows]:
    """Return the splits of a data set of the hub, of a folder of `save_to_disk`, or of files in a folder.

    Raises ParamError.
    """
    datasets = import_module("datasets")
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in SAVED):
            content = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            content = datasets.load_dataset(str(folder))
        else:
            content = _load_from_hub(datasets, path)
    except ParamError:
        raise
    except ConnectionError as error:
        words = f"{path!r} is not on this machine, and the hub cannot be reached ({error}); load it once where there is"
        fix = "a network (datasets keeps it in its cache), or give a folder that save_to_disk wrote"
        raise ParamError("path", f"{words} {fix}") from None
    except Exception as error:  # datasets raises errors of its own, of pyarrow, of the hub and of the file formats
        words = f"{path!r} cannot be loaded by datasets ({type(error).__name__}: {error})"
        raise ParamError("path", f"{words}; a configuration is written as {path.partition(':')[0]}:NAME") from None
    if not isinstance(content, dict):
        content = {"rows": content}
    return [HubRows(folder, name, rows) for name, rows in content.items()]


def _load_from_hub(datasets: Any, path: str) -> Any:
    """Return all splits of a data set of the hub, each rank from the cache. Raises whatever datasets raises."""
    match = HUB_NAME.fullmatch(path)
    if not match:
        words = "is no folder, and no name of the hub; write org/name, or org/name:configuration"
        raise ParamError("path", f"{path!r} {words}")
    name, config = match["name"], match["config"]
    if "RANK" in os.environ:  # whoever launched has downloaded it; the hub may have a newer revision by now
        try:
            return _load_from_cache(name, config)
        except ConnectionError:  # started by hand, such as by torchrun
            return datasets.load_dataset(name, config)
    content = datasets.load_dataset(name, config)
    try:
        _load_from_cache(name, config)  # as the ranks will
    except ValueError as error:  # several configurations are there by now, and the name says none
        chosen = next(iter(content.values())).info.config_name
        words = f"{path!r} names no configuration, and ranks find several in the cache of datasets"
        raise ParamError("path", f"{words}; write {path}:{chosen} for the one that the hub gives ({error})") from None
    return content


def _load_from_cache(name: str, config: str | None) -> Any:
    """Return all splits of a data set that was downloaded before. Raises ConnectionError if it was not.

    As `load_dataset` does where HF_HUB_OFFLINE is 1. That is a setting of the whole process: if it were set here for a
    moment, what other threads load at this moment would fail, or it would stay set after two that overlap.
    """
    try:
        import_module("datasets.load").CachedDatasetModuleFactory(name).get_module()
    except FileNotFoundError as error:
        raise ConnectionError(str(error)) from None
    cache = import_module("datasets.packaged_modules.cache.cache").Cache
    own_name = name.rpartition("/")[2]
    return cache(repo_id=name, dataset_name=own_name, config_name=config, version="auto", hash="auto").as_dataset()
