"""Checkpoints: what was trained, as safetensors, whole or in shards, complete only once the marker is there.

    checkpoints/step_00000100/
      *.safetensors     torch.distributed.checkpoint's shards (SHARDED_STATE_DICT) or one file (FULL_STATE_DICT)
      complete.json     step, kind, ranks, names; written last, and only then is the folder given its name

Nothing here is ever unpickled: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from .params import ParamError, StateDictType
from .wrap import plan_of

MARKER = "complete.json"
_NAME = re.compile(r"step_(\d{8})")


def save(
    folder: Path,
    *,
    model: nn.Module,
    step: int,
    kind: StateDictType = StateDictType.SHARDED_STATE_DICT,
    keep_last: int | None = None,
    record: dict[str, Any] | None = None,
) -> Path:
    """Save the trainable parameters of a wrapped model. Every rank must call it. Returns the checkpoint's folder.

    `record` is plain data kept in the marker. With `keep_last`, older complete checkpoints are removed afterwards.
    """
    target = folder / f"step_{step:08d}"
    beside = folder / f".step_{step:08d}.writing"
    if _rank() == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    _barrier()
    names = _write_tensors(beside, model, kind)
    _barrier()
    if _rank() == 0:
        marker = {"step": step, "kind": kind.value, "ranks": _world_size(), "names": sorted(names), **(record or {})}
        _write_marker(beside / MARKER, marker)
        if target.exists():
            shutil.rmtree(target)
        os.replace(beside, target)
        for old in complete(folder)[:-keep_last] if keep_last else []:
            shutil.rmtree(old)
    _barrier()
    return target


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and (p / MARKER).is_file()]
    return sorted(found)


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises ParamError where there is none."""
    found = complete(folder)
    if not found:
        raise ParamError("checkpoint", f"{str(folder)!r} holds no complete checkpoint; train and save one first")
    return found[-1]


def load(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint into a model, wrapped on many ranks or whole in one process. Returns its marker.

    Raises ParamError when the model and the checkpoint do not hold the same trainable parameters.
    """
    marker = json.loads((checkpoint / MARKER).read_text())
    state = _trained(model)
    names = set(state)
    if names != set(marker["names"]):
        odd = sorted(names ^ set(marker["names"]))
        raise ParamError(
            "checkpoint",
            f"{checkpoint.name} and the model differ in {len(odd)} trainable parameters, such as {odd[0]!r}; "
            "build the model from the run's own params.yaml and freeze it as it says",
        )
    with warnings.catch_warnings():  # loading into one process is what we mean
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=not _distributed())
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    return marker


def _write_tensors(folder: Path, model: nn.Module, kind: StateDictType) -> list[str]:
    state = _trained(model)
    if kind is StateDictType.FULL_STATE_DICT:
        whole = {name: _whole(tensor) for name, tensor in state.items()}
        if _rank() == 0:
            save_file(whole, folder / "model.safetensors")
    else:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(state, storage_writer=writer, no_dist=not _distributed())
    return list(state)


def _trained(model: nn.Module) -> dict[str, Any]:
    """Trainable parameters and buffers by name, sharded as they are; a tied one once, by its first name."""
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    plan = plan_of(model)
    if plan is not None:
        return {name: t for name, t in state.items() if name not in plan.by_name or plan.by_name[name].name == name}
    first = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: t for name, t in state.items() if name in first}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from all ranks, in CPU memory on rank 0 and nowhere else."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous() if _rank() == 0 else torch.empty(0)


def _write_marker(path: Path, marker: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _world_size() -> int:
    return dist.get_world_size() if _distributed() else 1


def _barrier() -> None:
    if _distributed():
        torch.distributed.barrier()
