"""What shows slips that the toy models do not: a unit of two modules, a module that hands on its input, and the rows of
all-gathers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mmfsdp.kit.train.meters import Collectives

from .proof import bytes_held

Shard = Callable[..., Any]
WIDTH = 4


class HandsOn(nn.Module):
    """Returns its input, too: backward completes that one's gradient only after it has left the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, WIDTH) -> the same, twice."""
        return self.layer(x), x


class TwoOutputs(nn.Module):
    """Returns two tensors, of which the loss uses the second only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, WIDTH) -> the same, twice."""
        return self.layer(2 * x), self.layer(x)


class ByKeyword(nn.Module):
    """Is called with a keyword, as the layers of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) -> the same."""
        return self.layer(hidden_states)


class Skips(nn.Module):
    """Does not use its parameters, as a cross-attention does in a batch without a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) -> the same, doubled."""
        return 2 * x


SAID = {
    "two modules": "a unit of two modules",
    "hands on": "a module that hands on its input",
    "second": "a module of whose two outputs the second is used",
    "keyword": "a module that is called with a keyword",
    "skips": "a unit that trains and is not used",
}


def small_units(shard: Shard, *, frozen: bool = False) -> dict[str, Any]:
    """Run each of the units once, behind a unit that trains, with the course's `shard`; print what happened.

    Args:
        shard: The course's function of this name.
        frozen: Freeze them, and add one that trains and is not used, which only lesson 03 can release.

    Returns:
        For each case in SAID: "gathered", {"forward": times, "backward": times} of both units; "held", the bytes of
        whole parameters after backward; "failed", an error's text, which is empty if there was none.
    """
    cases = {"two modules": [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], "hands on": [HandsOn()]}
    cases |= {"second": [TwoOutputs()], "keyword": [ByKeyword()]}
    if frozen:
        for modules in cases.values():
            for module in modules:
                module.requires_grad_(False)
        cases["skips"] = [Skips()]
    found = {}
    for name, modules in cases.items():
        first = nn.Linear(WIDTH, WIDTH)
        units = [shard(first), shard(*modules)]
        found[name] = {"failed": "", "gathered": {}}
        with Collectives() as counted:
            try:
                forward(first, modules).backward()
            except (AssertionError, RuntimeError) as error:
                found[name]["failed"] = str(error)
        for row in counted.rows():
            if row.kind == "all-gather":
                found[name]["gathered"][row.phase] = row.count
        found[name]["held"] = bytes_held(units)
        print(SAID[name], end=": ")
        print(found[name]["failed"] or f"all-gathers with the unit before: {found[name]['gathered']}")
    return found


def rows_of_gathers(file: ModuleType) -> list[int]:
    """Return a list to which each all-gather of the course's file adds the row of its output that it sends.

    -1 stands for memory of its own, which is right as well. Another rank's row is not: gloo gives the right values all
    the same, but NCCL allows an overlap of input and output in the rank's own row only.
    """
    rows = []
    all_gather = file.all_gather

    def noted(out: torch.Tensor, mine: torch.Tensor) -> Any:
        is_row = mine.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        rows.append((mine.data_ptr() - out.data_ptr()) // mine.nbytes if is_row else -1)
        return all_gather(out, mine)

    file.all_gather = noted  # type: ignore[attr-defined]
    return rows


def values_of(layer: nn.Module) -> torch.Tensor:
    """Return the values of a layer's parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def forward(first: nn.Module, modules: list[nn.Module]) -> torch.Tensor:
    """Return the sum of all outputs that are used."""
    x = first(torch.ones(1, WIDTH))
    for module in modules:
        x = module(hidden_states=x) if isinstance(module, ByKeyword) else module(x)
    if isinstance(modules[0], TwoOutputs):
        return x[1].sum()
    return torch.stack(x).sum() if isinstance(x, tuple) else x.sum()


def hint_for_small_units(found: dict[str, Any]) -> str | None:
    """Return the hint for what `small_units` found."""
    two, handed = found["two modules"], found["hands on"]
    if two["failed"]:
        return f"A unit of two modules fails: {two['failed']}."
    times = two["gathered"]
    if times.get("forward") != 2:
        return (
            f"A unit of two modules and the one before it are gathered {times.get('forward', 0)} times in forward, in "
            "place of 2: release a unit after its last module only, `module is unit.modules[-1]`."
        )
    gathered = (
        f"A unit of two modules and the one before it are gathered {times.get('backward', 0)} times in backward, in "
        "place of 2"
    )
    if two["held"]:
        return (
            f"{gathered}, and {two['held']:,} bytes stay: its second module removed the hook that its first one had "
            "made. Remove the hook of the step before at the first module only, `module is unit.modules[0]`."
        )
    if times.get("backward") != 2:
        return (
            f"{gathered}: each of its modules made a hook, and the first of them ended the unit's backward too early. "
            "Make the hook only if there is none yet."
        )
    if handed["failed"]:
        return (
            "A module that returns its input beside its output fails in backward. The gradient of that input is "
            'complete only after the module: gather with the *first* gradient of the outputs, with `mode="any"`.'
        )
    if handed["held"]:
        return (
            "A module that returns its input beside its output is gathered again after its backward is over, since "
            f"each of its outputs gathers it, and {handed['held']:,} bytes stay. Gather with the *first* gradient of "
            'the outputs only: one hook for all of them, with `mode="any"`.'
        )
    second = found["second"]
    if second["failed"] or second["held"] or second["gathered"].get("backward") != 2:
        return (
            "A module with two outputs, of which only the second one gets a gradient, is not gathered in backward: "
            'wait for the first gradient of *any* output, with `mode="any"`, and not for that of the first output.'
        )
    skips = found.get("skips")
    if skips and (skips["failed"] or skips["held"]):
        return (
            f"A unit that trains and is not used in a step, as without a picture, keeps {skips['held']:,} bytes after "
            "backward: its parameters get no gradient. Wait for its inputs as well."
        )
    return None
