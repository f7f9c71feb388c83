"""Find state that the forward writes, in the first step: what FSDP drops, and what then differs between ranks.

Examples are a codebook that is updated as a moving average, and batch norms of frozen parts in train mode. Written to a
gathered parameter, the change is gone with the copy. Written to what every rank holds, each rank changes it by its own
samples, unless the model sums over ranks itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..params import ParamError
from .collectives import gather_through_store, rank
from .inference import parameter_groups
from .lint import list_all
from .names import plain_name
from .units import unit_name

LOST = (
    "{}: the forward or backward writes to it, and the change is lost: it wrote to the gathered copy, which FSDP "
    "frees. Make it a buffer (register_buffer) and sum over ranks what it is updated with (dist.all_reduce), or write "
    "to it between two steps"
)
DIFFERS = (
    "{}: the forward or backward writes to this parameter, differently on each rank. Sum over ranks what it is updated "
    "with (dist.all_reduce)"
)
BUFFERS = (
    "{}: the first step changed these buffers, differently on each rank, and only rank 0's are saved. For batch norms "
    "of frozen parts, call mmfsdp.train_mode(model) in place of model.train(). For others, sum over ranks what they "
    "are updated with (dist.all_reduce)"
)

Digests = dict[str, torch.Tensor]


class StateWatch:
    """Watch what one step writes to parameters and buffers in forward and backward. It reads them, so use it once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dropped: list[tuple[str, torch.Tensor]] = []
        """Of each gathered parameter, each time that it is freed: its name, and whether it was written to."""
        self.undo: list[Callable[[], None]] = []
        seen: set[Any] = set()
        for full_name, module in model.named_modules():
            name = unit_name((plain_name(full_name, model),))
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    if group not in seen:
                        seen.add(group)
                        self.watch(group, "wait_for_unshard", "reshard", lambda group=group: gathered(group))
            elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                handle = module._handle
                self.watch(handle, "post_unshard", "reshard", lambda name=name, h=handle: {name: digest(h.flat_param)})
        self.before = dict(self.whole())

    def watch(self, owner: Any, gather: str, free: str, digests: Callable[[], Digests]) -> None:
        """Take digests after a method of a unit that gathers it, and compare them before the one that frees it."""
        after_gather: Digests = {}
        gather_method, free_method = getattr(owner, gather), getattr(owner, free)

        def gathers(*args: Any) -> None:
            gather_method(*args)
            if not after_gather:
                after_gather.update(digests())

        def frees(*args: Any) -> None:
            now = digests() if after_gather else {}
            for name, value in now.items():
                self.dropped.append((name, (value != after_gather[name]).any()))
            after_gather.clear()
            free_method(*args)
            if getattr(owner, "is_unsharded", False):  # FSDP2 keeps it until backward
                after_gather.update(now)

        for name, replacement in ((gather, gathers), (free, frees)):
            before = vars(owner).get(name)  # of another watch
            setattr(owner, name, replacement)
            self.undo.append(lambda name=name, before=before: restore(owner, name, before))

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the digest of each parameter and floating-point buffer that this rank holds all of."""
        fsdp1 = self.model if isinstance(self.model, FullyShardedDataParallel) else None
        for full_path, module in self.model.named_modules():
            path = plain_name(full_path, self.model)
            for key, p in module._parameters.items():
                # All but the replicated ones of FSDP1 are views of its flat parameters.
                is_view = fsdp1 is not None and p not in fsdp1._ignored_params
                if p is not None and not isinstance(p, DTensor) and not is_view:
                    yield f"{path}.{key}".lstrip("."), digest(p)
            for key, buffer in module._buffers.items():
                # Others hold what can be made again, such as masks and rotary caches, or count.
                saved = buffer is not None and key not in module._non_persistent_buffers_set
                if saved and buffer.is_floating_point() and not trains_its_statistics(module):
                    yield f"{path}.{key}".lstrip("."), digest(buffer)

    def stop_if_written(self) -> None:
        """Raise ParamError if a parameter was written to and the change is lost or differs between ranks.

        For buffers that differ between ranks, rank 0 warns. Every rank must call it.
        """
        for undo in self.undo:
            undo()
        dropped = sorted({plain_name(name, self.model) for name, written in self.dropped if bool(written)})
        changed = {}
        for name, value in self.whole():
            if name in self.before and bool((value != self.before[name]).any()):
                changed[name] = value.tolist()
        of_ranks = gather_through_store([dropped, changed])
        lost: dict[str, None] = {}
        differs: dict[str, None] = {}
        for names, values in of_ranks:
            lost.update(dict.fromkeys(names))
            for _, others in of_ranks:
                differs.update({name: None for name in values if values[name] != others.get(name)})
        parameters = {plain_name(name, self.model) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        if lost:
            raise ParamError("model", LOST.format(list_all(list(lost))))
        if written := [name for name in differs if name in parameters]:
            raise ParamError("model", DIFFERS.format(list_all(written)))
        if differs and rank() == 0:
            warnings.warn(BUFFERS.format(list_all(list(differs))), stacklevel=3)


def gathered(group: Any) -> Digests:
    """Return a digest of each parameter of a unit of FSDP2 while it is gathered."""
    if not group.is_unsharded:
        return {}
    return {p._param_fqn: digest(p.unsharded_param) for p in group.fsdp_params}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return (2,): a sum and a norm, which a write changes. Neither needs memory."""
    tensor = tensor.detach()
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        return tensor.sum(dtype=torch.float64).expand(2)
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return torch.stack([tensor.sum(dtype=torch.float64), norm]).nan_to_num()


def trains_its_statistics(module: nn.Module) -> bool:
    """Return True for a batch norm whose weights train: the lint of a plan tells of its statistics."""
    return isinstance(module, _BatchNorm) and module.weight is not None and module.weight.requires_grad


def restore(owner: Any, name: str, before: Any) -> None:
    """Set an attribute of an object back; None: of its class."""
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
