"""Group modules into units-to-be: torch's two policies and the frozen-aware one, then tied parameters.

A group is a list of module names. Its unit gathers the parameters inside them that no group further inside holds. What
is in no group stays with the root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from os.path import commonprefix

from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from ..params import AutoWrapPolicy, FSDPParams, ParamError
from ..params.base import did_you_mean
from .names import ancestors, tied_names
from .plan import Unit, UnitKind, WrapPlan
from .trace import Trace, has_forward

MIN_UNIT_PARAMETERS = 1_000_000
"""Below this, an all-gather is mostly latency: small neighbors of one kind share a unit. Chosen, not measured."""


def group_modules(model: nn.Module, params: FSDPParams, trace: Trace) -> tuple[list[list[str]], set[str]]:
    """Return the groups, and the names of parameters that must be replicated (only FSDP1 has such).

    Raises ParamError if `transformer_layer_cls` names no class of the model that has a forward.
    """
    groups: list[list[str]] = []
    if params.auto_wrap_policy is AutoWrapPolicy.FROZEN_AWARE:
        groups = FrozenAware(model, trace).groups()
    elif params.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP:
        for name in chosen_by_torch(model, params):
            if trace.calls[name]:  # a unit gathers in its module's forward
                groups.append([name])
    # A `Wrapper` (wrapper.py), which looks for tied parameters: most join groups by `join_tied` below.
    split: tuple[list[list[str]], set[str]] = params.effective_backend.load().groups(model, groups, trace)
    return split


def chosen_by_torch(model: nn.Module, params: FSDPParams) -> list[str]:
    """Return the modules that torch would wrap by its policy: its own function, private in torch 2.11, is asked."""
    policy: Callable[..., bool] = partial(size_based_auto_wrap_policy, min_num_params=params.min_num_params)
    if params.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes(model, params))
    names = {module: name for name, module in model.named_modules()}
    chosen: dict[str, None] = {}

    # In the place of a wrapper: it notes the module, and leaves it as it is.
    def note(module: nn.Module) -> nn.Module:
        chosen[names[module]] = None
        return module

    _recursive_wrap(model, policy, note, ignored_modules=set(), ignored_params=set(), only_wrap_children=True)
    return list(chosen)


def layer_classes(model: nn.Module, params: FSDPParams) -> set[type[nn.Module]]:
    """Return the classes that `transformer_layer_cls` names; where it is not set, the classes of the model's layers."""
    names = params.layer_classes or guessed_layer_classes(model)
    if not names:
        raise ParamError("transformer_layer_cls", "is not set, and the model has no list of layers; name their class")
    known = {type(module).__name__: type(module) for module in model.modules() if has_forward(module)}
    classes = set()
    for name in names:
        if name not in known:
            fix = did_you_mean(name, sorted(known))
            raise ParamError("transformer_layer_cls", f"the model has no {name} with a forward{fix}")
        classes.add(known[name])
    return classes


def guessed_layer_classes(model: nn.Module) -> tuple[str, ...]:
    """Return the class names of the layers in the model's lists of layers."""
    names: set[str] = set()
    for module in model.modules():
        if is_layer_list(module):
            names.update(type(layer).__name__ for layer in module.children())
    return tuple(sorted(names))


class FrozenAware:
    """Make each repeated layer a group, or two: its frozen and its trainable part. Merge other small neighbors.

    A unit of one kind costs what it must: a frozen one is never reduced, and often not gathered in backward.

    For example, a layer of a Flamingo has a frozen and a trainable part:

        layers.0                    FlamingoLayer
        layers.0.cross_attention    GatedCrossAttention, trainable
        layers.0.decoder_layer      LlamaDecoderLayer, frozen

    1. `_outside_layers` walks down from the root to the list `layers`, and calls `_split` for each layer in it.
    2. `_split("layers.0")` asks `_pieces` for the outermost modules of one kind. The layer itself is mixed, so its
       children are: {(TRAINABLE, 1): ["layers.0.cross_attention"], (FROZEN, 1): ["layers.0.decoder_layer"]}. The 1 is
       the number of calls in a forward: modules that are called different numbers of times do not share a unit.
    3. The layer becomes two groups, ["layers.0.cross_attention"] and ["layers.0.decoder_layer"]. `groups` sorts all
       groups by the start of their forward, and merges small neighbors, but never these: they are parts of a layer.

    If every parameter of the layer were frozen, `_pieces` would return {(FROZEN, 1): ["layers.0"]}: one group.
    """

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.trace, self.calls = trace, trace.calls
        self.first_names = {p: name for name, p in model.named_parameters()}
        self.modules = dict(model.named_modules())
        """Modules by their first name: a module that is in several places belongs to the first."""
        self.never_merged: set[str] = set()
        """Modules whose groups stay as they are: layers, parts of layers, and modules around layers."""

    def groups(self) -> list[list[str]]:
        """Return the groups, in the order in which they begin forward."""
        merged: list[list[str]] = []
        for group in sorted(self._outside_layers(""), key=self.trace.first_start):
            if group == [""]:
                # The root holds whatever is in no group.
                continue
            if merged and self._may_share_unit(merged[-1], group):
                merged[-1] += group
            else:
                merged.append(group)
        # Of a module and one inside it, the outer one gathers both.
        return list(map(outermost, merged))

    def _may_share_unit(self, a: list[str], b: list[str]) -> bool:
        """Return True if two neighbors may share a unit: of one kind, each run once, and one of them small."""
        # What shares a unit with a module that runs several times would be gathered as often.
        if self.never_merged & {*a, *b} or self.calls[a[0]] > 1 or self.calls[b[0]] > 1:
            return False
        of_a, of_b = self._parameters(a), self._parameters(b)
        return (
            self._cost_class(of_a) == self._cost_class(of_b) and min(_numel(of_a), _numel(of_b)) < MIN_UNIT_PARAMETERS
        )

    def _outside_layers(self, name: str) -> list[list[str]]:
        """Return the groups of a module that is not inside a repeated layer."""
        module = self.modules[name]
        if not any(is_layer_list(inner) for inner in module.modules() if inner is not module):
            return self._split(name)
        groups: list[list[str]] = []
        own = self._own_parameters(name) if name else []
        for child in self._children(name):
            if is_layer_list(self.modules[child]):
                for layer in self._children(child):
                    parts = self._split(layer)
                    self.never_merged.update(*parts)
                    groups += parts
                continue
            for group in self._outside_layers(child):
                inside = self._parameters(group)
                small = _numel(inside) < MIN_UNIT_PARAMETERS and self.never_merged.isdisjoint(group)
                # The module's own unit also gathers small groups of its kind, such as the patch embedding of a ViT.
                if not (own and self.calls[name] and small and self._cost_class(inside) == self._cost_class(own)):
                    groups.append(group)
        if own and not self._is_gathered_above(name):
            self.never_merged.add(name)
            groups.append([name])
        return groups

    def _split(self, name: str) -> list[list[str]]:
        """Return the groups of one layer: itself if it is of one kind, else its frozen and its trainable modules."""
        pieces = list(self._pieces(name).values())
        if self.calls[name] and not self._own_parameters(name):
            # If the modules of one kind are scattered, the layer itself may be their unit: it takes what no unit inside
            # it holds. Not if they are inside modules of the other kind, whose unit would take them: frozen weights
            # inside adapters.
            scattered = []
            for piece in pieces:
                if len(piece) > 1 and not any(contains(other, piece) for other in pieces if other is not piece):
                    scattered.append(piece)
            if scattered:
                largest = max(scattered, key=lambda piece: _numel(self._parameters(piece)))
                pieces = [[name] if piece is largest else piece for piece in pieces]
        # The layer itself comes after the modules inside it.
        return sorted(pieces, key=lambda piece: name in piece)

    def _pieces(self, name: str) -> dict[tuple[UnitKind, int], list[str]]:
        """Return the outermost modules that hold one kind only, by (kind, number of calls): a unit has one of each."""
        kind = _kind(self.modules[name].parameters())
        pieces: dict[tuple[UnitKind, int], list[str]] = {}
        if kind is UnitKind.EMPTY:
            return pieces
        if kind is not UnitKind.MIXED and self.calls[name]:
            return {(kind, self.calls[name]): [name]}
        for child in self._children(name):
            for key, modules in self._pieces(child).items():
                pieces.setdefault(key, []).extend(modules)
        own = _kind(self._own_parameters(name))
        # If the module does not run, one further up gathers its own parameters.
        if own is not UnitKind.EMPTY and self.calls[name]:
            pieces[own, self.calls[name]] = [name]
        return pieces

    def _own_parameters(self, name: str) -> list[nn.Parameter]:
        """Return what only its own forward can gather: its parameters, and the ones of modules in it that never run."""
        own = list(self.modules[name].parameters(recurse=False))
        for child in self._children(name):
            if not self.calls[child]:
                own += self._own_parameters(child)
        return own

    def _is_gathered_above(self, name: str) -> bool:
        """Return True if a module's own parameters are used outside its forward: a module further up must hold them."""
        if self.calls[name]:
            return False
        used = any(self.first_names[p] in self.trace.uses for p in self._own_parameters(name))
        return used or not has_forward(self.modules[name])

    def _children(self, name: str) -> list[str]:
        children = []
        for key, _ in self.modules[name].named_children():
            path = f"{name}.{key}".lstrip(".")
            if path in self.modules:
                children.append(path)
        return children

    def _parameters(self, group: list[str]) -> list[nn.Parameter]:
        parameters: list[nn.Parameter] = []
        for name in group:
            parameters += self.modules[name].parameters()
        return parameters

    def _cost_class(self, parameters: list[nn.Parameter]) -> tuple[UnitKind, bool]:
        """Return their kind, and whether backward passes through frozen ones: units alike in both cost the same."""
        grad_flow = any(self.first_names[p] in self.trace.grad_flow for p in parameters)
        return _kind(parameters), grad_flow


def is_layer_list(module: nn.Module) -> bool:
    """Return True for a list of layers: of modules with modules inside that all hold parameters."""
    # By exact type: a subclass has a forward of its own. A Sequential around one module is a wrapper, not a list.
    min_layers = {nn.ModuleList: 1, nn.Sequential: 2}.get(type(module), 0)
    layers = [child for child in module.children() if min_layers and any(True for _ in child.parameters())]
    return 0 < min_layers <= len(layers) and all(list(layer.children()) for layer in layers)


def _kind(parameters: Iterable[nn.Parameter]) -> UnitKind:
    return UnitKind.of(p.requires_grad for p in parameters)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def contains(outer: Sequence[str], inner: Sequence[str]) -> bool:
    """Return True if one of the inner modules is inside one of the outer modules."""
    for a in outer:
        for b in inner:
            if a != b and (not a or b.startswith(f"{a}.")):
                return True
    return False


def outermost(modules: list[str]) -> list[str]:
    """Return the modules that are inside no other of them."""
    return [name for name in modules if not contains(modules, [name])]


def owning_group(param_name: str, groups: list[list[str]]) -> int | None:
    """Return the index of the group that gathers a parameter: the innermost module around it. None for the root."""
    owners: dict[str, int] = {}
    for index, modules in enumerate(groups):
        owners.update(dict.fromkeys(modules, index))
    return next((owners[module] for module in ancestors(param_name) if module in owners), None)


def owning_groups(param_names: Sequence[str], groups: list[list[str]]) -> set[int | None]:
    """Return the indices of the groups that gather these parameters; None stands for the root."""
    return {owning_group(name, groups) for name in param_names}


def wrap_order(groups: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
    """Return the order in which groups can be wrapped, as indices: each after the groups inside it.

    Also return the groups that have no place in it, because two of them are partly inside each other.
    """
    order: list[int] = []
    left = list(range(len(groups)))
    for _ in groups:  # each round places the groups that have none of those left inside them
        for i in list(left):
            if not any(contains(groups[i], groups[j]) for j in left if j != i):
                order.append(i)
                left.remove(i)
    return order, left


def inner_units_first(plan: WrapPlan) -> list[Unit]:
    """Return the sharded units, each after the units inside it: a wrapper takes the parameters that are left."""
    # The root comes last: it takes what no other unit holds, and starts their all-gathers.
    order, _ = wrap_order([unit.modules for unit in plan.sharded_units])
    return [plan.sharded_units[index] for index in order]


def join_tied(model: nn.Module, groups: list[list[str]], trace: Trace) -> list[list[str]]:
    """FSDP2: make one group of those that share a tied parameter, since one unit must gather it for all of them.

    If only the root's forward runs around one of its places, the root holds it: the table of T5, which both of its
    stacks call, is an example.
    """
    for names in tied_names(model, several_modules=True).values():
        owners = owning_groups(names, groups)
        if len(owners) == 1:
            continue
        callers: list[str] = []
        for name in names:
            if owning_group(name, groups) is None:  # in the root so far, although a module further inside may gather it
                # The innermost module around it whose forward runs; the root's does.
                callers.append(next(module for module in ancestors(name) if not module or trace.calls[module]))
        if "" in callers:
            # Every module around the parameter leaves its group, so that none but the root gathers it.
            apart = []
            for group in groups:
                apart.append([module for module in group if not contains([module], names)])
            groups = list(filter(None, apart))
        else:
            groups = _as_one(groups, owners, callers)
    # Those that are partly inside each other become one: no order wraps each after the groups inside it.
    _, tangled = wrap_order(groups)
    return _as_one(groups, tangled, []) if tangled else groups


def _as_one(groups: list[list[str]], joined: Collection[int | None], modules: list[str]) -> list[list[str]]:
    """Return the groups with those of the indices `joined`, and the modules, made into one."""
    together, apart = [], []
    for index, group in enumerate(groups):
        if index in joined:
            together += group
        else:
            apart.append(group)
    return [*apart, outermost(list(dict.fromkeys(together + modules)))]


def common_module(names: Sequence[str]) -> str:
    """Return the innermost module around all of these parameters or modules."""
    # Without the last key: the module that holds the parameter, or that is around the module.
    paths = [name.split(".")[:-1] for name in names]
    # os.path's function works on any sequences: here on lists of keys, not on letters.
    return ".".join(commonprefix(paths))
