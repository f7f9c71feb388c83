"""Tell which records train and which are held out: the splits that data were published with, else a hash of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

from ....params import ParamError, SourceParams
from ..corrupt import CorruptRecord, first_reasons
from ..pictures import stable_hash
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


def named_split(heldout: str | None) -> str:
    """Return the published split that `data.heldout` names; "" where it is a path or unset."""
    for split, words in WORDS.items():
        if (heldout or "").lower() in words:
            return split
    return ""


def heldout_split(published: Collection[str], params: SourceParams) -> str:
    """Return the split to hold out, by `data.heldout` or else as `published_heldout` chooses.

    It is "heldout" where `data.heldout` is a path, whose files belong to that split. Raises ParamError.
    """
    if params.heldout is None:
        return published_heldout(published, params.path)
    split = named_split(params.heldout)
    if not split:
        return HELD_OUT
    there = ", ".join(sorted(name or "files of no split" for name in published))
    if split not in published:
        words = f"{params.heldout!r} is no published split of {params.path!r}, which has {there or 'no usable rows'}"
        raise ParamError("heldout", f"{words}; give one of them, or a path, such as ./{params.heldout}")
    if not {TRAIN, ""}.intersection(name for name in published if name != split):
        words = f"{params.heldout!r} leaves nothing of {params.path!r} to train on, which has {there}"
        raise ParamError("heldout", f"{words}; give the path of what trains, and here the path of what is held out")
    return split


def sides_of(splits: Collection[str], heldout: str) -> dict[str, str]:
    """Return train or heldout for each published split; "" for an evaluation split that is not the one held out.

    Where a path is held out, and all else is of one published split, that trains.
    """
    sides = dict.fromkeys(splits, TRAIN)
    if heldout != HELD_OUT or len(set(splits) - {HELD_OUT}) > 1:
        sides |= dict.fromkeys({"validation", "test"}.intersection(splits), "")
    return sides | {heldout: HELD_OUT}


def splits_note(params: SourceParams, sides: Mapping[str, str], heldout: str) -> list[str]:
    """Return in words how published splits are used; nothing where a path is held out and all else trains."""
    unread = sorted(split for split, side in sides.items() if not side)
    if heldout == HELD_OUT and not unread:
        return []
    note = f"{params.path!r} has published splits: {params.heldout if heldout == HELD_OUT else heldout} is held out"
    note += ", the rest trains"
    if unread:
        note += f", but {' and '.join(unread)}, which {'is' if len(unread) == 1 else 'are'} not read"
    return [f"{note}. To train on all of them, give each as a source of its own (data.more)"]


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
        if len(hashes) > 1:
            message += "they belong together, by their picture or their id, so all train or all are held out; "
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


def check_heldout(records: Iterable[Loaded], heldout: str, params: SourceParams, skipped: dict[str, str]) -> None:
    """Raise ParamError if no record that is held out is usable. See `check_published`."""
    if heldout == HELD_OUT:
        check_published(records, heldout, params.heldout, skipped, field="heldout")
    else:
        check_published(records, heldout, params.path, skipped)


def _skipped_words(skipped: Mapping[str, str]) -> str:
    reasons = f"; {first_reasons(skipped)}" if skipped else ""
    return f" ({len(skipped)} skipped{reasons})"
