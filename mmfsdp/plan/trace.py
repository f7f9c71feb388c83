"""The order in which modules run, and which frozen weights backward passes through.

By an example forward on fake tensors where one is given; else by registration order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .fake import FakeOperators, fake, fake_copy, fake_mode, tensors_of


@dataclass
class Trace:
    """How a model runs, by module and parameter name."""

    enter: dict[str, float] = field(default_factory=dict)
    """When a module's forward is first entered; any unit of order."""
    leave: dict[str, float] = field(default_factory=dict)
    """When a module's forward is last left."""
    calls: Counter[str] | None = None
    """How often a module's forward runs; None where no example told."""
    flow: set[str] = field(default_factory=set)
    """Frozen parameters (first names) that backward passes through."""
    used: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    """For each parameter (first name), the modules whose forward was running, at each of its uses."""
    saves: dict[str, float] = field(default_factory=dict)
    """When a module's forward last kept something for backward."""

    def runs(self, name: str, module: nn.Module) -> bool:
        """True if hooks on the module's forward will fire."""
        if self.calls is not None and name:
            return self.calls[name] > 0
        return has_forward(module)


def has_forward(module: nn.Module) -> bool:
    """False for a mere container, such as ModuleList."""
    return type(module).forward is not nn.Module.forward


def tied_names(model: nn.Module, *, apart: bool = False) -> dict[str, list[str]]:
    """All names of each parameter that has several, by its first one. apart: only where several modules hold it, and
    not one module that has several names."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=apart):
        for name, p in module._parameters.items():
            if p is not None:
                names.setdefault(id(p), []).append(f"{path}.{name}" if path else name)
    return {found[0]: found for found in names.values() if len(found) > 1}


def trace(model: nn.Module, example: dict[str, Any] | None, also: Collection[str] = ()) -> Trace:
    """Run `model(**example)` on fake tensors (no memory, no arithmetic), or go by registration order. also: parameters
    that give gradients to what comes after, though they are frozen."""
    return _run(model, example, also) if example is not None else registration(model, also=also)


def registration(model: nn.Module, plain: Callable[[str], str] = str, also: Collection[str] = ()) -> Trace:
    """Assume that modules run in the order in which they were registered. plain: takes out what wrappers put in.
    also: parameters that give gradients to what comes after, though they are frozen.

    Whatever comes after something trainable has grad flow, but an embedding: its input is whole numbers.
    """
    seen = Trace()
    names = dict.fromkeys(plain(name) for name, _ in model.named_modules(remove_duplicate=False))
    for place, name in enumerate(names):
        seen.enter[name] = place
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):  # a module is left after all that is inside, inner ones first
            seen.leave[".".join(parts[:depth])] = place + 1 / (depth + 2)
    first = {id(p): plain(name) for name, p in model.named_parameters()}
    upstream = False
    for name, p in model.named_parameters(remove_duplicate=False):  # a table tied to an output matrix flows as that
        upstream |= p.requires_grad or plain(name) in also
        owner = model.get_submodule(name.rpartition(".")[0])
        late = any(q.requires_grad for q in owner.parameters())  # it may be used after something trainable inside
        if not p.requires_grad and (late or upstream and not isinstance(owner, nn.Embedding)):
            seen.flow.add(first[id(p)])
    return seen


def _run(model: nn.Module, example: dict[str, Any], also: Collection[str]) -> Trace:
    mode = fake_mode()
    twin = fake_copy(model, mode)
    for name in also:
        twin.get_parameter(name).requires_grad_(True)
    inputs = tree_map(lambda v: fake(v, mode) if isinstance(v, torch.Tensor) else v, example)
    seen = Trace(calls=Counter())
    watch = _Watch({id(p): name for name, p in twin.named_parameters()}, seen)
    clock, saved = iter(range(10**9)), -1
    begun: dict[str, int] = {}

    def save(_: torch.Tensor) -> None:
        nonlocal saved
        saved = next(clock)

    def enter(name: str) -> None:
        begun[name] = next(clock)
        seen.enter.setdefault(name, begun[name])
        seen.calls[name] += 1  # type: ignore[index]
        watch.active.append(name)

    def leave(name: str) -> None:
        seen.leave[name] = next(clock)
        watch.active.remove(name)
        if saved > begun[name]:
            seen.saves[name] = saved

    for name, module in twin.named_modules(remove_duplicate=False):
        module.register_forward_pre_hook(lambda *_, n=name: enter(n))
        module.register_forward_hook(lambda *_, n=name: leave(n))
    try:
        with mode, FakeOperators(mode), watch, torch.enable_grad(), saved_tensors_hooks(save, lambda kept: kept):
            twin(**inputs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"example: the model's forward goes by what its tensors hold ({error}), and an example's hold nothing; "
            "leave it out, and modules are taken to run as they were registered"
        ) from error
    except Exception as error:
        raise ValueError(f"example: the model's forward failed on it ({type(error).__name__}: {error})") from error
    names = tied_names(twin)
    for first, uses in seen.used.items():
        owners = {name.rpartition(".")[0] for name in names.get(first, [first])}
        if any(not owners & active for active in uses):  # its own forward does not fetch it: as if it never ran
            seen.calls.update(dict.fromkeys(owners, -(10**9)))  # type: ignore[union-attr]
    return seen


class _Watch(TorchFunctionMode):
    """Notes where each parameter is used, and each frozen one that goes into something that requires grad."""

    def __init__(self, names: dict[int, str], seen: Trace):
        super().__init__()
        self.names = names
        self.own = dict(names)
        self.seen = seen
        self.active: list[str] = []
        self.kept: list[torch.Tensor] = []  # so that no id is given out twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (results := tensors_of(out)):  # asking for a dtype or a shape is no use
            return out
        given = tensors_of([*args, *(kwargs or {}).values()])
        for t in given:
            if id(t) in self.own:
                self.seen.used.setdefault(self.own[id(t)], set()).add(frozenset(self.active))
        weights = [self.names[id(t)] for t in given if not t.requires_grad and id(t) in self.names]
        if weights:
            if any(t.requires_grad for t in results):
                self.seen.flow.update(weights)
            elif len(weights) == len(given) == 1:  # the weight itself in another dtype or shape
                for t in results:
                    self.names.setdefault(id(t), weights[0])
                    self.kept.append(t)
        return out
