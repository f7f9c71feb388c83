"""Load a checkpoint into a model, wrapped on any number of ranks or plain in one process, or resume a run from it."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.optim import Optimizer

from ..core.collectives import Progress, is_distributed, rank, world_size
from ..core.step import local_part
from ..params import ParamError, StateDictType
from .gather import gather_json
from .steps import complete_checkpoints, damaged, file_checksum, marker_of
from .tensors import Tensors, model_tensors, optimizer_tensors, set_model_tensors, set_optimizer_tensors


def load(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint into a model. Return its marker. Every rank must call it.

    Raises ParamError if model and checkpoint have different trainable parameters, and DamagedCheckpoint for an altered
    file.
    """
    marker = verify(checkpoint)
    check_same_names(checkpoint, set(model_tensors(model)) ^ set(marker["names"]))
    load_model(model, checkpoint, marker)
    return marker


@dataclass(frozen=True)
class Resumed:
    """The outcome of a resume."""

    marker: dict[str, Any]
    carried: frozenset[str]
    """Frozen parameters that were trained before: later checkpoints must save them, too."""
    newly_trained: tuple[str, ...]
    """Parameters that did not train before: their optimizer states start from 0."""

    def __str__(self) -> str:
        text = f"resumed from step {self.marker['step']}"
        dropped = sorted(self.carried - set(self.marker["carried"]))
        if dropped:
            text += f"; optimizer states dropped: {len(dropped)} parameters frozen now, such as {dropped[0]}"
        if self.newly_trained:
            text += f"; optimizer states start from 0: {len(self.newly_trained)} parameters that did not train before, "
            text += f"such as {self.newly_trained[0]}"
        return text


def resume(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> Resumed:
    """Read a checkpoint into a wrapped model and its new optimizer, on any number of ranks. Every rank must call it.

    On as many ranks as saved it, set torch's random states. What is frozen may differ from then. Raises ParamError if
    the model lacks a parameter of the checkpoint, DamagedCheckpoint if a file is damaged.
    """
    marker = verify(checkpoint)
    trained = set(model_tensors(model))
    saved = set(marker["names"])
    load_model(model, checkpoint, marker, optimizer if marker["optimizer"] else None)
    if marker["optimizer"] and marker["kind"] != StateDictType.LOCAL_STATE_DICT:
        states = optimizer_tensors(model, optimizer)
        # Without those of parameters that have never had a gradient: their optimizer has made no states.
        stored = names_in(checkpoint / "optimizer")
        known: Tensors = {}
        for name, tensor in states.items():
            parameter, _, key = name.rpartition(".")
            if parameter in trained & saved and name in stored:
                known[name] = tensor
            elif key == "step":
                tensor.zero_()  # making the states counted one step
        read(checkpoint / "optimizer", known)
        set_optimizer_tensors(model, optimizer, states | known)
    if marker["ranks"] == world_size():
        generators = load_file(checkpoint / "ranks" / f"{rank():05d}.safetensors")
        torch.set_rng_state(generators["torch"])
        if "cuda" in generators and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(generators["cuda"])
    carried = frozenset((saved | set(marker["carried"])) - trained)
    return Resumed(marker, carried, tuple(sorted(trained - saved)))


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that rank 0 sees, or None. Every rank must call it."""
    names = [path.name for path in complete_checkpoints(folder)]
    name = gather_json(names[-1] if names else None)[0]
    return folder / name if name else None


def verify(checkpoint: Path) -> dict[str, Any]:
    """Compare every file with its checksum, the ranks sharing the work. Return the marker. Every rank must call it.

    Raises DamagedCheckpoint on all ranks, naming the file.
    """
    marker = marker_of(checkpoint)
    wrong = []
    for name in sorted(marker["files"])[rank() :: world_size()]:
        path = checkpoint / name
        if not path.is_file() or file_checksum(path) != marker["files"][name]:
            wrong.append(name)
    for of_rank in gather_json(wrong):
        if of_rank:
            raise damaged(checkpoint, of_rank[0])
    return marker


def load_model(model: nn.Module, checkpoint: Path, marker: dict[str, Any], optimizer: Optimizer | None = None) -> None:
    """Read the model's tensors. With LOCAL_STATE_DICT the optimizer's states, too: they lie in the same file."""
    if marker["kind"] == StateDictType.LOCAL_STATE_DICT:
        load_local(model, checkpoint, marker, optimizer)
        return
    names = {*marker["names"], *marker["carried"]}
    tensors = {name: t for name, t in model_tensors(model, also=names).items() if name in names}
    check_same_names(checkpoint, names - set(tensors))
    read(checkpoint, tensors)
    set_model_tensors(model, tensors)


def check_same_names(checkpoint: Path, different: set[str]) -> None:
    """Raise ParamError if there are tensors that only one of a checkpoint and a model has."""
    if different:
        words = f"{checkpoint.name} and the model differ in {len(different)} tensors, such as {min(different)!r}"
        raise ParamError("checkpoint", f"{words}; build the model from the run's own params.yaml, and freeze it alike")


def read(folder: Path, tensors: Tensors) -> None:
    """Fill tensors from a folder, however they are sharded. Raises ParamError if they have other shapes than saved."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in one process, on purpose
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not is_distributed())
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if not isinstance(cause, ValueError):
            raise
        raise ParamError("checkpoint", f"{folder}: {cause}; build the model as the run that saved it did") from None


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def load_local(model: nn.Module, checkpoint: Path, marker: dict[str, Any], optimizer: Optimizer | None) -> None:
    """Read FSDP1's flat shards of this rank. Raises ParamError unless the model is wrapped alike, on as many ranks."""
    saved = {}
    if marker["ranks"] == world_size():
        saved = load_file(checkpoint / f"local-{rank():05d}.safetensors")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tensor.shape for name, tensor in saved.items() if "//" not in name}
    if shapes != {name: p.shape for name, p in trainable.items()}:
        here = f"here: {world_size()} ranks, tensors such as {next(iter(trainable), None)}"
        words = f"is a LOCAL_STATE_DICT of {marker['ranks']} ranks; it loads only on as many, wrapped and frozen alike"
        raise ParamError("checkpoint", f"{checkpoint.name} {words} ({here}). Save with SHARDED_STATE_DICT instead")
    for key, tensor in saved.items():
        name, _, state = key.partition("//")
        p = trainable[name]
        if not state:
            p.data.copy_(tensor)
        elif optimizer is not None:
            optimizer.state[p][state] = tensor.to(p.device)


def frozen_checksums(model: nn.Module, progress: Progress = str) -> dict[str, int]:
    """Return the CRC-32 of this rank's part of every frozen parameter. Checkpoints leave these parameters out.

    progress: called with the name of each before it is read.
    """
    checksums = {}
    for name, p in model.named_parameters():
        if not p.requires_grad and not p.is_meta:
            progress(name)
            raw = local_part(p.detach()).contiguous().view(-1).view(torch.uint8)
            checksums[name] = zlib.crc32(raw.cpu().numpy().data)
    return checksums


def count_changed(before: dict[str, int], after: dict[str, int]) -> int:
    """Return how many frozen parameters changed on any rank. Every rank must call it."""
    changed = [name for name in before if after.get(name) != before[name]]
    return len(set().union(*gather_json(changed)))


def check_frozen(checksums: dict[str, int], marker: dict[str, Any]) -> None:
    """Compare frozen weights, before wrapping, with the ones that a checkpoint was saved with. Raises ParamError."""
    saved = marker.get("frozen", {})
    changed = [name for name, checksum in checksums.items() if saved.get(name, checksum) != checksum]
    if changed:
        words = f"{len(changed)} frozen parameters, such as {changed[0]}, are not those that the checkpoint was "
        raise ParamError("model", words + "trained with; use the backbone weights of that run's params.yaml")
