"""Tell which records train and which are held out: the splits that data were published with, else a hash of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

from ..params import ParamError, SourceParams
from .corrupt import CorruptRecord, first_reasons
from .pictures import stable_hash
from .stream import Loaded

TRAIN, HELD_OUT = "train", "heldout"
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of files and folders by which Hugging Face's data sets are split, by split."""
_WORD = "|".join(word for words in WORDS.values() for word in words)
IN_FILE_NAME = re.compile(rf"(?:^|[-._ \d])({_WORD})(?=$|[-._ \d])", re.IGNORECASE)
AS_FOLDER = re.compile(rf"({_WORD})(?:[-._ ]*(?:\d+|images?|imgs?|data|set|split))*", re.IGNORECASE)
"""A folder's whole name (val2017, test_images): `test tubes` is no split."""


@lru_cache(1024)
def published_split(folders: PurePosixPath, file_name: str = "") -> str:
    """Return the published split that a file belongs to by its folders or else by its name; "" if they name none."""
    for folder in folders.parts:
        if word := AS_FOLDER.fullmatch(folder):
            return _split_of(word[1])
    word = IN_FILE_NAME.search(file_name)
    return _split_of(word[1]) if word else ""


def _split_of(word: str) -> str:
    return next(split for split, words in WORDS.items() if word.lower() in words)


def published_heldout(splits: Collection[str], path: str | None) -> str:
    """Return the published split to hold out: validation, else test; "" where the data are not published in splits.

    What belongs to no split is for training. Raises ParamError if there are several splits, and none to train on.
    """
    evaluation = {"validation", "test"}.intersection(splits)
    if not evaluation or len(set(splits)) == 1:
        return ""
    if evaluation == set(splits):
        words = "has files of the published splits validation and test, and none to train on; "
        raise ParamError("path", f"{path!r} {words}give the path of one of them")
    return "validation" if "validation" in evaluation else "test"


def side_of(split: str, heldout: str) -> str:
    """Return train or heldout for a file of a published split; "" for test where validation is held out."""
    if split == heldout:
        return HELD_OUT
    return "" if split in WORDS and split != "train" else TRAIN


def splits_note(path: str | None, splits: Collection[str], heldout: str) -> str:
    """Return in words how published splits are used."""
    note = f"{path!r} has published splits: {heldout} is held out, the rest trains"
    if heldout != "test" and "test" in splits:
        note += ", but test, which is not read"
    return f"{note}. To train on all of them, give each as a source of its own (data.more)"


def is_in_split(limit: int, split: str, name: str) -> bool:
    """Return whether a name is in this split: names whose hash is below the limit are held out."""
    return (stable_hash(name) < limit) == (split == HELD_OUT)


def heldout_limit(
    records: Iterable[tuple[str | int, Loaded]],
    params: SourceParams,
    skipped: dict[str, str],
    *,
    path: str | None = None,
    field: str = "path",
) -> int:
    """Return the limit below which a name's hash holds a record out, so that each split has a usable record.

    records: the name or group of each, or the hash of that, and what it holds. Reads until it has met one of either
    split. If all are in one, the record of the smallest hash is held out. Adds the corrupt records that it meets to
    `skipped`. `path` and `field` are named in errors. Raises ParamError if there
    are fewer than two.
    """
    limit = int(params.heldout_fraction * 2**32)
    hashes: list[int] = []
    for name, loaded in records:
        if isinstance(loaded, CorruptRecord):
            skipped[loaded.label] = loaded.reason
            continue
        hashes.append(name if isinstance(name, int) else stable_hash(name))
        if min(hashes) < limit <= max(hashes):
            return limit
    if len(set(hashes)) < 2:
        message = f"{path or params.path!r} holds {len(hashes)} usable records{_skipped_words(skipped)}; "
        raise ParamError(field, message + "it takes two at least, one to train on and one to hold out")
    return min(hashes) + 1


def check_published(
    records: Iterable[Loaded], split: str, path: str | None, skipped: dict[str, str], *, field: str = "path"
) -> None:
    """Raise ParamError if no record of a published split is usable; read until the first that is."""
    for loaded in records:
        if not isinstance(loaded, CorruptRecord):
            return
        skipped[loaded.label] = loaded.reason
    raise ParamError(field, f"{path!r} holds 0 usable records in its split {split}{_skipped_words(skipped)}")


def _skipped_words(skipped: Mapping[str, str]) -> str:
    reasons = f"; {first_reasons(skipped)}" if skipped else ""
    return f" ({len(skipped)} skipped{reasons})"
