"""Tell of state that forward or backward writes: what FSDP drops, and what then differs between ranks.

Examples are a codebook that is updated as a moving average, and batch norms of frozen parts in train mode. What is
written to a gathered parameter is lost when FSDP frees it. What is written to a tensor that every rank holds differs
between ranks, since each updates it by its own samples, unless the model sums over ranks itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from ..params import ParamError
from .collectives import gather_through_store, is_distributed, rank
from .freeze import frozen_modules
from .guards import list_all
from .model_record import record_of
from .names import plain_name
from .reshard import parameter_groups

LOST = (
    "{}: forward or backward writes to this parameter while it is gathered, and the change is lost when FSDP frees it. "
    "Make it a buffer (register_buffer) and sum over ranks what it is updated with (dist.all_reduce), or write to it "
    "between two steps"
)
DIFFERS = (
    "{}: forward or backward writes to this parameter, differently on each rank. Sum over ranks what it is updated "
    "with (dist.all_reduce)"
)
BUFFERS = (
    "{}: forward or backward writes to this buffer, differently on each rank, and only rank 0's is saved. Sum over "
    "ranks what it is updated with (dist.all_reduce); or register it with persistent=False if it need not be saved"
)
FROZEN_NORMS = (
    "{}: frozen, but in train mode: it normalizes by the batch, and its running statistics change, on each rank by its "
    "own samples. Call mmfsdp.train_mode(model) in place of model.train()"
)

CHUNK = 1 << 20
"""Elements of a tensor that are summed at a time."""
Digests = dict[str, torch.Tensor]


def watch_state(model: nn.Module) -> StateWatch:
    """Return a watch over one micro-batch; after the first step of a model, one that does nothing."""
    is_fake = is_distributed() and dist.get_backend() == "fake"
    return StateWatch(model, active=not record_of(model).first_step_checked and not is_fake)


class StateWatch:
    """Watch what the forward and the backward inside the `with` block write to parameters and buffers.

    It compares sums of all of them, so it is for one micro-batch of the first step.
    """

    def __init__(self, model: nn.Module, *, active: bool) -> None:
        self.model, self.active = model, active
        self.watched = False
        """The block was left, so that there is something to tell."""
        self.dropped: list[tuple[str, torch.Tensor]] = []
        """A name for each time that a gathered parameter is freed, and whether it was written to."""
        self.compare_at_end: list[Callable[[], Digests]] = []
        """Comparisons of the units that stay gathered between two micro-batches."""
        self.replaced: list[tuple[Any, str]] = []
        """Methods of units, as (unit, name)."""
        self.before: Digests = {}

    def __enter__(self) -> None:
        if not self.active:
            return
        groups: dict[Any, None] = {}  # several modules may share one
        for full_name, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                groups.update(dict.fromkeys(parameter_groups(module)))
            elif handle := fsdp1_handle(module):
                self._watch_fsdp1_unit(full_name, handle)
        for group in groups:
            self._watch(group, "wait_for_unshard", "reshard", partial(digests_of_group, group))
        self.before = dict(whole_tensors(self.model))

    def _watch_fsdp1_unit(self, full_name: str, handle: Any) -> None:
        def digests() -> Digests:
            return {f"{full_name}.{name}".lstrip("."): digest(part) for name, part in fsdp1_parts(handle.flat_param)}

        self._watch(handle, "post_unshard", "reshard", digests)

    def _watch(self, owner: Any, gather: str, free: str, digests: Callable[[], Digests]) -> None:
        """Take digests after the method that gathers a unit, and compare them before the one that frees it."""
        gathered: Digests = {}
        gather_method, free_method = getattr(owner, gather), getattr(owner, free)

        def gathers(*args: Any) -> None:
            gather_method(*args)
            if not gathered:
                gathered.update(digests())

        def compare() -> Digests:
            now = digests() if gathered else {}
            for name, value in now.items():
                self.dropped.append((name, (value != gathered[name]).any()))
            gathered.clear()
            return now

        def frees(*args: Any) -> None:
            now = compare()
            free_method(*args)
            if getattr(owner, "is_unsharded", False):  # FSDP2 keeps some units until backward
                gathered.update(now)

        for name, replacement in ((gather, gathers), (free, frees)):
            setattr(owner, name, replacement)
            self.replaced.append((owner, name))
        self.compare_at_end.append(compare)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for owner, name in self.replaced:
            delattr(owner, name)
        self.replaced.clear()
        if self.active and error is None:
            for compare in self.compare_at_end:
                compare()
            self.watched = True
        self.active = False

    def stop_if_written(self) -> None:
        """Raise ParamError if a frozen parameter was written to, and the change is lost or differs between ranks.

        For trainable parameters, which some layers scale in forward, and for buffers, rank 0 warns. Every rank must
        call it.
        """
        if not self.watched:
            return
        lost = sorted({plain_name(name, self.model) for name, written in self.dropped if bool(written)})
        changed = {}
        for name, value in whole_tensors(self.model):
            after, before = value.tolist(), self.before.get(name, value).tolist()
            if after != before and after[-1] == before[-1]:  # a buffer of another size is a cache
                changed[name] = after
        of_ranks = gather_through_store([lost, changed])
        all_lost: dict[str, None] = {}
        differing: dict[str, None] = {}
        for names, values in of_ranks:
            all_lost.update(dict.fromkeys(names))
            for _, others in of_ranks:
                differing.update({name: None for name in values if values[name] != others.get(name)})
        parameters = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            parameters[plain_name(name, self.model)] = p
        written = [name for name in differing if name in parameters]
        tell(LOST, list(all_lost), parameters)
        tell(DIFFERS, written, parameters)
        tell(BUFFERS, [name for name in differing if name not in parameters], parameters)


def tell(message: str, names: list[str], parameters: dict[str, nn.Parameter]) -> None:
    """Raise ParamError if one of the names is a frozen parameter's; for others, warn on rank 0."""
    frozen = [name for name in names if name in parameters and not parameters[name].requires_grad]
    if frozen:
        raise ParamError("model", message.format(list_all(frozen)))
    if names and rank() == 0:
        warnings.warn(message.format(list_all(names)), stacklevel=4)


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, digest) of each parameter that this rank holds all of, and of each buffer that is saved.

    Buffers of whole numbers, which count, are left out, and so are the running statistics of norms: what the lint of a
    plan and `warn_of_frozen_norms` say about those is enough.
    """
    views: set[torch.Tensor] = set()
    for module in model.modules():
        if handle := fsdp1_handle(module):
            views.update([handle.flat_param, *(handle.flat_param._params or ())])
    for full_path, module in model.named_modules():
        path = plain_name(full_path, model)
        for key, p in module._parameters.items():
            if p is not None and not isinstance(p, DTensor) and p not in views:
                yield f"{path}.{key}".lstrip("."), digest(p)
        if isinstance(module, _NormBase):
            continue
        for key, buffer in module._buffers.items():
            is_saved = buffer is not None and key not in module._non_persistent_buffers_set
            if is_saved and buffer.is_floating_point() and not isinstance(buffer, DTensor):
                yield f"{path}.{key}".lstrip("."), digest(buffer)


def digests_of_group(group: Any) -> Digests:
    """Return a digest of each parameter of a unit of FSDP2; empty unless it is gathered."""
    if not group.is_unsharded:
        return {}
    return {p._param_fqn: digest(p.unsharded_param) for p in group.fsdp_params}


def fsdp1_handle(module: nn.Module) -> Any:
    """Return FSDP1's handle of the flat parameter of a unit that is sharded; None for other modules."""
    # torch 2.11: FSDP1 has no public name for it.
    handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
    return handle if handle is not None and handle.uses_sharded_strategy else None


def fsdp1_parts(flat_param: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in its unit, values) of the parameters that make up a gathered flat parameter of FSDP1."""
    sizes = flat_param._numels_with_padding
    names = iter(flat_param._fqns)
    parts = flat_param.detach().flatten()[: sum(sizes)].split(list(sizes))
    for part, is_padding in zip(parts, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            yield next(names), part


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return (3,) float64: sum and sum of squares, which a write changes, and the number of elements."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.itemsize == 1:  # float8 has no sum
        tensor = tensor.view(torch.uint8)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = torch.atleast_1d(tensor)
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    row_size = max(1, tensor.numel() // max(1, len(tensor)))
    for rows in tensor.split(max(1, CHUNK // row_size)):  # else a copy of the whole tensor in float64
        values = rows.to(torch.float64)
        sums += torch.stack([values.sum(), values.square().sum()])
    number = torch.full_like(sums[:1], tensor.numel())
    return torch.cat([sums, number]).nan_to_num()


def warn_of_frozen_norms(model: nn.Module) -> None:
    """Warn once, on rank 0, of norms in frozen modules that are in train mode and keep running statistics."""
    record = record_of(model)
    if record.frozen_norms is None:
        norms = (norm for part in frozen_modules(model) for norm in part.modules() if isinstance(norm, _NormBase))
        record.frozen_norms = WeakSet(norm for norm in norms if norm.running_mean is not None)
    in_train_mode = {norm for norm in record.frozen_norms if norm.training}
    if not in_train_mode:
        return
    record.frozen_norms = WeakSet()  # told
    names = [plain_name(name, model) for name, module in model.named_modules() if module in in_train_mode]
    if rank() == 0:
        warnings.warn(FROZEN_NORMS.format(list_all(names)), stacklevel=4)
