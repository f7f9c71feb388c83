"""The tensors of a wrapped model and its optimizer by plain names, to files and from them, in three layouts."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..params import ParamError, StateDictType
from ..wrap import plan_of
from .ranks import distributed, rank

_STATE = "state."

Tensors = dict[str, Any]
"""Tensors by name, sharded as the model is."""


def model_tensors(model: nn.Module, *, also: Collection[str] = (), whole: bool = False) -> Tensors:
    """Trainable parameters and buffers, those named in `also`, or everything; a tied one once, by its first name."""
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    state = trained
    if whole or set(also) - set(trained):
        state = get_model_state_dict(model)
        state = {name: t for name, t in state.items() if whole or name in trained or name in also}
    plan = plan_of(model)
    if plan is not None:
        return {name: t for name, t in state.items() if name not in plan.by_name or plan.by_name[name].name == name}
    first = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: t for name, t in state.items() if name in first}


def set_model_tensors(model: nn.Module, state: Tensors) -> None:
    """Give a model these tensors; the others stay as they are."""
    log = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
    level = log.level
    log.setLevel(logging.ERROR)  # FSDP1 warns of every tensor that is not given
    try:
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    finally:
        log.setLevel(level)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """The optimizer's states as `<parameter>.<state>`. A new optimizer's states come into being, and are 0."""
    found = {name.removeprefix(_STATE): t for name, t in _flat(model, optimizer).items() if name.startswith(_STATE)}
    # What FSDP1 makes of a flat parameter's step is one number for all that are in it, which no file may hold.
    return {name: t.clone() if t.ndim == 0 else t for name, t in found.items()}


def set_optimizer_tensors(model: nn.Module, optimizer: Optimizer, state: Tensors) -> None:
    """Give an optimizer its states; rates and decay stay its own."""
    own = {name: value for name, value in _flat(model, optimizer).items() if not name.startswith(_STATE)}
    state = own | {_STATE + name: t for name, t in state.items()}
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict=state, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )


def _flat(model: nn.Module, optimizer: Optimizer) -> Tensors:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


@dataclass
class Snapshot:
    """The tensors that make up this rank's part of a checkpoint."""

    shared: dict[str, Tensors] = field(default_factory=dict)
    """By subfolder: tensors of which each rank writes its shards."""
    own: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By file: what this rank writes by itself."""

    def copied(self) -> Snapshot:
        """In CPU memory, where training does not change it."""
        parts = [{k: {n: _copy(t) for n, t in ts.items()} for k, ts in p.items()} for p in (self.shared, self.own)]
        return Snapshot(*parts)

    def write(self, folder: Path, *, group: Any = None) -> None:
        """Write into a folder. Every rank must call it. group: whose ranks talk; default the group of all."""
        for name, tensors in self.shared.items():
            _write_shards(folder / name, tensors, group)
        for name, tensors in self.own.items():
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, folder / name)


def snapshot(parts: dict[str, Tensors], kind: StateDictType) -> Snapshot:
    """The tensors of each subfolder: in one file from rank 0, or each rank its shards. Every rank must call it."""
    if kind is not StateDictType.FULL_STATE_DICT:
        return Snapshot(shared=parts)
    whole = {f"{part}/model.safetensors": {n: _whole(t) for n, t in ts.items()} for part, ts in parts.items()}
    return Snapshot(own=whole if rank() == 0 else {})


def _write_shards(folder: Path, state: Tensors, group: Any) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _one_process_is_meant():
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=not distributed())
    except CheckpointException as error:
        first = min(error.failures)
        if first != rank():
            time.sleep(1)  # the rank that failed is heard first
        raise OSError(f"rank {first} could not write: {error.failures[first][0]}") from error.failures[first][0]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def read(folder: Path, state: Tensors) -> None:
    """Fill tensors from a folder that a Snapshot wrote, on any number of ranks, sharded in any way. Raises ParamError
    where they have other shapes than was saved."""
    try:
        with _one_process_is_meant():
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not distributed())
    except CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        if not isinstance(why, ValueError):
            raise
        raise ParamError("checkpoint", f"{folder}: {why}; build the model as the run that saved it did") from None


def local_snapshot(model: nn.Module, optimizer: Optimizer | None) -> Snapshot:
    """This rank's flat shards as they lie in memory, its optimizer states with them."""
    found: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            states = optimizer.state.get(p, {}) if optimizer is not None else {}
            found |= {name: p.detach()} | {f"{name}//{key}": value for key, value in states.items()}
    return Snapshot(own={_local_file(): {name: t.cpu().clone() for name, t in found.items()}})


def read_local(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """The way back from `local_snapshot`, into a model that is wrapped alike on as many ranks."""
    saved = load_file(folder / _local_file())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in saved.items():
        if "//" in name:
            owner, _, key = name.partition("//")
            states.setdefault(owner, {})[key] = tensor
    for name, p in model.named_parameters():
        if p.requires_grad:
            if name not in saved or saved[name].shape != p.shape:
                was = tuple(saved[name].shape) if name in saved else "nothing"
                raise ParamError(
                    "checkpoint",
                    f"{folder.name} holds {was} of {name} for this rank, which has {tuple(p.shape)} now: a LOCAL_STATE_"
                    "DICT loads only into what is wrapped as it was; save with SHARDED_STATE_DICT to change that",
                )
            p.data.copy_(saved[name])
            if optimizer is not None and name in states:
                optimizer.state[p] = {key: t.to(p.device) for key, t in states[name].items()}


def _local_file() -> str:
    return f"local-{rank():05d}.safetensors"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from all ranks, in CPU memory on rank 0 and nowhere else."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous() if rank() == 0 else torch.empty(0)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """torch warns of going without a process group, which here is on purpose."""
    if distributed():  # then perhaps in a thread, where filters are not to be touched
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
