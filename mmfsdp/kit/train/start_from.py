"""Start a training from the weights of another run: a new stage (`train.start_from`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ... import checkpoint
from ...checkpoint.loading import read, shapes_in, verify
from ...checkpoint.steps import MARKER
from ...checkpoint.tensors import model_tensors, set_model_tensors
from ...core.collectives import gather_json
from ...core.model_record import plan_of
from ...core.names import plain_name
from ...core.plan import WrapPlan
from ...core.quantize import is_transposed
from ...params import ParamError, TrainParams
from ...params.enums import StartAdapters
from ..models.backbones import LORA_SCALE

FIELD = "train.start_from"
LORA_A, LORA_B = ".lora_A.", ".lora_B."
BASE = ".base_layer."
"""Part of the name of a matrix that has adapters."""


def parent_checkpoint(start_from: str) -> Path:
    """Return the checkpoint that a run starts from: the folder itself, or the newest of a run's. Raises ParamError."""
    folder = Path(start_from).expanduser()
    if (folder / MARKER).is_file():
        return folder
    try:
        return checkpoint.latest(folder / "checkpoints")
    except ParamError as error:
        raise ParamError(FIELD, error.message) from None


def start_from(model: nn.Module, train: TrainParams, frozen: Mapping[str, int]) -> tuple[str, frozenset[str]]:
    """Load the weights of the run that this one starts from. Every rank must call it.

    frozen: checksums of the frozen weights as this run has built them. Return what was done, in words, and the frozen
    parameters that are no longer as built: each checkpoint of this run must hold them. Raises ParamError for a run
    with other frozen weights, or with weights that this model does not have.
    """
    assert train.start_from is not None
    parent = Path(gather_json(str(parent_checkpoint(train.start_from)))[0])  # rank 0's: a run may still be saving
    marker = verify(parent)
    saved = {without_base(name): checksum for name, checksum in marker.get("frozen", {}).items()}
    checkpoint.check_frozen({without_base(name): value for name, value in frozen.items()}, {"frozen": saved})
    adapters = []
    if train.start_adapters is StartAdapters.MERGE:
        adapters = [name for name in marker["names"] + marker["carried"] if is_adapter(name)]
    loaded = load_weights(model, parent, {*marker["names"], *marker["carried"]} - set(adapters))
    merged = merge_adapters(model, parent, adapters)
    trained = set(model_tensors(model))
    words = f"began with the weights of {train.start_from}, step {marker['step']}"
    if merged:
        words += f"; adapters merged into {len(merged)} matrices"
    return words, frozenset((loaded | merged) - trained)


def load_weights(model: nn.Module, parent: Path, names: set[str]) -> set[str]:
    """Read tensors of a checkpoint into a wrapped model. Return their names in the model."""
    here = {without_base(name): name for name in all_names(model)}
    check_names(names, here)
    name_of = {name: here[without_base(name)] for name in names}
    tensors = model_tensors(model, also=name_of.values())
    read(parent, {name: tensors[name_of[name]] for name in names})
    set_model_tensors(model, {name: tensors[name] for name in name_of.values()})
    return set(name_of.values())


@torch.no_grad()
def merge_adapters(model: nn.Module, parent: Path, adapters: Iterable[str]) -> set[str]:
    """Add the products of adapters to the matrices of a wrapped model. Return the names of the matrices.

    The two matrices of an adapter are small: each rank reads them whole, and adds its own rows of their product.
    """
    shapes = shapes_in(parent)
    factors = {name: torch.empty(shapes[name]) for name in adapters}
    if not factors:
        return set()
    read(parent, factors)
    here = {without_base(name): name for name in all_names(model)}
    modules = {plain_name(name, model): module for name, module in model.named_modules()}
    merged = {}
    for name in factors:
        if LORA_A in name:
            matrix = here[f"{name.partition(LORA_A)[0]}.weight"]
            merged[matrix] = LORA_SCALE * factors[name.replace(LORA_A, LORA_B)] @ factors[name]
    tensors = {name: tensor for name, tensor in model_tensors(model, also=merged).items() if name in merged}
    for name, product in merged.items():
        whole = product.T if is_transposed(modules[name.rpartition(".")[0]]) else product
        add_own_part(tensors[name].detach(), whole)
    set_model_tensors(model, tensors)
    return set(merged)


def add_own_part(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Add a whole matrix to a tensor, of which this rank may hold a shard."""
    if not isinstance(tensor, DTensor):
        tensor.add_(whole.to(tensor.device))
        return
    own = tensor.to_local()
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
    own.add_(part.to(own.device))


def all_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters and buffers, before wrapping; not those of matrices in codes."""
    buffers = [plain_name(name, model) for name, _ in model.named_buffers()]
    plan = plan_of(model)
    if plan is None:
        return [*(plain_name(name, model) for name, _ in model.named_parameters()), *buffers]
    return [*names_not_in_codes(plan), *buffers]


def names_not_in_codes(plan: WrapPlan) -> list[str]:
    """Return the names of the parameters of a plan that are not quantized."""
    return [name for name, p in plan.by_name.items() if p.num_weights is None]


def without_base(name: str) -> str:
    """Return the name that a matrix with adapters has without them."""
    return name.replace(BASE, ".")


def is_adapter(name: str) -> bool:
    """Return True for the name of one of the two matrices of an adapter."""
    return LORA_A in name or LORA_B in name


def check_names(names: Iterable[str], here: Mapping[str, Any]) -> None:
    """Raise ParamError if a model has no tensor for one of these. here: by the names of its own, `without_base`."""
    missing = sorted(name for name in names if without_base(name) not in here)
    if not missing:
        return
    words = f"the run has {len(missing)} trained tensors that this model has not, such as {missing[0]}; "
    if all(map(is_adapter, missing)):
        words += "set model.lora_rank and lora_targets as there, or train.start_adapters to merge"
    else:
        words += "give the model the parameters of that run, and no frozen matrices in codes where it has trained them"
    raise ParamError(FIELD, words)


def check_start(train: TrainParams, model: nn.Module, plan: WrapPlan) -> None:
    """Check the run that another one starts from, before any rank starts. Raises ParamError as `start_from`.

    model: the new one, before wrapping, with any weights.
    """
    if train.start_from is None:
        return
    parent = parent_checkpoint(train.start_from)
    marker = checkpoint.marker_of(parent)
    if marker["kind"] == "LOCAL_STATE_DICT":
        words = f"{parent} is a LOCAL_STATE_DICT, which only its own run loads; save with SHARDED_STATE_DICT there"
        raise ParamError(FIELD, words)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {*names_not_in_codes(plan), *dict(model.named_buffers())}
    here = {without_base(name): tensor.shape for name, tensor in tensors.items() if name in whole}
    names = [*marker["names"], *marker["carried"]]
    merges = train.start_adapters is StartAdapters.MERGE
    if merges and not any(map(is_adapter, names)):
        raise ParamError("train.start_adapters", f"merge: {parent} has no adapters; remove it")
    kept = [name for name in names if not (merges and is_adapter(name))]
    check_names(kept, here)
    shapes = shapes_in(parent)
    for name in kept:
        if shapes[name] != here[without_base(name)]:
            words = f"{name} is {tuple(shapes[name])} there, and {tuple(here[without_base(name)])} in this model; give "
            raise ParamError(FIELD, f"{words}the model the parameters of that run")
    for name in names if merges else ():
        matrix = f"{name.partition(LORA_A)[0]}.weight"
        if LORA_A in name and matrix not in here:
            words = f"merge: {matrix} is in codes (fsdp.frozen_dtype), or not there; keep the adapters, or `mmfsdp "
            raise ParamError("train.start_adapters", f"{words}export` that run and give its folders as weights")
