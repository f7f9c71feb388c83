"""Measure a step: what its collectives send, and its peak memory.

On a GPU the peak comes from the allocator, on the CPU from torch's profiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ...core.plan import ring_bytes
from ...core.step_batch import StepBatch
from ...predict.wire import CollectiveCount
from ..run.files.folder import last_row
from ..run.ranks.rank_imports import bring_back
from .callbacks import Callback, Training
from .cpu_memory import cpu_memory
from .data_batch import input_bytes
from .handed_plan import shapes_of


class Collectives:
    """Count this process's collectives while entered: `with Collectives() as counted: ...; counted.wire_bytes`.

    Sees DDP, FSDP1, FSDP2 and direct calls alike, on every device: all of them call torch's c10d operators, where a
    kernel registered on entry counts each call and passes it on. Nothing of torch is patched. Only one
    counts at a time, since torch takes one such kernel for an operator. Left out is what other threads than the
    entering one and autograd's send: a checkpoint that is written meanwhile.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], list[int]] = {}

    def __enter__(self) -> Collectives:
        self._thread = threading.get_ident()
        self._optimizing = False
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "_optimizing", True)),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "_optimizing", False)),
        ]
        self._library = register_counting_kernels(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts.clear()
        self._optimizing = False  # a step that raises does not call the hook after it

    def rows(self) -> list[CollectiveCount]:
        """Return the counts, by kind and phase."""
        rows: dict[tuple[str, str], CollectiveCount] = {}
        for (kind, phase, ranks), (count, nbytes) in sorted(self._counts.items()):
            row = rows.get((kind, phase), CollectiveCount(kind, phase, 0, 0, 0))
            sent = row.wire_bytes + ring_bytes(kind, nbytes, ranks)
            rows[kind, phase] = CollectiveCount(kind, phase, row.count + count, row.bytes + nbytes, sent)
        return list(rows.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(row.wire_bytes for row in self.rows())

    def _add(self, kind: str, tensors: list[torch.Tensor], ranks: int) -> None:
        if torch._C._current_graph_task_id() != -1:  # autograd is running a backward in this thread
            phase = "backward"
        elif threading.get_ident() != self._thread:
            return  # a checkpoint that a thread writes meanwhile
        elif self._optimizing:
            phase = "optimizer"
        else:
            # FSDP and DDP reduce in backward only, so what else is all-reduced is a step's loss, norm and counts.
            phase = "control" if kind == "all-reduce" else "forward"
        counts = self._counts.setdefault((kind, phase, ranks), [0, 0])
        counts[0] += 1
        counts[1] += sum(tensor.nbytes for tensor in tensors)


class WireMeter(Callback):
    """Adds the bytes that this rank sent to the row of each step, and the last step's to the result."""

    def __init__(self, training: Training) -> None:
        self._counted = training.collectives = Collectives()
        self._rows: list[CollectiveCount] = []
        self._sent = last_row(training.setup.folder, dist.get_rank()).get("wire_bytes", 0)

    def on_train_begin(self) -> None:
        """Begin to count."""
        self._counted.__enter__()

    @contextmanager
    def around_step(self, step: int, micro_batches: list[StepBatch]) -> Iterator[None]:
        """Count the collectives of a step."""
        self._counted.reset()
        yield
        self._rows = self._counted.rows()
        self._sent = self._counted.wire_bytes

    def after_step(self, step: int) -> dict[str, Any]:
        """Return the bytes sent in the step."""
        return {"wire_bytes": self._sent}

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Add what the last step sent; after a resume without a step left, what its row says."""
        result["wire_bytes_measured"] = self._sent
        result["wire_measured"] = [asdict(row) for row in self._rows]

    def close(self) -> None:
        """Stop counting."""
        self._counted.__exit__()


OPERATORS = {
    "allreduce_": ("all-reduce", 0, 1),
    "allreduce_coalesced_": ("all-reduce", 0, 1),
    "_allgather_base_": ("all-gather", 0, 2),
    "allgather_": ("all-gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "reduce_scatter_": ("reduce-scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
}
"""Operator of c10d: its kind, and the indices of the full tensor and of the process group among its arguments."""


def register_counting_kernels(
    count: Callable[[str, list[torch.Tensor], int], Any], returned: Callable[[Any, Any], None] | None = None
) -> torch.library.Library:
    """Register a kernel for each operator that calls `count(kind, full tensors, ranks)`, and passes the call on.

    returned: called with what `count` returned, and with what the operator did: tensors, then c10d's Work. It is
    registered under the autograd keys, which c10d leaves free, above the devices' own.
    """
    # A dispatch key that no kernel of c10d has: ours runs first and passes the call on to the device's kernel.
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATORS:
        kernel = counting_kernel(name, count, returned)
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
            library.impl(name, kernel, key, with_keyset=True)
    return library


def counting_kernel(
    name: str, count: Callable[[str, list[torch.Tensor], int], Any], returned: Callable[[Any, Any], None] | None
) -> Callable[..., Any]:
    """Return a kernel that counts a call and passes it on to the device's kernel."""
    kind, tensor_index, group_index = OPERATORS[name]
    operator = getattr(torch.ops.c10d, name).default

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # The group may be one axis of a mesh, with fewer ranks than the world.
        ranks = ProcessGroup.unbox(args[group_index]).size()
        counted = count(kind, tree_leaves(args[tensor_index]), ranks)
        result = operator.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
        if returned is not None:
            returned(counted, result)
        return result

    return kernel


# ---- memory ----

WATCHED_STEPS = 2
"""Steps watched on the CPU, where watching slows them down. The first makes the optimizer's states, the second is like
all that follow."""


class PeakMemory:
    """The most that the tensors of this rank have held in a training step.

    What is held between steps only (by wrapping, resume, held-out samples, a cache) does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.reserved_bytes = 0
        """Most bytes that the allocator of a GPU had from the driver in a step. It keeps what is freed."""
        self.retries = 0
        """Number of times that the steps ran out of a GPU's memory, so that the allocator gave back all that it kept,
        and tried again. Each takes long."""
        self.largest_first: dict[str, Any] = {}
        """The inputs of the largest first micro-batch of the steps watched; empty before any."""
        self.largest_later: dict[str, Any] = {}
        """Those of the largest micro-batch that came later in its step, beside gradients of earlier ones."""
        self._watched = 0

    @contextmanager
    def watch_step(self, model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[StepBatch]) -> Iterator[None]:
        """Watch the step over the micro-batches; `peak_bytes` is known after it, with one micro-batch in it."""
        on_gpu = self.device.type == "cuda"
        if not on_gpu and self._watched == WATCHED_STEPS:
            yield
            return
        self._watched += 1
        inputs = [batch.inputs() for batch in micro_batches]
        self.largest_first = max([self.largest_first, *inputs[:1]], key=input_bytes)
        self.largest_later = max([self.largest_later, *inputs[1:]], key=input_bytes)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            retries_before = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
            yield
            stats = torch.cuda.memory_stats(self.device)
            self.peak_bytes = max(self.peak_bytes, stats["allocated_bytes.all.peak"])
            self.reserved_bytes = max(self.reserved_bytes, stats["reserved_bytes.all.peak"])
            self.retries += stats["num_alloc_retries"] - retries_before
        else:
            at_rest = bytes_at_rest(model, optimizer) + max(map(input_bytes, (self.largest_first, self.largest_later)))
            with cpu_memory() as memory:
                yield
            self.peak_bytes = max(self.peak_bytes, at_rest + memory.peak)

    def figures(self) -> dict[str, int]:
        """Return the figures of a row of metrics.jsonl."""
        if self.device.type != "cuda":
            return {"memory_bytes": self.peak_bytes}
        figures = {"memory_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes}
        return figures | {"alloc_retries": self.retries}


class MemoryMeter(Callback):
    """Adds the peak memory of the steps, and to the result the peak that the plan predicts for the largest batch."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._memory = PeakMemory(training.device)

    @contextmanager
    def around_step(self, step: int, micro_batches: list[StepBatch]) -> Iterator[None]:
        """Watch a step."""
        setup = self._training.setup
        with self._memory.watch_step(setup.model, setup.optimizer, micro_batches):
            yield

    def after_step(self, step: int) -> dict[str, Any]:
        """Return the peak so far."""
        return self._memory.figures()

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Add the predicted peak. The plan predicts it for the longest texts, and not with a feature cache."""
        training, memory = self._training, self._memory
        if dist.get_rank() != 0 or not memory.largest_first or training.features is not None:
            return
        # A first micro-batch may hold most if it is larger than all that came beside gradients of earlier ones.
        batches = [(memory.largest_later, False)] if memory.largest_later else []
        if input_bytes(memory.largest_first) > input_bytes(memory.largest_later):
            batches.insert(0, (memory.largest_first, True))
        known = training.run_plan.batch_peak
        if known and known.shapes == shapes_of(batches[0][0]):
            result["peak"] = {"bytes": known.bytes, "when": known.when}
            return
        bring_back("triton")
        from .prepare import peak_of  # runs the model on fake tensors, while the other ranks wait

        peaks = [peak_of(training.setup.params, training.plan, inputs, first=first) for inputs, first in batches]
        result["peak"] = max(peaks, key=lambda peak: peak["bytes"])


def bytes_at_rest(model: nn.Module, optimizer: Optimizer) -> int:
    """Return this rank's bytes of parameters, gradients, buffers and optimizer states; shared storage counts once."""
    tensors: list[Any] = list(model.buffers())
    for parameter in model.parameters():
        tensors += [parameter, parameter.grad]
    for state in optimizer.state.values():
        tensors += state.values()
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if isinstance(tensor, torch.Tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
