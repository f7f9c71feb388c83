"""Which group fetches each parameter; groups that share a tied parameter become one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .trace import Trace, tied_names


def home(param_name: str, groups: list[list[str]]) -> int | None:
    """Index of the group that fetches a parameter: the one with the innermost module around it; None is the root."""
    parts = param_name.split(".")[:-1]
    holders = {module: i for i, modules in enumerate(groups) for module in modules}
    for depth in range(len(parts), 0, -1):
        if (name := ".".join(parts[:depth])) in holders:
            return holders[name]
    return None


def join_tied(model: nn.Module, groups: list[list[str]], seen: Trace) -> list[list[str]]:
    """FSDP2: one unit of several modules fetches what they share, the root's where only its forward runs around one of
    them, as around T5's table, which others call. A module under two names goes by the first."""
    first = {id(module): name for name, module in model.named_modules()}
    named = [list(dict.fromkeys(first[id(model.get_submodule(m))] for m in group)) for group in groups]
    taken: set[str] = set()
    groups = []
    for group in named:
        groups += [mine] if (mine := [m for m in group if m not in taken]) else []
        taken |= set(group)
    for names in tied_names(model, apart=True).values():
        homes = {home(name, groups) for name in names}
        if len(homes) == 1:
            continue
        if any(home(name, groups) is None and not _runner(model, name, seen) for name in names):
            groups = [left for g in groups if (left := [m for m in g if not any(n.startswith(f"{m}.") for n in names)])]
            continue  # only the root's forward runs around all of its places
        joined = sorted(i for i in homes if i is not None)
        modules = [m for i in joined for m in groups[i]]
        modules += [o for n in names if home(n, groups) is None and (o := _runner(model, n, seen)) and o not in modules]
        groups = [g for i, g in enumerate(groups) if i not in joined]
        groups.append(outermost(modules))
    return _untangled(groups)


def inner_first(groups: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
    """The order in which groups can be wrapped, as indices: each after those inside it; and those for which there is
    none, since each is in part inside another."""
    order: list[int] = []
    left = list(range(len(groups)))
    while free := [i for i in left if not any(_holds(groups[i], groups[j]) for j in left if j != i)]:
        order += free
        left = [i for i in left if i not in free]
    return order, left


def outermost(modules: list[str]) -> list[str]:
    """The modules that are inside no other of them."""
    return [m for m in modules if not any(m.startswith(f"{other}.") for other in modules)]


def _holds(outer: Sequence[str], inner: Sequence[str]) -> bool:
    return any(a != b and (not a or b.startswith(f"{a}.")) for a in outer for b in inner)


def _untangled(groups: list[list[str]]) -> list[list[str]]:
    """The groups, of which two that are in part inside each other are one."""
    while left := inner_first(groups)[1]:
        one, other = next(
            (
                (i, j)
                for i in left
                for j in left
                if i < j and _holds(groups[i], groups[j]) and _holds(groups[j], groups[i])
            ),
            (left[0], left[1]),
        )
        joined = outermost(groups[one] + groups[other])
        groups = [g for i, g in enumerate(groups) if i not in (one, other)] + [joined]
    return groups


def split_for_fsdp1(model: nn.Module, groups: list[list[str]]) -> tuple[list[list[str]], set[str]]:
    """FSDP1: a unit is one module. Also the names of tied frozen parameters that no single unit can hold.

    A tied trainable parameter's unit is the innermost module around all its places.
    """
    groups = [[module] for modules in groups for module in modules]
    whole: set[str] = set()
    for first, names in tied_names(model).items():
        if len({home(name, groups) for name in names}) == 1:
            continue
        if not model.get_parameter(first).requires_grad:
            whole.update(names)
            continue
        around = _common([name.split(".")[:-1] for name in names])
        inside = {i for name in names if (i := home(name, groups)) is not None}
        groups = [g for i, g in enumerate(groups) if i not in inside or ".".join(around).startswith(g[0])]
        if around and [".".join(around)] not in groups:
            groups.append([".".join(around)])
    return groups, whole


def beside_trainable(model: nn.Module, groups: list[list[str]], whole: set[str]) -> set[str]:
    """Names of frozen parameters in mixed units: FSDP1 makes all of a unit one parameter, which trains."""
    named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if n not in whole]
    trained = {home(n, groups) for n, p in named if p.requires_grad}
    return {n for n, p in named if p.is_floating_point() and not p.requires_grad and home(n, groups) in trained}


def _runner(model: nn.Module, param_name: str, seen: Trace) -> str:
    """The innermost module around a parameter whose forward runs; empty where only the root's does."""
    name = param_name.rpartition(".")[0]
    while name and not seen.runs(name, model.get_submodule(name)):
        name = name.rpartition(".")[0]
    return name


def _common(paths: list[list[str]]) -> list[str]:
    together = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        together.append(parts[0])
    return together
