"""What a rank does with a script of the clinic: calls its `main`, with a tool beside it, and saves what came of it."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mmfsdp import describe
from mmfsdp.core.names import plain_name
from mmfsdp.kit.train.cpu_memory import silent
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.profile import summary, work_events


def run(script: dict[str, Any], tool: str, folder: str, save: Callable[..., None], *, again: str = "") -> None:
    """Run a script's `main` with a tool; save its rows, the whole weights at the end, and what it sent.

    again: Print this, run it a second time with the batches in another order and on other ranks, and save that as
    "moved".
    """
    if tool != "stacks":  # the other tools are to be tried without a look at the stacks
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if tool == "detail":
        join_with_detail()
    if tool == "verify":
        verify(script)
        return
    let_gloo_sum()
    watch = watched(tool, Path(folder), script.get("STEPS", 1))
    with watch, Collectives() as counted, forwards_in_backward() as recomputed, checkpoints() as written:
        result = script["main"]()
        counts = {f"{row.kind}, {row.phase}": row.count for row in counted.rows()}
    model, rows, numbers = model_and_rows(result)
    save(rows=numbers, weights=whole_weights(model), counts=counts, recomputed=len(recomputed))
    if written:
        copied = all(checkpoint.is_copy for checkpoint in written)
        went_on = any(module() is model for checkpoint in written for module in checkpoint.modules)
        save(is_copy=copied, went_on=went_on)
    if tool == "counts":
        show_counts(counts, len(rows))
    if tool == "describe" and dist.get_rank() == 0:
        print(describe(model))
    if again and "batch_of" in script:
        print(again, flush=True)
        save(moved=run_moved(script))


def model_and_rows(result: Any) -> tuple[nn.Module, list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return what `main` returned, and its rows once more, as a tensor for each figure. Raises ValueError."""
    try:
        model, rows = result
    except (TypeError, ValueError):
        raise ValueError("main() must return the model and the rows, as it did: `return model, rows`") from None
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    numbers = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return model, rows, numbers


def run_moved(script: dict[str, Any]) -> dict[str, Any]:
    """Run a script's `main` with what is special about some batch in another step, on another rank. Return its rows
    and weights.
    """
    batch_of, steps, world = script["batch_of"], script["STEPS"], dist.get_world_size()
    script["batch_of"] = lambda step, rank: batch_of(steps - 1 - step, world - 1 - rank)
    try:
        with redirect_stdout(io.StringIO()):
            model, _, numbers = model_and_rows(script["main"]())
    finally:
        script["batch_of"] = batch_of
    return {"rows": numbers, "weights": whole_weights(model)}


def let_gloo_sum() -> None:
    """Let `set_gradient_divide_factor` work on gloo, too: NCCL scales within the sum, and gloo needs a plain sum."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_both(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        set_factor(module, factor)

    FSDPModule.set_gradient_divide_factor = set_both  # type: ignore[method-assign]


def join_with_detail() -> None:
    """Join the ranks anew, as with TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment from the beginning."""
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("detail", store), rank=rank, world_size=world)


@dataclass
class Checkpoint:
    """What a call of `dcp.save` is given, and what is there at that time."""

    is_copy: bool
    """No tensor of it has the memory of a parameter."""
    modules: list[weakref.ref[nn.Module]]
    """All modules that exist."""


@contextmanager
def checkpoints() -> Iterator[list[Checkpoint]]:
    """Yield a list to which each `dcp.save` adds an entry."""
    found: list[Checkpoint] = []
    save = dcp.save

    def noted(state: Any, **options: Any) -> Any:
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        used = {memory_of(p) for module in modules for p in module.parameters(recurse=False)}
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        is_copy = not any(memory_of(tensor) in used for tensor in tensors if tensor.numel())
        found.append(Checkpoint(is_copy, [weakref.ref(module) for module in modules]))
        return save(state, **options)

    dcp.save = noted
    try:
        yield found
    finally:
        dcp.save = save


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; for a DTensor, of this rank's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


@contextmanager
def forwards_in_backward() -> Iterator[list[str]]:
    """Yield a list to which each forward in backward of a module with trainable parameters of its own adds an entry.

    Activation checkpointing makes such forwards.
    """
    found: list[str] = []

    def note(module: nn.Module, _: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and any(p.requires_grad for p in module.parameters(recurse=False)):
            found.append(type(module).__name__)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def watched(tool: str, folder: Path, steps: int) -> Iterator[None]:
    """Record while the script runs: the flight recorder's entries, or a trace of what rank 0 does."""
    if tool == "recorder":
        write_records_at_signal(folder)
        yield
        write_records(folder)
        return
    if tool != "trace":
        yield
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with silent():
        profiler.start()
    yield
    with silent():
        profiler.stop()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(folder / "trace_of_rank_0.json.gz"))
        events = work_events(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
        (folder / "summary.json").write_text(json.dumps(summary(events, steps=steps)), encoding="utf-8")


def write_records(folder: Path) -> None:
    """Write this rank's entries of torch's flight recorder."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    (folder / f"records_{dist.get_rank()}.json").write_text(json.dumps(entries), encoding="utf-8")


def write_records_at_signal(folder: Path) -> None:
    """Write the entries when SIGUSR1 comes: in a thread, since the main thread may wait in a collective."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # with a handler of Python, the signal writes to the pipe
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        os.read(reader, 1)
        write_records(folder)

    threading.Thread(target=wait, daemon=True).start()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all ranks' shards together, by the names that the parameters have without a wrapper."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else the root may still show what it gathered before the last step
    weights = {}
    sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    with FullyShardedDataParallel.summon_full_params(model) if sharded else nullcontext():
        for name, p in model.named_parameters(remove_duplicate=False):
            value = p.full_tensor() if isinstance(p, DTensor) else p
            weights[plain_name(name, model)] = value.detach().clone()
    return weights


def show_counts(counts: dict[str, int], steps: int) -> None:
    """Print how many collectives a step has."""
    for name, count in counts.items():
        print(f"{name:26} {count / steps:5.1f} in a step")


def verify(script: dict[str, Any]) -> None:
    """Call mmfsdp's checks of one's own loop with the functions of a script; print which are wrong, and no reason.

    The reason would be the answer of the exercise: it is told when the script is right.
    """
    import mmfsdp

    batches = [script["batch_of"](0, rank) for rank in range(dist.get_world_size())]
    pieces = {"wrap": script["wrap"], "optimizer": script["make_optimizer"], "step": script["train_step"]}
    with redirect_stdout(io.StringIO()):
        report = mmfsdp.verify(script["build"], batches=batches, **pieces)
    if dist.get_rank() == 0:
        for line in report.lines:
            if line.level == "wrong":
                print(f"wrong  {line.code}")
            elif line.level == "ok":
                print(line)
