"""Find what makes the host wait for a GPU, without a GPU: tensors that say they are on one, and compute on the CPU.

`PretendCuda` is a tensor whose device is cuda:0 and whose values lie in a CPU tensor. Under `Waits` each operator runs
on the values, so that a model that reads them takes its real path, and what a GPU would make the host wait for is
counted by place: a value that is read, a shape that depends on values, and a copy that is blocking or not from pinned
memory. An operator with tensors on both devices is refused, as on a GPU.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from mmfsdp.core.fake_tensors import copy_with
from mmfsdp.own.modules import is_installed, is_of_package
from mmfsdp.quantized.nf4 import FORMAT as NF4

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
SHAPE_BY_VALUES = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
LIBRARIES = ("/transformers/", "/open_clip/", "/peft/")


class PretendCuda(torch.Tensor):
    """A tensor on cuda:0, as it says."""

    values: torch.Tensor
    """Its values, on the CPU."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> PretendCuda:
        """Return a tensor with the values; it shares their memory."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
            requires_grad=requires_grad,
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of Waits")

    def tolist(self) -> Any:
        """Return the values; torch's own looks for them at an address on the GPU."""
        return self.cpu().tolist()  # one blocking copy, as there

    def __repr__(self, **kwargs: Any) -> str:
        return f"PretendCuda({tuple(self.shape)}, {self.dtype})"


class Waits(TorchDispatchMode):
    """Computes on pretended tensors; `found` counts what waits for the GPU, by what and where."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.pinned: set[int] = set()
        """Storages in pinned memory."""
        self.keep_alive: list[torch.Tensor] = []

    def __enter__(self) -> Waits:
        # torch asks for no driver while there is a mode of fake tensors below this one, which leaves it nothing to do.
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_mode.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake_mode.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operator = getattr(func, "_overloadpacket", None)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = any(isinstance(t, PretendCuda) for t in tensors)
        if operator is torch.ops.prim.device:
            return args[0].device
        if operator is aten.is_pinned:
            return self.is_pinned(args[0])
        if on_gpu:
            refuse_two_devices(operator, args, tensors)
        self.watch(operator, args, kwargs, on_gpu)
        pin = operator is aten._pin_memory or bool(kwargs.pop("pin_memory", False))
        device = kwargs.get("device")
        if device is not None:
            on_gpu = torch.device(device).type == "cuda"
            kwargs["device"] = torch.device("cpu" if on_gpu else device)
        with unset_fake_temporarily():
            if operator is aten._pin_memory:
                out = args[0].clone()
            elif operator is torch.ops.mmfsdp.dequantize_nf4:  # the kernel has a test of its own
                out = NF4.dequantize(*values_of(args)).contiguous()
            elif operator is aten.histc and not args[0].is_floating_point():  # of integers, only a GPU has it
                out = func(args[0].values.float(), *args[1:], **kwargs).to(args[0].dtype)
            else:
                out = func(*values_of(args), **values_of(kwargs))
        if pin:
            self.pinned.add(out.untyped_storage()._cdata)
            self.keep_alive.append(out)
        if on_gpu:
            out = tree_map(lambda t: PretendCuda(t) if isinstance(t, torch.Tensor) else t, out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in pinned memory, or will when there is a GPU."""
        return not isinstance(tensor, PretendCuda) and tensor.untyped_storage()._cdata in self.pinned

    def watch(self, operator: Any, args: Any, kwargs: dict[str, Any], on_gpu: bool) -> None:
        """Count the operator if the host waits in it."""
        if operator is aten._to_copy:
            target = torch.device(kwargs.get("device") or args[0].device)
            self.watch_copy(args[0], target, bool(kwargs.get("non_blocking")), to_pinned=False)
        elif operator is aten.copy_:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.watch_copy(args[1], args[0].device, non_blocking, to_pinned=self.is_pinned(args[0]))
        elif not on_gpu:
            return
        elif operator in (aten._local_scalar_dense, aten.equal, aten.is_nonzero):
            self.note("reads a value")
        elif operator in SHAPE_BY_VALUES or (
            operator is aten.repeat_interleave and kwargs.get("output_size") is None and args[-1].dtype != torch.float
        ):
            self.note(f"{operator.__name__}: its shape depends on values")
        elif operator in INDEXING:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8) and isinstance(index, PretendCuda):
                    self.note("indexes by a mask: its shape depends on values")
                elif index is not None and not isinstance(index, PretendCuda) and isinstance(args[0], PretendCuda):
                    self.note("indexes by a tensor on the CPU: a blocking copy")

    def watch_copy(self, source: torch.Tensor, target: torch.device, non_blocking: bool, *, to_pinned: bool) -> None:
        """Count a copy between CPU and GPU that is blocking, or not to or from pinned memory."""
        if source.device.type == target.type:
            return
        words = f"{source.device.type} to {target.type}, {tuple(source.shape)}"
        if not non_blocking:
            self.note(f"blocking copy {words}")
        elif not (to_pinned if target.type == "cpu" else self.is_pinned(source)):
            self.note(f"copy by pageable memory {words}")

    def note(self, what: str) -> None:
        """Count a wait at the last line of ours, or of a package that we call."""
        frames = [f for f in traceback.extract_stack() if is_ours_or_called(f.filename)]
        place = "the test itself"
        if frames:
            path = Path(frames[-1].filename)
            folder = "mmfsdp" if is_of_package(frames[-1].filename) else path.parent.name
            place = f"{folder}/{path.name}:{frames[-1].lineno} {(frames[-1].line or '')[:80]}"
        self.found[f"{what} ({place})"] += 1


def is_ours_or_called(file: str) -> bool:
    """Return True for a file of the package, wherever its folder is, or of a library that it calls."""
    return is_of_package(file) or (is_installed(file) and any(name in file for name in LIBRARIES))


def refuse_two_devices(operator: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError as torch does for an operator with tensors on the CPU and on the GPU.

    It takes a number, (), on the CPU with any GPU's tensors, and indices on the CPU for a GPU's tensor; copies take
    both.
    """
    if operator in (aten._to_copy, aten.copy_):
        return
    if operator in INDEXING and isinstance(args[0], PretendCuda):
        tensors = [t for t in tree_leaves((args[0], args[2:])) if isinstance(t, torch.Tensor)]
    for tensor in tensors:
        if not isinstance(tensor, PretendCuda) and tensor.ndim > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {operator.__name__} got {tuple(tensor.shape)} on "
                "the CPU and others on cuda:0"
            )


def values_of(arguments: Any) -> Any:
    """Return nested arguments with the values of each pretended tensor."""
    return tree_map(lambda t: t.values if isinstance(t, PretendCuda) else t, arguments)


def pretend(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the pretended GPU."""

    def pretended(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(PretendCuda(tensor.detach().clone()), requires_grad=tensor.requires_grad)
        return PretendCuda(tensor.clone())

    return copy_with(model, pretended)


class Event:
    """In the place of torch.cuda.Event, which needs a driver."""

    def record(self) -> None:
        """Do nothing: what was issued before has been computed."""

    def synchronize(self) -> None:
        """Do nothing."""


@contextmanager
def backward_by_hand() -> Any:
    """Run backward here, node by node: torch's engine has no thread for a GPU that is not there."""
    backward, task = torch.Tensor.backward, torch._C._current_graph_task_id
    number = itertools.count()

    def one_backward(tensor: torch.Tensor) -> None:
        current = next(number)
        torch._C._current_graph_task_id = lambda: current  # by it a checkpoint knows what it has recomputed
        _backward(tensor)
        torch._C._current_graph_task_id = task

    torch.Tensor.backward = one_backward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


@torch.no_grad()
def _backward(tensor: torch.Tensor) -> None:
    """Add the gradients of a scalar to `grad` of what it depends on, as `Tensor.backward` does."""
    root = tensor.grad_fn
    waiting: Counter[Any] = Counter()  # edges to a node from nodes that have not run
    stack, reached = [root], {root}
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                waiting[node] += 1
                if node not in reached:
                    reached.add(node)
                    stack.append(node)
    gradients: dict[Any, dict[int, torch.Tensor]] = {root: {0: torch.ones_like(tensor)}}
    ready = [root]
    while ready:
        node = ready.pop()
        of_node = gradients.pop(node, {})
        outputs: Any = ()
        if of_node:
            inputs = [of_node.get(i) for i in range(1 + max(len(node._input_metadata) - 1, *of_node))]
            outputs = _run(node, inputs)
        for i, (follower, number) in enumerate(node.next_functions):
            if follower is None:
                continue
            if i < len(outputs) and outputs[i] is not None:
                sums = gradients.setdefault(follower, {})
                # As the engine does: sum the gradient of what was broadcast.
                meta = follower._input_metadata[number]
                gradient = outputs[i].sum_to_size(meta.shape).to(meta.dtype)
                sums[number] = sums[number] + gradient if number in sums else gradient
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)


def _run(node: Any, inputs: list[torch.Tensor | None]) -> Any:
    """Run one node of the graph."""
    if hasattr(node, "variable"):
        variable = node.variable
        variable.grad = inputs[0] if variable.grad is None else variable.grad + inputs[0]
        return ()
    outputs = node.apply(*inputs) if isinstance(node, torch.autograd.function.BackwardCFunction) else node(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)
