"""The folder of checkpoints: what is complete, how one becomes so, and whether its files are what was written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..params import ParamError
from ..runs.checkpoints import MARKER, checkpoint_name, checkpoint_step, complete_checkpoints
from .ranks import any_rank, barrier, from_rank0, rank, world_size


class DamagedCheckpoint(ParamError):
    """A file of a checkpoint is not what was written."""


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises ParamError where there is none."""
    found = complete_checkpoints(folder)
    if not found:
        raise ParamError("checkpoint", f"{str(folder)!r} holds no complete checkpoint; train and save one first")
    return found[-1]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint that rank 0 sees, or None. Every rank must call it."""
    step = from_rank0(max((checkpoint_step(path) for path in complete_checkpoints(folder)), default=-1))
    return None if step < 0 else folder / checkpoint_name(step)


@contextmanager
def written(
    folder: Path, step: int, *, marker: dict[str, Any], keep_last: int | None, group: Any = None
) -> Iterator[Path]:
    """Where all ranks write the files of a checkpoint; on leaving it is sealed, put in place, and older ones go.

    A process that dies at any instant leaves every complete checkpoint as it is.
    """
    target, beside = folder / checkpoint_name(step), folder / f".{checkpoint_name(step)}.writing"
    if rank() == 0:
        for leftover in folder.glob(".step_*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for part in ("optimizer", "ranks"):
            (beside / part).mkdir(parents=True)
    barrier(group)
    yield beside
    barrier(group)
    _note_checksums(beside)
    barrier(group)
    if rank() == 0:
        _write_marker(beside, marker)
        if target.exists():  # what an earlier life of the run had saved
            target.rename(folder / f".{target.name}.old")
        os.replace(beside, target)
        _sync(folder)
        for old in complete_checkpoints(folder)[:-keep_last] if keep_last else []:
            shutil.rmtree(old.rename(folder / f".{old.name}.old"))
        shutil.rmtree(folder / f".{target.name}.old", ignore_errors=True)
    barrier(group)


def marker_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises DamagedCheckpoint if that was altered."""
    try:
        marker = json.loads((checkpoint / MARKER).read_text())
        if marker.pop("sha256") == _digest(marker):
            return marker
        raise ValueError("its checksum is another")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise damaged(checkpoint, MARKER) from error


def verify(checkpoint: Path, marker: dict[str, Any]) -> None:
    """Compare every file with its checksum, the ranks sharing the work. Every rank must call it.

    Raises DamagedCheckpoint on all ranks, naming the file, or one that does not belong there.
    """
    names = sorted(marker["files"])
    mine = set(names[rank() :: world_size()])
    bad = any_rank([name in mine and not _intact(checkpoint / name, *marker["files"][name]) for name in names])
    if any(bad):
        raise damaged(checkpoint, names[bad.index(True)])
    strange = sorted({str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.safetensors")} - set(names))
    if any(any_rank([bool(strange)])):  # torch would read its tensors, too
        text = f"{checkpoint} holds {', '.join(strange) or 'files'}, which no save has put there; remove them"
        raise DamagedCheckpoint("checkpoint", text)


def damaged(checkpoint: Path, name: str) -> DamagedCheckpoint:
    """The error for a file that is not what was written, with the checkpoint before on offer."""
    before = [path for path in complete_checkpoints(checkpoint.parent) if path < checkpoint]
    offer = "there is none before it: train anew"
    if before:
        step = checkpoint_step(before[-1])
        offer = f"the one before is {before[-1].name}: go on from it with `mmfsdp resume RUN --step {step}`"
    return DamagedCheckpoint("checkpoint", f"{checkpoint / name} is missing, truncated or altered; {offer}")


def _note_checksums(folder: Path) -> None:
    """Each rank its share, on disk for rank 0 to collect."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    sums = {name: [(folder / name).stat().st_size, _sum(folder / name)] for name in names[rank() :: world_size()]}
    (folder / "ranks" / f"{rank():05d}.json").write_text(json.dumps(sums))


def _write_marker(folder: Path, marker: dict[str, Any]) -> None:
    files: dict[str, list] = {}
    for path in (folder / "ranks").glob("*.json"):
        files |= json.loads(path.read_text())
        path.unlink()
    marker = marker | {"files": files}
    with open(folder / MARKER, "w", encoding="utf-8") as file:
        json.dump(marker | {"sha256": _digest(marker)}, file)
        file.flush()
        os.fsync(file.fileno())


def _digest(marker: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def _intact(path: Path, size: int, checksum: str) -> bool:
    return path.is_file() and path.stat().st_size == size and _sum(path) == checksum


def _sum(path: Path) -> str:
    """A file's SHA-256, once it is on the disk."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
