"""Names of parameters and modules: without what wrappers add, of tied parameters, of the modules around them."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from .model_record import plan_of, uncompiled
from .plan import Param


def plain_name(name: str, model: nn.Module) -> str:
    """Return the name that a parameter or module of a wrapped model has in the model before wrapping.

    name: as `model.named_parameters()` or `model.named_modules()` has it.
    """
    for mark in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{mark}.", "").removesuffix(mark).removesuffix(".")
    # DDP holds the model as `module`. A part of the model may have this name as well, so the name alone does not tell.
    if isinstance(uncompiled(model), DistributedDataParallel):
        name = name.partition(".")[2]
    return name


def ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter or module, the innermost first; the root's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each module once, in the order of `model.modules()`.

    That method makes names, in generators inside generators. A step walks through all modules several times, while a
    GPU may wait for it.
    """
    seen: set[nn.Module] = set()
    left = [model]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            yield module
            left += [child for child in reversed(module._modules.values()) if child is not None]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return each parameter once, in the order of `model.parameters()`."""
    found: dict[int, nn.Parameter] = {}  # by identity: the hash of a tensor is a call of Python
    for module in modules_of(model):
        for p in module._parameters.values():
            if p is not None:
                found.setdefault(id(p), p)
    return list(found.values())


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class, without what fully_shard adds: it puts a class of its own before it."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)).__name__


def tied_names(model: nn.Module, *, several_modules: bool = False) -> dict[str, list[str]]:
    """Return all names of each parameter that has several, by its first name.

    several_modules: leave out a parameter that only one module holds, and that module has several names.
    """
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=several_modules):
        for key, p in module._parameters.items():
            if p is not None:
                names.setdefault(id(p), []).append(f"{path}.{key}".lstrip("."))
    return {aliases[0]: aliases for aliases in names.values() if len(aliases) > 1}


def named_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return each parameter and buffer once, with all its names: a tied one has several."""
    names_of: dict[torch.Tensor, list[str]] = {}  # by identity: tensors hash by id
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names_of.setdefault(tensor, []).append(name)
    return [(names, tensor) for tensor, names in names_of.items()]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP or FSDP1; one of FSDP2 is itself."""
    model = uncompiled(model)
    # By the class: a model of one's own may have a part called `module`.
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


def planned_params(model: nn.Module, names: list[str]) -> list[Param]:
    """Return what the plan of a wrapped model has of a tensor with these names; [] without a plan.

    With `use_orig_params` false a unit is one parameter.
    """
    plan = plan_of(model)
    if plan is None:
        return []
    name = plain_name(names[0], model)
    if name in plan.by_name:
        return [plan.by_name[name]]
    module = name.removesuffix("_flat_param").rstrip(".")
    unit = next(unit for unit in plan.units if module in unit.modules)
    return list(unit.params)


def model_digest(model: nn.Module) -> str:
    """Return a digest of all of a plain model that a plan depends on, and of no values.

    Classes of modules by name, in their order; names, shape, dtype and `requires_grad` of each tensor.
    """
    digest = sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__}\n".encode())
    for names, tensor in named_tensors(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        digest.update(f"{names} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {is_parameter}\n".encode())
    return digest.hexdigest()
