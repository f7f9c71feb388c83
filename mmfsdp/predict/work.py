"""Count the work of a micro-step: FLOPs that are needed and FLOPs that run, bytes that operators move, and kernels.

The convention is the one of torch's registry of formulas (torch/utils/flop_counter.py) and torchtitan: a multiplication
and an addition are two FLOPs; only matrix products, convolutions and attention count; attention is counted in full,
also where it is causal.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from ..core.fake_tensors import aten, tensors_of
from ..core.recompute import in_backward

FLASH_FORWARD = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FLASH_BACKWARD = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
"""The fused attention that a trace on the CPU calls. torch's registry has the formulas of CUDA's operators only."""
GROUPED_MM = getattr(aten, "_grouped_mm", None)
"""The products of experts, which torch's registry lacks, too."""
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
"""Operators that run no kernel."""
READS_ROWS = (aten.embedding, aten.index, aten.index_select, aten.gather, aten.slice_backward, aten.select_backward)
"""Operators that read no more of an input than they write."""


@dataclass
class Work:
    """Work of one micro-step on one rank."""

    flops: int = 0
    """Needed: forward, and the backward of what trains. Not what activation checkpointing runs again, nor the scores
    that the backward of fused attention computes a second time. The numerator of MFU (Chowdhery et al. 2022)."""
    hardware_flops: int = 0
    """All that run. The numerator of HFU."""
    attention_flops: int = 0
    """Part of hardware_flops: fused attention without the masked half of causal attention, which GPU kernels skip."""
    causal_flops: int = 0
    """Part of hardware_flops: the masked half of causal attention, which GPU kernels skip."""
    moved_bytes: int = 0
    """Read and written by the other operators, each on its own: norms, activations, casts, copies, losses."""
    kernels: int = 0
    """Operators that run on the device."""
    fusable_bytes: int = 0
    """Part of moved_bytes that would not move if a compiler made one kernel of all operators of a unit between two
    products: see Fusion."""
    fusable_kernels: int = 0
    """Part of kernels that there would not be then."""


class WorkCounter:
    """Counts operators as they are dispatched. `work` is the sum so far."""

    def __init__(self, model: nn.Module) -> None:
        # Here, since it imports triton, which a rank that plans nothing does without.
        from torch.utils.flop_counter import flop_registry

        self._formulas = flop_registry
        self.work = Work()
        self.fusion = Fusion(self.work)
        self._running_again = 0
        # An autograd.Function turns gradients off in its forward, so gradient mode alone does not tell a forward that
        # runs again from a backward.
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)  # recomputation may stop early, by an exception

    def _enter(self, *_: Any) -> None:
        if in_backward():
            self._running_again += 1

    def _leave(self, *_: Any) -> None:
        if in_backward() and self._running_again:
            self._running_again -= 1

    def add(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any, *, in_unit: bool = False
    ) -> None:
        """Count one call of an operator. in_unit: of a unit that can be compiled."""
        operator = getattr(func, "_overloadpacket", None)
        needed = not in_backward() or not (self._running_again or torch.is_grad_enabled())
        work = self.work
        if operator in (FLASH_FORWARD, FLASH_BACKWARD):
            self._add_attention(operator is FLASH_BACKWARD, args, kwargs, needed=needed)
            work.kernels += 1
            self.fusion.end()
            return
        formula = grouped_mm_flops if operator is GROUPED_MM else self._formulas.get(operator)
        if formula:
            flops = formula(*args, **kwargs, out_val=output)
            work.hardware_flops += flops
            work.flops += flops if needed else 0
            work.kernels += 1
            self.fusion.end()
            return
        moved = moved_bytes(func, args, kwargs, output)
        work.moved_bytes += moved
        work.kernels += moved > 0
        if moved and in_unit and func.namespace == "aten":
            self.fusion.add((args, kwargs), output, moved)
        elif moved:  # a custom operator, which is one kernel already, or outside of the units
            self.fusion.end()

    def _add_attention(self, backward: bool, args: Sequence[Any], kwargs: dict[str, Any], *, needed: bool) -> None:
        """Count fused attention. Query is (batch, heads, length, width); keys may have fewer heads."""
        query, key, value = args[1:4] if backward else args[:3]
        causal = args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        batch, heads, length, width = query.shape
        one_product = 2 * batch * heads * length * key.shape[2]  # for each column
        scores, values = one_product * width, one_product * value.shape[3]
        # Backward: the gradients of both products' two inputs, and the scores again, since forward did not keep them.
        useful = 2 * scores + 2 * values if backward else scores + values
        executed = useful + scores if backward else useful
        skipped = executed // 2 if causal else 0
        self.work.hardware_flops += executed
        self.work.flops += useful if needed else 0
        self.work.attention_flops += executed - skipped
        self.work.causal_flops += skipped


class Fusion:
    """Groups operators as they are dispatched; a product, a custom operator, or the end of a unit ends a group.

    The group as one kernel reads each tensor that others made once, and writes the tensors that are still there at its
    end: what a later product or backward needs. A compiler may compute some of these again, and then writes less.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._numbers: dict[int, int] = {}  # of storages that are there, by address: addresses are used again
        self._next = count()
        self._begin()

    def _begin(self) -> None:
        self._bytes = self._kernels = 0
        self._read: dict[int, int] = {}  # bytes by the storage's number
        self._written: dict[int, int] = {}  # in place, in the storages of others
        self._made: dict[int, int] = {}  # in the group, and not freed yet

    def add(self, inputs: Any, output: Any, moved: int) -> None:
        """Add an operator to the group. moved: the bytes that it reads and writes by itself."""
        self._bytes += moved
        self._kernels += 1
        for tensor in tensors_of(inputs):
            number = self._number(tensor)
            if number not in self._made:
                self._read[number] = max(self._read.get(number, 0), stored_bytes(tensor))
        for tensor in tensors_of(output):
            number = self._number(tensor)
            if number in self._read:
                self._written[number] = stored_bytes(tensor)
            elif number not in self._made:
                self._made[number] = stored_bytes(tensor)

    def _number(self, tensor: torch.Tensor) -> int:
        """Return a number that no other storage has or had."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._numbers[address] = next(self._next)
            weakref.finalize(storage, self._free, address)
        return self._numbers[address]

    def _free(self, address: int) -> None:
        self._made.pop(self._numbers.pop(address), None)

    def end(self) -> None:
        """End the group, and count what fusing it saves."""
        if not self._kernels:
            return
        left = sum(self._read.values()) + sum(self._written.values()) + sum(self._made.values())
        self._work.fusable_bytes += max(0, self._bytes - left)
        self._work.fusable_kernels += self._kernels - 1
        self._begin()


def grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products of groups of rows of a, or of its matrices, and matrices of b."""
    groups = len(a) if a.dim() == 3 and b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def moved_bytes(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the bytes that an operator reads and writes; 0 for views and for those that only allocate."""
    operator = getattr(func, "_overloadpacket", None)
    if operator is None or getattr(operator, "__name__", "") in ALLOCATES:
        return 0
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(output)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    in_place = func._schema.is_mutable
    if not in_place and all(tensor.untyped_storage()._cdata in storages for tensor in outputs):
        return 0
    written = sum(stored_bytes(tensor) for tensor in outputs)
    reads = [stored_bytes(tensor) for tensor in inputs]
    if operator in READS_ROWS:
        reads = [min(nbytes, written) for nbytes in reads]
    return written + sum(reads)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; what is expanded counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
