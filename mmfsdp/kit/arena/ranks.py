"""Train the model with a file on each rank, be measured, and send back counts.

The file is somebody's code and runs in these processes alone, with the rights of whoever started the arena.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...params import ParamError
from ..train.cpu_memory import cpu_memory
from . import clock, model
from .step_log import logged, sent

STEPS, LEARNING_RATE = 4, 1e-3
STEADY = 2
"""The step whose events are played: a file may learn the order of its units in the first ones."""
Wrap = Callable[[Any], Any]
"""Shards the model in place, and returns its units."""
NoSync = Callable[[Any], Any]
"""Returns a context, for units, in which backward reduces nothing."""
IO = "/proc/self/io"
"""Linux: what this process has written, to sockets, too."""


def measure(path: str, seed: int) -> dict[str, dict[str, Any]]:
    """Train with torch's `fully_shard`, then with a file, on each rank of a process group. It ends the group.

    Args:
        path: the file.
        seed: of the batches. A file cannot know it beforehand.

    Returns:
        What was measured, as plain data, for "torchs" and "mine": "losses" of the steps; "norms", of the gradient over
        all ranks, of the steps and of two micro-batches without a reduction between them; "events" of a step,
        "accumulated", those of the two micro-batches; in bytes "whole", "trainable", "rest", "packed", "peak",
        "activations", and "sent" and "written": of all steps, as counted and as the system counts them, None where it
        does not. For "mine" on rank 0 also "weights", as the modules saw them.
    """
    written = count_written()
    activations = plain_activations(seed)
    parameters = list(model.build().parameters())
    whole = sum(p.nbytes for p in parameters)
    trainable = sum(p.nbytes for p in parameters if p.requires_grad)
    del parameters
    ways: dict[str, tuple[Wrap, NoSync]] = {"torchs": (lambda net: model.wrap(net, torchs_shard), torchs_no_sync)}
    found = {"torchs": train(*ways["torchs"], seed, written)}
    ways["mine"] = ways_of(path, clock.budget(whole, activations))  # not before all else is measured
    rank, world = dist.get_rank(), dist.get_world_size()
    weights: dict[str, str] = {}
    found["mine"] = train(*ways["mine"], seed, written, weights if rank == 0 else None)
    found["mine"]["weights"] = weights
    dist.destroy_process_group()
    # gloo's threads free their tensors a little late, which would count for the peak.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    for name, (wrap, _) in ways.items():
        found[name] |= {"peak": peak(wrap, seed)}
        found[name] |= {"whole": whole, "trainable": trainable, "activations": activations}
    return found


def ways_of(path: str, budget: int) -> tuple[Wrap, NoSync]:
    """Return how a file shards the model, and how it leaves out a reduction. Raises ParamError."""
    file = load(path)
    own_wrap, shard = getattr(file, "wrap", None), getattr(file, "shard", None)
    if own_wrap is None and shard is None:
        raise ParamError("FILE", f"{path!r} has neither shard(*modules) nor wrap(model, budget); lesson 02 writes one")
    no_sync = getattr(file, "no_sync", lambda units: nullcontext())
    if own_wrap is not None:
        return lambda net: own_wrap(net, budget), no_sync
    return lambda net: model.wrap(net, shard), no_sync  # type: ignore[arg-type]


def load(path: str) -> Any:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location("my_fsdp", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules["my_fsdp"] = file
    with redirect_stdout(sys.stderr):
        spec.loader.exec_module(file)
    return file


def torchs_shard(module: nn.Module, *, reshard: bool = True) -> FSDPModule:
    """Shard a unit as torch does."""
    return fully_shard(module, reshard_after_forward=reshard)


@contextmanager
def torchs_no_sync(units: list[FSDPModule]) -> Iterator[None]:
    """Leave out the reductions of `fully_shard`, whose last unit is the root."""
    units[-1].set_requires_gradient_sync(False)
    yield
    units[-1].set_requires_gradient_sync(True)


def train(
    wrap: Wrap,
    no_sync: NoSync,
    seed: int,
    written: Callable[[], int | None],
    weights: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Train with SGD, in which a factor of the gradient counts. Return all but the peak.

    weights: takes the weights that the modules see in the first forward, by name: fp32, in base64.
    """
    net, rank = model.build(), dist.get_rank()
    shapes = {name: p.shape for name, p in net.named_parameters()}
    units = wrap(net)
    if weights is not None:
        note_weights(net, shapes, weights)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)
    found: dict[str, Any] = {"losses": [], "norms": [], "sent": 0}
    before = written()
    for step in range(STEPS + 1):
        last = step == STEPS  # which has two micro-batches
        with logged() as log:
            if last:
                with no_sync(units):
                    net(**model.batch(seed, step + 1, rank)).backward()
            loss = net(**model.batch(seed, step, rank))
            loss.backward()
        events = log.finish()
        if step == STEADY:
            found["events"] = events
        found["accumulated"] = events
        found["losses"].append(loss.item())
        found["norms"].append(gradient_norm(trainable))
        found["sent"] += gloos_bytes(events)
        optimizer.step()
        optimizer.zero_grad()
        del loss
    found["written"] = None if before is None else (written() or 0) - before
    found["rest"], found["packed"] = bytes_held()
    return found


def note_weights(net: nn.Module, shapes: dict[str, torch.Size], weights: dict[str, str]) -> None:
    """Note each parameter as its module sees it in its first forward. shapes: those before sharding.

    It is copied out of torch, so that it is no tensor that the rank keeps. A tensor of another shape is a shard or a
    code, which nobody can compare; then the losses alone say what was computed.
    """

    def note(name: str, attribute: str, module: nn.Module, args: Any) -> None:
        weight = getattr(module, attribute, torch.empty(0))
        if name not in weights and type(weight) in (torch.Tensor, nn.Parameter) and weight.shape == shapes[name]:
            copy = weight.detach().to(torch.float32, copy=True)  # a storage that numpy shares is not resizable
            weights[name] = b64encode(copy.numpy().tobytes()).decode()

    for name in shapes:
        owner, _, attribute = name.rpartition(".")
        # Hooks run in the order in which they were registered: the file's own have gathered the weight.
        net.get_submodule(owner).register_forward_pre_hook(partial(note, name, attribute))


def gloos_bytes(events: list[Any]) -> int:
    """Return the most bytes that gloo writes for these events: it reduces and scatters by a whole all-reduce."""
    by_kind = sent(events, dist.get_world_size())
    return sum(n * (2 if kind.startswith("reduce-scatter") else 1) for kind, n in by_kind.items())


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """Return the norm of the gradient over all ranks; parameters without a gradient count as zeros."""
    square = torch.zeros(())
    for p in parameters:
        if p.grad is not None:
            shard = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            square += shard.square().sum()
    dist.all_reduce(square)
    return square.sqrt().item()


def bytes_held() -> tuple[int, int]:
    """Return the memory of all tensors of this process, and the part of it that is not of fp32 alone."""
    gc.collect()
    memory: dict[int, int] = {}
    packed: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            if local.dtype is not torch.float32:
                packed[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values()), sum(packed.values())


def plain_activations(seed: int) -> int:
    """Return the most bytes that a step of the model without any sharding holds beyond weights and gradients."""
    net = model.build()
    inputs = model.batch(seed, 0, dist.get_rank())
    net(**inputs).backward()  # the first step makes what stays
    with cpu_memory() as memory:
        net(**inputs).backward()
    return memory.peak


def peak(wrap: Wrap, seed: int) -> int:
    """Return the most bytes that a step's forward and backward hold beyond those before."""
    net = model.build()
    units = wrap(net)
    inputs = model.batch(seed, 0, dist.get_rank())
    for _ in range(STEADY):
        net(**inputs).backward()
        net.zero_grad()
    with cpu_memory() as memory:
        net(**inputs).backward()
    del units
    return memory.peak


def count_written() -> Callable[[], int | None]:
    """Return a function that says how many bytes the system has seen this process write; None off Linux.

    It keeps what it needs, so that a file that is imported later does not change it by accident.
    """
    if not Path(IO).exists():
        return lambda: None
    file, read, decode = os.open(IO, os.O_RDONLY), os.pread, bytes.decode

    def written() -> int:
        for line in decode(read(file, 4096, 0)).splitlines():
            if line.startswith("wchar"):
                return int(line.partition(":")[2])
        raise OSError(f"{IO} has no line for wchar")

    return written
