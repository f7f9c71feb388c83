"""Save a checkpoint: complete or absent, whenever a rank dies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
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

from ..core.collectives import gather_json, is_distributed, rank, world_size
from ..params import StateDictType
from .steps import checkpoint_name, complete_checkpoints, file_checksum, write_marker
from .tensors import Tensors, local_tensors, model_tensors, optimizer_tensors


def save(
    folder: Path,
    *,
    model: nn.Module,
    step: int,
    optimizer: Optimizer | None = None,
    kind: StateDictType = StateDictType.SHARDED_STATE_DICT,
    keep_last: int | None = None,
    record: dict[str, Any] | None = None,
    carried: frozenset[str] = frozenset(),
) -> Path:
    """Save a wrapped model, its optimizer and every rank's random states. Return the folder. Every rank must call it.

    Of the model, save what trains, and frozen parameters named in `carried`. record: plain data for the marker.
    keep_last: number of complete checkpoints to keep.
    """
    trained = model_tensors(model)
    tensors = model_tensors(model, also=carried) if carried else trained
    marker = {
        "step": step,
        "kind": kind.value,
        "ranks": world_size(),
        "names": sorted(trained),
        "carried": sorted(set(tensors) - set(trained)),
        "optimizer": optimizer is not None,
        **(record or {}),
    }
    files = {f"ranks/{rank():05d}.safetensors": random_states()}
    sharded: dict[str, Tensors] = {}
    if kind is StateDictType.LOCAL_STATE_DICT:
        files[f"local-{rank():05d}.safetensors"] = local_tensors(model, optimizer)
    else:
        sharded["."] = tensors
        if optimizer is not None:
            sharded["optimizer"] = optimizer_tensors(model, optimizer)
    if kind is StateDictType.FULL_STATE_DICT:
        files |= gather_files(sharded)
        sharded = {}
    target = folder / checkpoint_name(step)
    write_checkpoint(target, files, sharded, marker)
    if keep_last and rank() == 0:
        for old in complete_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old.rename(folder / f".{old.name}.old"))
    return target


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
            if rank() == 0:  # elsewhere the full tensor goes at once
                gathered[name] = full.detach().cpu().contiguous()
        if rank() == 0:
            files[f"{subfolder}/model.safetensors"] = gathered
    return files


def write_checkpoint(
    target: Path, files: dict[str, Tensors], sharded: dict[str, Tensors], marker: dict[str, Any]
) -> None:
    """Write a checkpoint under another name, then rename it. Older complete ones stay as they are at any moment.

    files: those that this rank writes by itself. sharded: subfolders that all ranks write together, each its shards.
    Raises OSError naming the rank that could not.
    """
    folder = target.parent
    unfinished = folder / f".{target.name}.writing"
    if rank() == 0:
        for leftover in folder.glob(".step_*"):  # of a save that was cut off
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for part in ("optimizer", "ranks"):
            (unfinished / part).mkdir(parents=True)
    barrier()
    for subfolder, tensors in sharded.items():
        writer = HuggingFaceStorageWriter(str(unfinished / subfolder), save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer, no_dist=not is_distributed())
        except CheckpointException as error:
            first, (cause, _) = min(error.failures.items())
            if first != rank():
                time.sleep(1)  # let the rank that failed report first
            raise OSError(f"rank {first} could not write: {cause}") from cause
    for name, tensors in files.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, unfinished / name)
    barrier()
    checksums = file_checksums(unfinished)
    if rank() == 0:
        write_marker(unfinished, {**marker, "files": checksums})
        replaced = folder / f".{target.name}.old"
        if target.exists():  # saved before the run was taken back to an earlier step
            target.rename(replaced)
        os.replace(unfinished, target)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier()


def file_checksums(folder: Path) -> dict[str, list[Any]]:
    """Return the size and checksum of every file in a folder. The ranks share the work."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    checksums = {name: file_checksum(folder / name) for name in names[rank() :: world_size()]}
    for of_rank in gather_json(checksums):
        checksums |= of_rank
    return checksums


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier()
