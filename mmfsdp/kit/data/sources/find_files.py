"""Find the files that `data.path` names: braces, wildcards, a folder; and the kind of rows that each holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path, PurePosixPath

from braceexpand import braceexpand

from ....params import DataSource, ParamError, SourceParams
from .csv_rows import TableRows
from .json_rows import JsonLines, JsonList
from .parquet import ParquetRows
from .picture_folder import NamedPictures, open_folder
from .row_files import FoundFiles, RowFile
from .splits import HELD_OUT, named_split

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


def expand_path(path: str, *suffixes: str) -> list[Path]:
    """Return the files of a path: braces ({000..011}), wildcards, or a folder's files with one of `suffixes`.

    Raises ParamError.
    """
    folder = Path(path).expanduser()
    files = []
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.name.lower().endswith(suffixes))
    elif folder.exists():
        files = [folder]
    else:
        try:
            patterns = list(braceexpand(str(folder), escape=False))
        except ValueError:  # unbalanced: a folder may have a brace in its name
            patterns = [str(folder)]
        for pattern in patterns:
            names = sorted(glob(pattern)) if any(letter in pattern for letter in "*?[") else [pattern]
            files += [Path(name) for name in names]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        kind = suffixes[0]
        not_found = f": {', '.join(missing[:3])} of {len(files)} not found" if missing else ""
        message = f"{path!r} names no {kind} file here{not_found}; give local files, as parts/{{000..011}}{kind}"
        raise ParamError("path", message)
    return files


def find_all_files(params: SourceParams) -> FoundFiles:
    """Return the files of rows of a source: those of `path` and, of the split "heldout", those of `heldout`.

    What both name is held out. Raises ParamError.
    """
    assert params.path is not None
    if params.heldout is None or named_split(params.heldout):
        return find_row_files(params, params.path)
    try:
        heldout = find_row_files(params, params.heldout)
    except ParamError as error:
        raise ParamError("heldout" if error.field == "path" else error.field, error.message) from None
    for file in heldout.files:
        file.split = HELD_OUT
    found = find_row_files(params, params.path, heldout=heldout)
    if not found.files:
        message = f"{params.heldout!r} holds out all of path {params.path!r}; give other files for one of them"
        raise ParamError("heldout", message)
    root = Path(os.path.commonpath([found.root.absolute(), heldout.root.absolute()]))
    for part in (found, heldout):
        place = PurePosixPath(part.root.absolute().relative_to(root).as_posix())
        for file in part.files:
            file.relative = place / file.relative
        part.pictures = [(place / picture).as_posix() for picture in part.pictures]
    return FoundFiles(root, found.files + heldout.files, found.notes + heldout.notes, found.pictures + heldout.pictures)


def find_row_files(params: SourceParams, path: str, heldout: FoundFiles | None = None) -> FoundFiles:
    """Return the files of rows that a path names for the sources folder, json and parquet.

    Their `relative` is the path below the folder that holds all of them. heldout: files that are left out. Raises
    ParamError.
    """
    if params.source is DataSource.FOLDER:
        without = heldout.root.resolve() if heldout else None
        root = Path(os.path.expanduser(path))
        if root.resolve() == without:
            return FoundFiles(root, [])
        found = open_folder(root, path, without)
        if params.pictures:
            _look_elsewhere(found, params.pictures)
        return found
    paths, notes = (_parquet_paths(path), []) if params.source is DataSource.PARQUET else _json_paths(path)
    root = Path(os.path.commonpath([file.parent for file in paths]))
    held_out = {file.path.resolve() for file in heldout.files} if heldout else set()
    files: list[RowFile] = []
    for file in paths:
        if file.resolve() in held_out:
            continue
        kind = ParquetRows(file) if params.source is DataSource.PARQUET else row_file(file)
        kind.relative = PurePosixPath(file.relative_to(root).as_posix())
        if params.pictures:
            kind.pictures = Path(os.path.expanduser(params.pictures))
        files.append(kind)
    return FoundFiles(root, files, notes)


def _look_elsewhere(found: FoundFiles, pictures: str) -> None:
    """Take the pictures of metadata files from another folder. Raises ParamError where there are no such files."""
    if any(isinstance(file, NamedPictures) for file in found.files):
        message = f"{pictures!r} has no effect on pictures that no metadata.jsonl names; remove it"
        raise ParamError("pictures", message)
    for file in found.files:
        file.pictures = Path(os.path.expanduser(pictures))
    found.pictures = []  # nobody expects a row for each of those beside the metadata


def _json_paths(path: str) -> tuple[list[Path], list[str]]:
    """Return the files, of a folder those of JSON or else the tables, and a note of tables that are not read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return expand_path(path, *JSON_SUFFIXES), []
    names = [file.name for file in sorted(folder.iterdir()) if file.is_file()]
    tables = [name for name in names if name.lower().endswith(TABLE_SUFFIXES)]
    if any(name.lower().endswith(JSON_SUFFIXES) for name in names):
        shown = ", ".join(tables[:3])
        notes = [f"beside its JSON {path!r} has {shown}, not read; give their path to read them"] if tables else []
        return expand_path(path, *JSON_SUFFIXES), notes
    suffixes: Sequence[str] = TABLE_SUFFIXES if tables else JSON_SUFFIXES
    return expand_path(path, *suffixes), []


def _parquet_paths(path: str) -> list[Path]:
    """Return the files; of a folder without any those below it, as data sets of the hub have them."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not any(folder.glob("*.parquet")):
        below = sorted(file for file in folder.rglob("*.parquet") if file.is_file())
        if below:
            return below
    return expand_path(path, ".parquet")


def row_file(path: Path) -> RowFile:
    """Return the file of rows of a path, by the ending of its name."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return JsonLines(path)
    if name.endswith((".csv", ".tsv")):
        return TableRows(path, delimiter="," if name.endswith(".csv") else "\t")
    return JsonList(path)
