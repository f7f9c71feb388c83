"""save, load into any model, resume a run: what is in a checkpoint and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from ..params import ParamError, StateDictType
from ..runs.checkpoints import checkpoint_name
from .background import Background
from .folder import marker_of, verify, written
from .random_state import random_state, set_random_state
from .ranks import rank, world_size
from .tensors import (
    Snapshot,
    Tensors,
    local_snapshot,
    model_tensors,
    optimizer_tensors,
    read,
    read_local,
    set_model_tensors,
    set_optimizer_tensors,
    snapshot,
)

LOCAL = StateDictType.LOCAL_STATE_DICT


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
    whole: bool = False,
    background: Background | None = None,
    done: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Save a wrapped model, its optimizer and every rank's random states. Every rank must call it.

    What is saved of the model is what trains, and the frozen parameters named in `carried`, or `whole`. `record` is
    plain data kept in the marker. With `keep_last`, older complete checkpoints are removed afterwards. With
    `background` all is only copied now, and written while the caller goes on. `done` is called with the checkpoint's
    folder, which is returned, once it is complete.
    """
    trained = model_tensors(model)
    state = model_tensors(model, also=carried, whole=whole) if carried or whole else trained
    marker: dict[str, Any] = {"step": step, "kind": kind.value, "ranks": world_size(), "names": sorted(trained)}
    marker |= {"carried": sorted(set(state) - set(trained)), "optimizer": optimizer is not None} | (record or {})
    if kind is LOCAL:
        kept = local_snapshot(model, optimizer)
    else:
        states = {} if optimizer is None else {"optimizer": optimizer_tensors(model, optimizer)}
        kept = snapshot({".": state, **states}, kind)
    kept.own[f"ranks/{rank():05d}.safetensors"] = random_state()
    target = folder / checkpoint_name(step)

    def write(kept: Snapshot, group: Any) -> None:
        with written(folder, step, marker=marker, keep_last=keep_last, group=group) as beside:
            kept.write(beside, group=group)
        done(target)

    if background:
        background.begin(write, kept, step)
    else:
        write(kept, None)
    return target


def load(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint into a model, wrapped on many ranks or whole in one process. Returns its marker.

    Raises ParamError when the model and the checkpoint do not hold the same trainable parameters, DamagedCheckpoint
    when a file is not what was written.
    """
    marker = marker_of(checkpoint)
    verify(checkpoint, marker)
    odd = sorted(set(model_tensors(model)) ^ set(marker["names"]))
    if odd:
        raise ParamError(
            "checkpoint",
            f"{checkpoint.name} and the model differ in {len(odd)} trainable parameters, such as {odd[0]!r}; "
            "build the model from the run's own params.yaml and freeze it as it says",
        )
    _load_model(model, checkpoint, marker)
    return marker


@dataclass(frozen=True)
class Resumed:
    """What a resume found."""

    marker: dict[str, Any]
    carried: frozenset[str]
    """Frozen parameters that were trained before: to be saved from now on, too."""
    anew: tuple[str, ...]
    """Parameters that train now and did not: their optimizer states start from 0."""

    def __str__(self) -> str:
        text = f"resumed from step {self.marker['step']}"
        if dropped := sorted(self.carried - set(self.marker["carried"])):
            text += f"; optimizer states dropped: {len(dropped)} parameters frozen now, such as {dropped[0]}"
        if self.anew:
            text += f"; begun anew: {len(self.anew)} parameters that did not train before, such as {self.anew[0]}"
        return text


def resume(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> Resumed:
    """Read a checkpoint into a wrapped model and its new optimizer, on any number of ranks. Every rank must call it.

    With as many ranks as saved it, each takes up its own random states. What is frozen may differ from then. Raises
    ParamError when the model lacks a parameter of the checkpoint, DamagedCheckpoint when a file is damaged.
    """
    marker = marker_of(checkpoint)
    verify(checkpoint, marker)
    trained = set(model_tensors(model))
    saved = set(marker["names"])
    _load_model(model, checkpoint, marker, optimizer)
    if marker["optimizer"] and marker["kind"] != LOCAL.value:
        _load_optimizer(model, optimizer, checkpoint, trained & saved)
    if marker["ranks"] == world_size():
        set_random_state(load_file(checkpoint / "ranks" / f"{rank():05d}.safetensors"))
    carried = frozenset((saved | set(marker["carried"])) - trained)
    return Resumed(marker, carried, tuple(sorted(trained - saved)))


def _load_model(model: nn.Module, checkpoint: Path, marker: dict[str, Any], optimizer: Optimizer | None = None) -> None:
    names = set(marker["names"]) | set(marker["carried"])
    if marker["kind"] == LOCAL.value:
        _refuse_local(model, checkpoint, marker)
        read_local(checkpoint, model, optimizer if marker["optimizer"] else None)
        return
    state = {name: t for name, t in model_tensors(model, also=names).items() if name in names}
    if unknown := sorted(names - set(state)):
        raise ParamError(
            "checkpoint",
            f"{checkpoint.name} holds {len(unknown)} tensors that the model lacks, such as {unknown[0]!r}; "
            "build the model as that run did",
        )
    read(checkpoint, state)
    set_model_tensors(model, state)


def _load_optimizer(model: nn.Module, optimizer: Optimizer, checkpoint: Path, known: set[str]) -> None:
    state = optimizer_tensors(model, optimizer)
    old: Tensors = {}
    for name, tensor in state.items():
        parameter, _, key = name.rpartition(".")
        if parameter in known:
            old[name] = tensor
        elif key == "step":
            state[name] = tensor.zero_()
    read(checkpoint / "optimizer", old)
    set_optimizer_tensors(model, optimizer, state | old)


def _refuse_local(model: nn.Module, checkpoint: Path, marker: dict[str, Any]) -> None:
    trained = set(model_tensors(model))
    if marker["ranks"] != world_size() or trained != set(marker["names"]):
        raise ParamError(
            "checkpoint",
            f"{checkpoint.name} is a LOCAL_STATE_DICT of {marker['ranks']} ranks with {len(marker['names'])} trainable "
            f"tensors; it loads only on as many ranks, wrapped and frozen alike (here: {world_size()} ranks, "
            f"{len(trained)} tensors). Save with SHARDED_STATE_DICT to change them",
        )
