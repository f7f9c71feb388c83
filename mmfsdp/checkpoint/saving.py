"""Save a checkpoint: complete or absent, whenever a rank dies."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from ..core.collectives import gather_json, gather_through_store, is_distributed, rank, world_size
from ..params import ParamError, StateDictType
from .settings import group_settings, schedule_state
from .steps import (
    best_of,
    checkpoint_name,
    checkpoint_step,
    complete_checkpoints,
    file_checksum,
    mark_best,
    write_marker,
)
from .tensors import Tensors, local_tensors, model_tensors, optimizer_tensors


def save(
    folder: Path,
    *,
    model: nn.Module,
    step: int,
    optimizer: Optimizer | None = None,
    schedule: LRScheduler | None = None,
    kind: StateDictType = StateDictType.SHARDED_STATE_DICT,
    keep_last: int | None = None,
    best: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    carried: frozenset[str] = frozenset(),
    more: Mapping[str, Tensors] = MappingProxyType({}),
    background: Background | None = None,
    done: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Save a wrapped model, its optimizer and every rank's random states. Every rank must call it.

    Args:
        folder: The folder of a run's checkpoints; this one becomes a folder in it.
        model: The wrapped model. What trains is saved, and frozen parameters named in `carried`.
        step: Optimizer steps that are done.
        optimizer: Its states and the settings of its groups are saved.
        schedule: Of the learning rate, any of torch's.
        kind: Layout of the tensors' files.
        keep_last: Number of complete checkpoints to keep. Default: all.
        best: Step, name and score of the best checkpoint, which is kept as well, and marked.
        record: Plain data for the marker, read back as JSON.
        carried: Names of frozen parameters that were trained before; see `Resumed`.
        more: Further tensors of all ranks, by the subfolder that they are written into.
        background: Copy now, and write while the caller continues.
        done: Called with the folder once the checkpoint is complete.

    Returns:
        The folder of the checkpoint. With `background` it may not be complete yet.

    Raises:
        ParamError: If JSON cannot hold the record, a setting of a group or the schedule's state.
    """
    trained = model_tensors(model)
    tensors = model_tensors(model, also=carried) if carried else trained
    marker = new_marker(model, optimizer, schedule, step=step, kind=kind, record=record or {})
    marker |= {"names": sorted(trained), "carried": sorted(set(tensors) - set(trained))}
    files = {f"ranks/{rank():05d}.safetensors": random_states()}
    sharded: dict[str, Tensors] = {}
    if kind is StateDictType.LOCAL_STATE_DICT:
        files[f"local-{rank():05d}.safetensors"] = local_tensors(model, optimizer)
    else:
        sharded["."] = tensors
        # To make the states of an optimizer that has none, torch would do a step of it.
        if optimizer is not None and any(gather_through_store(bool(optimizer.state))):
            sharded["optimizer"] = optimizer_tensors(model, optimizer)
    sharded |= more
    if kind is StateDictType.FULL_STATE_DICT:
        files |= gather_files(sharded)
        sharded = {}
    target = folder / checkpoint_name(step)

    def write(group: Any) -> None:
        write_checkpoint(target, files, sharded, marker, group, folders=("optimizer", "ranks", *more))
        if rank() == 0:
            if best:
                mark_best(folder, best)
            remove_old(folder, keep_last)
        done(target)

    if background is None:
        write(None)
    else:
        background.settle(wait=True)
        files, sharded = tree_map(copy_to_host, (files, sharded))
        background.start(write, step, arrived=copies_arrived())
    return target


def new_marker(
    model: nn.Module,
    optimizer: Optimizer | None,
    schedule: LRScheduler | None,
    *,
    step: int,
    kind: StateDictType,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Return a checkpoint's marker without its tensors' names and its files. Rank 0 prints what it cannot hold.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer, whose settings the marker holds; None if none is saved.
        schedule: Its schedule, whose state the marker holds; None if none is saved.
        step: The optimizer steps that are done.
        kind: The layout of the checkpoint.
        record: Further values of the caller, by key: plain data that JSON can hold.
    """
    groups, lost = group_settings(model, optimizer) if optimizer is not None else (None, [])
    for line in lost if rank() == 0 else ():
        print(f"{checkpoint_name(step)}: {line}")
    marker = {
        "step": step,
        "kind": kind.value,
        "ranks": world_size(),
        "names": [],
        "carried": [],
        "optimizer": optimizer is not None,
        "groups": groups,
        "schedule_state": schedule_state(schedule) if schedule is not None else None,
    }
    return marker | checked_record(record, marker)


def checked_record(record: dict[str, Any], marker: dict[str, Any]) -> dict[str, Any]:
    """Return what a resume reads back of a record. Raises ParamError for what JSON cannot hold, or changes.

    JSON makes lists of tuples, which is allowed, and texts of other keys, which is not: a schedule would not find the
    steps that it looks for.
    """
    taken = sorted(record.keys() & {*marker, "files", "sha256"})
    if taken:
        raise ParamError("record", f"has {taken[0]!r}, which a checkpoint writes itself; give it another name")
    for name, value in record.items():
        words = ""
        try:
            json.dumps(value)
            if has_other_keys(value):
                words = "has keys that are not texts"
        except (TypeError, ValueError) as error:
            words = f"cannot be written as JSON ({error})"
        if words:
            fix = "give plain numbers, texts, lists and dicts; a schedule goes into schedule="
            raise ParamError("record", f"{name!r} {words}; {fix}")
    return record


def has_other_keys(value: Any) -> bool:
    """Return True if there is a dict in a value whose keys are not all texts."""
    if isinstance(value, dict):
        return any(not isinstance(key, str) or has_other_keys(each) for key, each in value.items())
    return isinstance(value, (list, tuple)) and any(map(has_other_keys, value))


def remove_old(folder: Path, keep_last: int | None) -> None:
    """Remove all checkpoints but the newest ones and the best one; without a number, none."""
    best = best_of(folder)
    for old in complete_checkpoints(folder)[:-keep_last] if keep_last else ():
        if best is None or checkpoint_step(old) != best["step"]:
            shutil.rmtree(old.rename(folder / f".{old.name}.old"))


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU; of a tensor on a GPU, the values are there after `copies_arrived`."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    # Only a copy to pinned memory lets the host go on while it runs. The next step changes the tensor after the copy,
    # since the GPU keeps the order.
    try:
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system allows no more pinned memory
        return tensor.to("cpu", copy=True)
    return on_host.copy_(tensor, non_blocking=True)


def copies_arrived() -> torch.cuda.Event | None:
    """Return an event after which all copies from this rank's GPU are done; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    arrived = torch.cuda.Event()
    arrived.record()
    return arrived


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators in this process."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def gather_files(sharded: dict[str, Tensors]) -> dict[str, Tensors]:
    """Return the tensors of each subfolder as one file of rank 0's, whole; on other ranks no files."""
    files = {}
    for subfolder, tensors in sharded.items():
        gathered = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank() == 0:  # elsewhere the full tensor is freed immediately
                gathered[name] = full.detach().cpu().contiguous()
        if rank() == 0:
            files[f"{subfolder}/model.safetensors"] = gathered
    return files


def write_checkpoint(
    target: Path,
    files: dict[str, Tensors],
    sharded: dict[str, Tensors],
    marker: dict[str, Any],
    group: Any,
    *,
    folders: Sequence[str],
) -> None:
    """Write a checkpoint under another name, then rename it. Older complete ones stay as they are at any moment.

    files: those that this rank writes by itself. sharded: subfolders that all ranks write together, each its shards.
    folders: the names of all subfolders. Raises OSError naming the rank that could not.
    """
    folder = target.parent
    unfinished = folder / f".{target.name}.writing"
    if rank() == 0:
        for leftover in folder.glob(".step_*"):  # of a save that was cut off
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for name in folders:
            (unfinished / name).mkdir(parents=True)
    barrier(group)
    for subfolder, tensors in sharded.items():
        writer = HuggingFaceStorageWriter(str(unfinished / subfolder), save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not is_distributed())
        except CheckpointException as error:
            first, (cause, _) = min(error.failures.items())
            if first != rank():
                time.sleep(1)  # let the rank that failed report first
            raise OSError(f"rank {first} could not write: {cause}") from cause
    for name, tensors in files.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, unfinished / name)
    barrier(group)
    checksums = file_checksums(unfinished, group)
    if rank() == 0:
        write_marker(unfinished, {**marker, "files": checksums})
        replaced = folder / f".{target.name}.old"
        if target.exists():  # saved before the run was taken back to an earlier step
            target.rename(replaced)
        os.replace(unfinished, target)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier(group)


def file_checksums(folder: Path, group: Any) -> dict[str, list[Any]]:
    """Return the size and checksum of every file in a folder. The ranks share the work."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    checksums = {name: file_checksum(folder / name) for name in names[rank() :: world_size()]}
    for of_rank in gather_json(checksums, group):
        checksums |= of_rank
    return checksums


def barrier(group: Any) -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier(group)


class Background:
    """Write one checkpoint at a time in a thread, over a process group of its own. Every rank must make one.

    `dcp.async_save` saves one folder only, and runs nothing after it on every rank, such as checksums and the marker.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if is_distributed() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[Any], None], step: int, *, arrived: torch.cuda.Event | None = None) -> None:
        """Call `write` with the process group in the thread, after `arrived`. The one before must be settled."""

        def work() -> None:
            try:
                if arrived is not None:
                    torch.cuda.set_device(arrived.device)  # a new thread's is GPU 0
                    arrived.synchronize()
                write(self._group)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def settle(self, *, wait: bool) -> None:
        """Raise RuntimeError if writing failed. With `wait`, first wait until the checkpoint is complete."""
        if self._thread and wait:
            self._thread.join()
        if self._thread and self._error:
            words = f"the {self._thread.name}, written while training went on (train.async_save), failed: {self._error}"
            raise RuntimeError(words) from self._error
