"""Load a checkpoint into a model, wrapped on any number of ranks or plain in one process, or resume a run from it."""

from __future__ import annotations

import warnings
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
from torch.optim.lr_scheduler import LRScheduler

from ..core.checksums import tensor_checksum
from ..core.collectives import Progress, gather_json, is_distributed, no_progress, rank, world_size
from ..core.step import local_part
from ..params import ParamError, StateDictType
from .settings import check_schedule, parameter_names, restore_schedule, restore_settings
from .steps import AVERAGE, checkpoint_name, complete_checkpoints, damaged, file_checksum, has_average, marker_of
from .tensors import (
    Tensors,
    model_tensors,
    optimizer_tensors,
    set_model_tensors,
    set_optimizer_tensors,
    trained_tensors,
)

MAX_LINES = 20
"""Lines about settings that a resume prints."""


def load(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint into a model. Return its marker. Every rank must call it.

    Raises ParamError if model and checkpoint have different trainable parameters, and DamagedCheckpoint for an altered
    file.
    """
    marker = verify(checkpoint)
    check_same_names(checkpoint, set(model_tensors(model)) ^ set(marker["names"]))
    load_model(model, checkpoint, marker)
    return marker


def load_average(model: nn.Module, checkpoint: Path) -> None:
    """Read the moving average of a checkpoint's weights into a model in their place. Every rank must call it.

    A parameter without one there stays as it is. Raises ParamError if the checkpoint has none at all.
    """
    if not has_average(checkpoint):
        raise ParamError("checkpoint", f"{checkpoint} has no moving average of its weights; train with train.ema")
    stored = names_in(checkpoint / AVERAGE)
    tensors = {name: tensor for name, tensor in trained_tensors(model).items() if name in stored}
    read(checkpoint / AVERAGE, tensors)
    set_model_tensors(model, tensors)


@dataclass(frozen=True)
class Resumed:
    """The outcome of a resume."""

    marker: dict[str, Any]
    carried: frozenset[str]
    """Frozen parameters that were trained before: later checkpoints must save them, too."""
    newly_trained: tuple[str, ...]
    """Parameters that did not train before: their optimizer states start from 0."""
    settings: tuple[str, ...] = ()
    """Lines about the optimizer's settings and the schedule, where they were not the saved ones before; rank 0 has
    printed them."""

    def __str__(self) -> str:
        text = f"resumed from step {self.marker['step']}"
        dropped = sorted(self.carried - set(self.marker["carried"]))
        if dropped:
            text += f"; optimizer states dropped: {len(dropped)} parameters frozen now, such as {dropped[0]}"
        if self.newly_trained:
            text += f"; optimizer states start from 0: {len(self.newly_trained)} parameters that did not train before, "
            text += f"such as {self.newly_trained[0]}"
        return text


def resume(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint: Path,
    *,
    schedule: LRScheduler | None = None,
    settings: bool = True,
) -> Resumed:
    """Read a checkpoint into a wrapped model and its new optimizer, on any number of ranks. Every rank must call it.

    The settings of the optimizer's groups become the saved ones, as with torch's `load_state_dict`: lr, betas,
    weight_decay and all others. Rank 0 prints each that was different. On as many ranks as saved it, set torch's random
    states. What is frozen may differ from then.

    Args:
        model: The wrapped model.
        optimizer: Of the wrapped model; it has made no step yet.
        checkpoint: The folder, such as `newest(folder)`.
        schedule: Of the optimizer's learning rate: its state becomes the saved one.
        settings: False keeps the settings that the optimizer has.

    Raises:
        ParamError: If the model lacks a parameter of the checkpoint, if a group has parameters that had different
            settings, or if the saved schedule is of another class.
        DamagedCheckpoint: If a file is damaged.
    """
    marker = verify(checkpoint)
    lines = set_settings(model, optimizer, marker, schedule, settings=settings)
    trained = set(model_tensors(model))
    saved = set(marker["names"])
    if marker["optimizer"] and marker["kind"] != StateDictType.LOCAL_STATE_DICT:
        load_states(model, optimizer, checkpoint, trained & saved)
    # After the optimizer: torch makes its states by a step.
    load_model(model, checkpoint, marker, optimizer if marker["optimizer"] else None)
    if marker["ranks"] == world_size():
        generators = load_file(checkpoint / "ranks" / f"{rank():05d}.safetensors")
        torch.set_rng_state(generators["torch"])
        if "cuda" in generators and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(generators["cuda"])
    carried = frozenset((saved | set(marker["carried"])) - trained)
    return Resumed(marker, carried, tuple(sorted(trained - saved)), tuple(lines))


def set_settings(
    model: nn.Module, optimizer: Optimizer, marker: dict[str, Any], schedule: LRScheduler | None, *, settings: bool
) -> list[str]:
    """Set the optimizer's settings and the schedule's state to the saved ones. Return what rank 0 has printed.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer.
        marker: The marker of the checkpoint, with the saved settings and state.
        schedule: The schedule, if there is one.
        settings: Whether the optimizer's settings are set, too: learning rates, betas, weight decay.

    Raises:
        ParamError: If the schedule is another one than was saved; then nothing has been changed.
    """
    state: Any = marker["schedule_state"]
    if schedule is not None and state is not None:
        check_schedule(model, optimizer, schedule, marker)
    lines = []
    if not marker["optimizer"]:
        lines.append("it was saved without an optimizer, which keeps its settings and starts without states")
    elif settings:
        lines += restore_settings(model, optimizer, marker["groups"])
    if schedule is not None and state is not None:
        restore_schedule(model, schedule, state)
    elif schedule is not None:
        lines.append("it was saved without a schedule, so the schedule is where it was; give it to save, too")
    elif state is not None:
        lines.append(f"it has the state of a {state['class']}, which is not restored without schedule=")
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {len(lines) - MAX_LINES} more settings"]
    for line in lines if rank() == 0 else ():
        print(f"{checkpoint_name(marker['step'])}: {line}")
    return lines


def load_states(model: nn.Module, optimizer: Optimizer, checkpoint: Path, names: set[str]) -> None:
    """Read the optimizer's states of these parameters. Other parameters have none, as in a new optimizer."""
    # Without those of parameters that have never had a gradient: their optimizer has made no states.
    stored = names_in(checkpoint / "optimizer")
    if not stored:
        return
    optimizer.zero_grad(set_to_none=True)  # torch makes no states while there are gradients
    states = optimizer_tensors(model, optimizer)
    known: Tensors = {}
    for name, tensor in states.items():
        parameter, _, key = name.rpartition(".")
        if parameter in names and name in stored:
            known[name] = tensor
        elif key == "step":
            tensor.zero_()  # making the states counted one step
    read(checkpoint / "optimizer", known)
    set_optimizer_tensors(model, optimizer, states | known)
    with_states = {name.rpartition(".")[0] for name in known}
    for p, names_of_p in parameter_names(model).items():
        if p in optimizer.state and not with_states.intersection(names_of_p):
            del optimizer.state[p]  # some optimizers begin with other states than zeros


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
    if not any(folder.glob("*.safetensors")):
        return set()
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def shapes_in(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in a folder, by name."""
    stored: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in stored.items()}


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


def frozen_checksums(model: nn.Module, progress: Progress = no_progress) -> dict[str, int]:
    """Return the CRC-32 of this rank's part of every frozen parameter. Checkpoints leave these parameters out.

    progress: called with the name of each before it is read.
    """
    checksums = {}
    for name, p in model.named_parameters():
        if not p.requires_grad and not p.is_meta:
            progress(name)
            checksums[name] = tensor_checksum(local_part(p))
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
