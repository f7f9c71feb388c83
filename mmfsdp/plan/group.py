"""Which modules become units: torch's two policies, and the frozen-aware one.

A group is a list of module names: one unit fetches whatever is inside them and not in a group further inside.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from ..params import AutoWrapPolicy, FSDPParams, ParamError
from .ties import outermost
from .trace import Trace, has_forward

SMALL = 1_000_000
"""Parameters below which a gather is mostly latency: such neighbors of one kind share a unit."""
MIN_NUM_PARAMS = 100_000
"""SIZE_BASED_WRAP's default (Oumi's)."""


@dataclass
class Group:
    """Modules of one unit to be."""

    modules: list[str]
    block: bool = False
    """A repeated layer, or a part of one: never merged with its neighbors."""


def group(model: nn.Module, params: FSDPParams, seen: Trace) -> list[list[str]]:
    """Module names of every unit, the root's excepted: what no group holds, the root unit does."""
    policy = params.auto_wrap_policy
    if policy is AutoWrapPolicy.FROZEN_AWARE:
        return FrozenAware(model, seen).groups()
    if policy is AutoWrapPolicy.NO_WRAP:
        return []
    chosen: list[str] = []
    _torch_policy(model, "", _asks(model, params), chosen)
    named = policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP  # a container that was asked for is a mistake to be told
    return [[n] for n in chosen if n and (seen.runs(n, m := model.get_submodule(n)) or named and not has_forward(m))]


def _asks(model: nn.Module, params: FSDPParams):
    """torch's policy function with its settings: (module, recurse, nonwrapped_numel) -> bool."""
    if params.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        least = params.min_num_params or MIN_NUM_PARAMS
        return lambda module, recurse, numel: size_based_auto_wrap_policy(module, recurse, numel, min_num_params=least)
    classes = set()
    known = {type(m).__name__: type(m) for m in model.modules()}
    for name in params.layer_classes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:8]
            raise ParamError(
                "transformer_layer_cls", f"no module of the model is a {name}; some that are there: {', '.join(near)}"
            )
        classes.add(known[name])
    return lambda module, recurse, numel: transformer_auto_wrap_policy(module, recurse, numel, classes)


def _torch_policy(module: nn.Module, name: str, asks, chosen: list[str]) -> int:
    """torch's recursion (torch.distributed.fsdp.wrap), children first. Returns the parameters now in units."""
    numel = sum(p.numel() for p in module.parameters())
    if not asks(module, True, numel):
        return 0
    wrapped = sum(
        _torch_policy(child, f"{name}.{key}" if name else key, asks, chosen) for key, child in module.named_children()
    )
    if asks(module, False, numel - wrapped):
        chosen.append(name)
        return numel
    return wrapped


class FrozenAware:
    """Repeated layers, each split where frozen and trainable meet; then what is left over, small neighbors together."""

    def __init__(self, model: nn.Module, seen: Trace):
        self.model = model
        self.seen = seen
        self.first = {id(p): name for name, p in model.named_parameters()}

    def groups(self) -> list[list[str]]:
        """Module names of every unit but the root's."""
        parts = [g for g in self._walk("") if g.modules != [""]]  # the root is no neighbor to share with
        found = sorted(parts, key=lambda g: min(self.seen.enter.get(m, 0) for m in g.modules))
        merged: list[Group] = []
        for one in found:
            if merged and self._belong_together(merged[-1], one):
                merged[-1].modules += one.modules
            else:
                merged.append(one)
        return [outermost(g.modules) for g in merged]

    def _walk(self, name: str) -> Iterator[Group]:
        """Groups of a part that is not inside a repeated layer."""
        if not self._has_layers(name):
            yield from (Group(modules) for modules in self._split(name))
            return
        own = self._kinds_of(self._own(name)) if name else frozenset()
        runs = self.seen.runs(name, self.model.get_submodule(name))
        for child in self._children(name):
            if child in self._layer_lists(name):
                for layer in self._children(child):
                    yield from (Group(modules, block=True) for modules in self._split(layer))
            else:
                for one in self._walk(child):
                    absorbed = not one.block and own and runs and self._kinds(one) == own and self._numel(one) < SMALL
                    if not (absorbed and self._flow(one) == self._flow_of(self._own(name))):
                        yield one
        if own and not self._fetched_above(name):
            yield Group([name], block=True)

    def _split(self, name: str) -> list[list[str]]:
        """Groups of one layer: itself if all of one kind, else its frozen and its trainable modules apart."""
        pieces = self._pieces(name)
        scattered = [modules for modules in pieces.values() if len(modules) > 1 and not _inside(modules, pieces)]
        # What is in many places, the layer itself can fetch as well as they; the other kind stays by itself.
        if scattered and self.seen.runs(name, self.model.get_submodule(name)) and not self._own(name):
            max(scattered, key=lambda modules: self._numel(Group(modules)))[:] = [name]
        # A module that fetches its own parameters comes after those inside it.
        return sorted(pieces.values(), key=lambda modules: name in modules)

    def _pieces(self, name: str) -> dict[tuple[frozenset[bool], int], list[str]]:
        """By kind, and how often they run, the outermost modules that hold that kind only, or that must fetch their own
        parameters."""
        kinds = self._kinds(Group([name]))
        runs = self.seen.runs(name, self.model.get_submodule(name))
        if len(kinds) == 1 and runs:
            return {(kinds, self._often(name)): [name]}
        found: dict[tuple[frozenset[bool], int], list[str]] = {}
        for child in self._children(name) if kinds else []:
            for kind, modules in self._pieces(child).items():
                found.setdefault(kind, []).extend(modules)
        own = self._kinds_of(self._own(name))
        if own and runs:  # with what is inside of its kind; where it does not run, a module further up does this
            found[own, self._often(name)] = [name]
        return found

    def _often(self, name: str) -> int:
        """Runs of a module in a forward: those of one unit must begin and end together."""
        return self.seen.calls[name] if self.seen.calls else 1

    def _fetched_above(self, name: str) -> bool:
        """True where the model uses a module's own parameters past its forward: one further up must hold them."""
        module = self.model.get_submodule(name)
        used = any(self.first[id(p)] in self.seen.used for p in self._own(name))
        return not self.seen.runs(name, module) and (used or not has_forward(module))

    def _belong_together(self, a: Group, b: Group) -> bool:
        if self._often(a.modules[0]) > 1 or self._often(b.modules[0]) > 1:
            return False
        if a.block or b.block or self._kinds(a) != self._kinds(b) or self._flow(a) != self._flow(b):
            return False
        return min(self._numel(a), self._numel(b)) < SMALL

    def _layer_lists(self, name: str) -> list[str]:
        """Children that are lists of layers: of modules with modules inside, all holding parameters."""
        return [child for child in self._children(name) if self._is_layer_list(child)]

    def _is_layer_list(self, name: str) -> bool:
        module = self.model.get_submodule(name)
        least = {nn.ModuleList: 1, nn.Sequential: 2}.get(type(module), 0)
        layers = [m for m in module.children() if any(True for _ in m.parameters())]
        return bool(least) and len(layers) >= least and all(any(True for _ in m.children()) for m in layers)

    def _has_layers(self, name: str) -> bool:
        module = self.model.get_submodule(name)
        return any(self._is_layer_list(f"{name}.{n}" if name else n) for n, _ in module.named_modules() if n)

    def _children(self, name: str) -> list[str]:
        module = self.model.get_submodule(name)
        return [f"{name}.{key}" if name else key for key, _ in module.named_children()]

    def _own(self, name: str) -> list[nn.Parameter]:
        """Parameters fetched by the module's own forward: its own, and those of modules inside that never run."""
        module = self.model.get_submodule(name)
        own = list(module.parameters(recurse=False))
        for child in self._children(name):
            if not self.seen.runs(child, self.model.get_submodule(child)):
                own += self._own(child)
        return own

    def _params(self, group: Group) -> list[nn.Parameter]:
        return [p for name in group.modules for p in self.model.get_submodule(name).parameters()]

    def _kinds(self, group: Group) -> frozenset[bool]:
        return self._kinds_of(self._params(group))

    def _kinds_of(self, params: list[nn.Parameter]) -> frozenset[bool]:
        return frozenset(p.requires_grad for p in params)

    def _numel(self, group: Group) -> int:
        return sum(p.numel() for p in self._params(group))

    def _flow(self, group: Group) -> bool:
        return self._flow_of(self._params(group))

    def _flow_of(self, params: list[nn.Parameter]) -> bool:
        return any(self.first[id(p)] in self.seen.flow for p in params)


def _inside(modules: list[str], pieces: dict[Any, list[str]]) -> bool:
    """Whether other pieces, as adapters around frozen weights, hold some of these, and would fetch them, too."""
    others = tuple(f"{m}." for other in pieces.values() if other is not modules for m in other)
    return any(m.startswith(others) for m in modules)
