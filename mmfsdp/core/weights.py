"""Start every rank from rank 0's weights. A model on the meta device is filled unit by unit, and sharded in between."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..params import FSDPParams
from .checksums import tensor_checksum
from .collectives import Progress, no_progress, rank, world_size
from .names import ancestors, named_tensors
from .parameters import new_parameter
from .plan import WrapPlan
from .quantize import CODES, SCALES, Format, format_of, matrix_name, quantize, quantize_model
from .shared_files import SharedFiles, Wanted
from .tensor_files import InFile
from .units import torch_dtype

MAPPED_BYTES = 2**18
"""Tensors of so many bytes, which are filled in part only, get a mapping of their own."""


class WeightSource(Protocol):
    """Rank 0's weights by name, each taken once. A dict is one.

    A source may have `places`, an `InFile` by the name of each tensor that is in a file, so that all ranks can read it,
    and `checksums`, a dict to which the CRC-32 of each frozen parameter is added.
    """

    def pop(self, name: str, /) -> torch.Tensor:
        """Return the weight of this name and forget it, so that its memory can go."""


def weight_source(model: nn.Module, device: torch.device, weights: WeightSource | None) -> WeightSource | None:
    """Return the source of rank 0's weights, or None if every rank has the model with its weights.

    If any rank's model is on the meta device, the others are moved there. Every rank must call it.
    Raises ValueError on every rank if rank 0's model is on the meta device and `weights` lacks some.
    """
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    problem = find_missing(model, weights) if on_meta and rank() == 0 else ""
    # One all-reduce tells all ranks both facts: if rank 0 raised alone, the others would wait in a broadcast forever.
    flags = torch.tensor([on_meta, bool(problem)], dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    any_on_meta, rank0_lacks_weights = flags.tolist()
    if rank0_lacks_weights:
        raise ValueError(problem or "weights: rank 0 lacks some; its error names them")
    if not any_on_meta:
        return None
    if on_meta and weights is not None:
        return weights
    # Another rank has no weights, so this one gives up its own, to be filled unit by unit as the others are.
    return take_weights(model)


def find_missing(model: nn.Module, weights: WeightSource | None) -> str:
    """Return the message of the error if `weights` cannot fill a model on the meta device, else an empty string."""
    if weights is None:
        return "model: rank 0 has it on the meta device, and nobody has its weights; load them on rank 0"
    if not isinstance(weights, dict):
        return ""  # other sources make each tensor when it is asked for
    for names, tensor in named_tensors(model):
        shape = tuple(weights[names[0]].shape) if names[0] in weights else "missing"
        if shape != tuple(tensor.shape):
            return f"weights: {names[0]} is {shape}, in the model {tuple(tensor.shape)}; give every tensor"
    return ""


def take_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move a model to the meta device. Return its weights on rank 0, an empty dict on other ranks."""
    weights = {}
    for names, tensor in named_tensors(model):
        if rank() == 0:  # all ranks will get rank 0's
            weights[names[0]] = tensor.detach()
        set_tensor(model, names, tensor.detach().to("meta"), like=tensor)
    return weights


@torch.no_grad()
def copy_from_rank0(model: nn.Module, device: torch.device, progress: Progress = no_progress) -> None:
    """Overwrite each parameter and buffer with rank 0's. device: where the process group's tensors must be."""
    if world_size() > 1:
        for names, tensor in named_tensors(model):
            progress(names[0])
            tensor.copy_(broadcast_from_rank0(tensor, like=tensor, device=device))


class Materializer:
    """Replaces the meta tensors of a model by rank 0's weights, part by part. Tied tensors stay tied.

    What all ranks see in files they read themselves. Rank 0 sends what no file holds, such as a new projector, and
    codes of int8 and nf4, which are made of whole matrices. The tensors of the model are listed once, before a wrapper
    renames some: there may be as many units as layers.
    """

    def __init__(
        self, model: nn.Module, weights: WeightSource, files: SharedFiles, device: torch.device, progress: Progress
    ) -> None:
        """List the meta tensors of a model.

        Args:
            model: The model.
            weights: The source of the weights. Only rank 0 asks it.
            files: The tensors that every rank can read.
            device: The device of the new tensors.
            progress: Called with the name of each tensor before it is made.
        """
        self.model, self.weights, self.files, self.device, self.progress = model, weights, files, device, progress
        self.checksums: dict[str, int] = {}
        """On rank 0, the CRC-32 of each frozen parameter that it sent."""
        self._missing = {names[0]: (names, tensor) for names, tensor in named_tensors(model) if tensor.is_meta}
        self._order = {name: number for number, name in enumerate(self._missing)}
        # The first names of tensors, by each of their names and by each module around them.
        self._inside: dict[str, list[str]] = {}
        for first, (names, _) in self._missing.items():
            for name in names:
                for part in (name, *ancestors(name)):
                    self._inside.setdefault(part, []).append(first)

    @torch.no_grad()
    def __call__(self, parts: Sequence[str], mesh: DeviceMesh | None = None) -> None:
        """Fill what is on the meta device of some parts of the model. Every rank must call it.

        Args:
            parts: Dotted names of modules or parameters; an empty name is the model itself.
            mesh: The mesh over which the parameters are sharded next: rows of other ranks' shards may stay undefined.
                None if every rank needs whole tensors.
        """
        inside: set[str] = set()
        for part in parts:
            inside.update(self._inside.get(part, ()))
        in_files: list[Wanted] = []
        for first in sorted(inside & self._missing.keys(), key=self._order.__getitem__):
            names, tensor = self._missing.pop(first)
            is_parameter = isinstance(tensor, nn.Parameter)
            checksum = is_parameter and not tensor.requires_grad  # what trains is in each checkpoint itself
            if self.files.has(first):
                sharded = mesh if is_parameter else None
                # Whole, though a rank may fill its rows only: the wrapper takes these next, and the whole one goes.
                received = room_for(tensor, self.device, sharded)
                in_files.append(Wanted(first, received, sharded, checksum))
            else:
                self.progress(first)
                weight = self.weights.pop(first) if rank() == 0 else None
                if checksum and weight is not None:
                    self.checksums[first] = tensor_checksum(weight)
                received = broadcast_from_rank0(weight, like=tensor, device=self.device)
            set_tensor(self.model, names, received, like=tensor)
        self.files.fill(in_files, self.progress)

    def finish(self) -> dict[str, int]:
        """Return the CRC-32 of each frozen parameter, on rank 0. Raises ParamError on every rank if one cannot read."""
        return self.checksums | self.files.finish()


def room_for(tensor: torch.Tensor, device: torch.device, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return an empty tensor like one on the meta device.

    mesh: set if this rank will fill only some rows of it, and a wrapper will soon take them out of it.
    """
    if mesh is None or device.type != "cpu" or tensor.nbytes < MAPPED_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # Pages that nobody writes to take no memory, and here all go back to the system at once. Those that malloc gets
    # back stay, and it puts the next tensor elsewhere among them: up to a whole unit, where a rank needs its shard.
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@torch.no_grad()
def cast_at_rest(model: nn.Module, plan: WrapPlan) -> None:
    """Cast every parameter to the dtype that the plan gives it at rest, and buffers to `buffer_dtype`.

    Parameters become contiguous: fully_shard refuses others (torch 2.15), and an expanded one cannot be written to.
    """
    for name, p in model.named_parameters():
        # Through .data the Parameter stays the same object, so tied modules still share it.
        p.data = p.data.to(torch_dtype(plan.by_name[name].dtype)).contiguous()
    if plan.fsdp.buffer_dtype:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(plan.fsdp.buffer_dtype.to_torch())


def broadcast_from_rank0(weight: torch.Tensor | None, *, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rank 0's weight on every rank, with the shape and the dtype of `like`."""
    # Every rank receives into a tensor of its own on the device, rank 0 too: its weight may be elsewhere.
    received = torch.empty(like.shape, dtype=like.dtype, device=device)
    if rank() == 0:
        assert weight is not None
        received.copy_(weight)
    dist.broadcast(received, 0)
    return received


def set_tensor(model: nn.Module, names: list[str], value: torch.Tensor, *, like: torch.Tensor) -> None:
    """Put a tensor in the place of another, under all its names."""
    if isinstance(like, nn.Parameter):
        value = new_parameter(value, like=like)
    for name in names:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, value)


def quantize_weights(
    model: nn.Module, fsdp: FSDPParams, weights: WeightSource | None, progress: Progress = no_progress
) -> WeightSource | None:
    """Quantize the model in place, as `quantize_model` does.

    Args:
        model: The plain model.
        fsdp: The format: `frozen_dtype`.
        weights: The source of the weights of a model on the meta device; None for a model that has its weights.
        progress: Called with the name of each matrix before it is quantized.

    Returns:
        The source of the weights that the model has now: codes and scales in the place of matrices.
    """
    transposed, form = quantize_model(model, fsdp, progress), format_of(fsdp)
    if weights is None or not transposed or form is None:
        return weights
    return QuantizedWeights(weights, transposed, form)


class QuantizedWeights:
    """Rank 0's weights, each matrix quantized as it is asked for: at most one of them is in memory."""

    def __init__(self, weights: WeightSource, transposed: dict[str, bool], form: Format) -> None:
        """Take the weights of a source. transposed: by the name of each quantized matrix, whether it is transposed."""
        self.weights = weights
        self.transposed = transposed
        self.form = form
        self.places: Mapping[str, InFile] = getattr(weights, "places", {})
        """Of the tensors that are in files as they are. Codes and scales are in none."""
        self.checksums: dict[str, int] = getattr(weights, "checksums", {})
        """CRC-32 of each frozen parameter, codes and scales too. Shared with the source."""
        self.made: dict[str, torch.Tensor] = {}

    def pop(self, name: str, /) -> torch.Tensor:
        """Return a tensor for the last time."""
        matrix = matrix_name(name)
        if matrix not in self.transposed:
            return self.weights.pop(name)
        if name not in self.made:
            weight = self.weights.pop(matrix)
            if self.transposed[matrix]:
                weight = weight.T
            # Both are made together: the matrix is read once, and freed.
            codes, scales = quantize(weight, self.form)
            self.made |= {matrix + CODES: codes, matrix + SCALES: scales}
        return self.made.pop(name)
