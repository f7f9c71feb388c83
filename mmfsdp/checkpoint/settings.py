"""Settings in a checkpoint: of an optimizer's parameter groups, such as lr and betas, and a schedule's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.collectives import compute_device
from ..core.names import plain_name, planned_params
from ..core.reshard import reshard
from ..params import ParamError
from .plain import NotPlain, from_json, to_json

NO_SETTINGS = ("params", "param_names")
"""Keys of a group that are its parameters."""


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return the names, before wrapping, of each parameter of a wrapped model: several if it is a flat parameter."""
    reshard(model)  # FSDP2 lists whole tensors while a unit is gathered; an optimizer has the shards
    names_of: dict[torch.Tensor, list[str]] = {}
    for name, p in model.named_parameters():
        planned = planned_params(model, [name])
        names_of[p] = [each.name for each in planned] or [plain_name(name, model)]
    return names_of


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names, before wrapping, of the parameters in each group of a wrapped model's optimizer."""
    names_of = parameter_names(model)
    groups = []
    for group in optimizer.param_groups:
        in_group: list[str] = []
        for p in group["params"]:
            in_group += names_of.get(p, [])
        groups.append(in_group)
    return groups


def group_settings(model: nn.Module, optimizer: Optimizer) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the names and settings of each group as JSON, and a line about each setting that JSON cannot hold."""
    groups, lines = [], []
    for number, names in enumerate(group_names(model, optimizer)):
        settings = {}
        for key, value in optimizer.param_groups[number].items():
            try:
                if key not in NO_SETTINGS:
                    settings[key] = to_json(value)
            except NotPlain as error:
                words = f"{key!r} of {describe(number, names)} is {error}, which a checkpoint cannot hold; "
                lines.append(f"{words}set it yourself after a resume")
        groups.append({"names": names, "settings": settings})
    return groups, lines


def saved_numbers(names_of_groups: Sequence[list[str]], saved: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return for each group of an optimizer the numbers of the saved groups that had its parameters.

    A group without parameters is matched with a saved one without parameters, in order.
    """
    number_of = {name: number for number, group in enumerate(saved) for name in group["names"]}
    without_parameters = iter([number for number, group in enumerate(saved) if not group["names"]])
    matched = []
    for names in names_of_groups:
        numbers = sorted({number_of[name] for name in names if name in number_of})
        if not names:
            numbers = [number for number in (next(without_parameters, None),) if number is not None]
        matched.append(numbers)
    return matched


def restore_settings(model: nn.Module, optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> list[str]:
    """Set the settings of an optimizer's groups to the saved ones, as torch's `load_state_dict` does.

    A group gets those that its parameters had, whatever the order of the groups. Return a line about each that was not
    the same before, and about each group that was not saved. Raises ParamError if the parameters of a group had
    different settings; then nothing is changed.
    """
    names_of_groups = group_names(model, optimizer)
    lines: list[str] = []
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for number, numbers in enumerate(saved_numbers(names_of_groups, saved)):
        named, group = describe(number, names_of_groups[number]), optimizer.param_groups[number]
        if not numbers:
            lines.append(f"{named} is not in the checkpoint: its settings stay as they are")
            continue
        check_same_settings(names_of_groups[number], named, [saved[each] for each in numbers])
        for key, value in saved[numbers[0]]["settings"].items():
            if key not in group or not is_same(group[key], value):
                before = group.get(key, "unset")
                lines.append(f"{key} of {named} is {from_json(value)}, as saved; before the resume it was {before}")
                changes.append((group, key, value))
    device = compute_device(model)
    for group, key, value in changes:
        set_value(group, key, from_json(value, device))
    for group, key, value in changes:
        if not is_same(group[key], value):  # groups that now share a tensor, and did not when they were saved
            group[key] = from_json(value, device)
    return lines


@torch.no_grad()
def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting. A tensor is filled: groups that were made with one lr share it, and so does a CUDA graph."""
    current: Any = group.get(key)
    both_tensors = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
    if both_tensors and (current.dtype, current.shape) == (value.dtype, value.shape):
        current.copy_(value)
    else:
        group[key] = value


def check_same_settings(names: list[str], named: str, sources: Sequence[dict[str, Any]]) -> None:
    """Raise ParamError if the saved groups, from which the parameters of one group come, have different settings."""
    first = sources[0]
    for other in sources[1:]:
        for key in first["settings"].keys() | other["settings"].keys():
            of_first, of_other = first["settings"].get(key), other["settings"].get(key)
            if of_first != of_other:
                pair = [next(name for name in names if name in source["names"]) for source in (first, other)]
                raise ParamError(
                    "optimizer",
                    f"{named} has {pair[0]} and {pair[1]}, which were in two groups when the checkpoint was saved, "
                    f"with {key} {from_json(of_first)} and {from_json(of_other)}; give the optimizer the groups of the "
                    "run that saved it, or resume with settings=False to keep the settings that it has",
                )


def is_same(value: Any, saved: Any) -> bool:
    """Return True if a value is the saved one, given as JSON."""
    try:
        return bool(to_json(value) == saved)
    except NotPlain:
        return False


def describe(number: int, names: Sequence[str]) -> str:
    """Return a group's number and what is in it."""
    if not names:
        return f"group {number} (no parameters)"
    return f"group {number} ({len(names)} parameters, such as {names[0]})"


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """Return a schedule's class and state as JSON. Raises ParamError naming what JSON cannot hold."""
    state = {}
    for key, value in schedule.state_dict().items():
        try:
            state[key] = to_json(value)
        except NotPlain as error:
            words = f"the state of {type(schedule).__name__} has {key!r}, {error}, and nothing is pickled; "
            fix = "leave it out of its state_dict(), and save what it needs in `record`"
            raise ParamError("schedule", words + fix) from None
    return {"class": type(schedule).__name__, "state": state}


def check_schedule(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, marker: Mapping[str, Any]) -> None:
    """Raise ParamError if a saved schedule is of another class, or of groups in another order: torch takes any state.

    A schedule keeps its values by the numbers of the groups.
    """
    name, saved_name, saved = type(schedule).__name__, marker["schedule_state"]["class"], marker["groups"]
    if name != saved_name:
        words = f"is a {name}, and the checkpoint has the state of a {saved_name}; give one of the same class, or "
        raise ParamError("schedule", words + "leave it out to begin a new schedule")
    if saved is None:
        return
    names_of_groups = group_names(model, optimizer)
    for number, numbers in enumerate(saved_numbers(names_of_groups, saved)):
        if numbers != [number] and (numbers or len(names_of_groups) != len(saved)):
            before = f"was group {numbers[0]}" if numbers else "is not in the checkpoint"
            words = f"{describe(number, names_of_groups[number])} of the optimizer {before}; make the groups in the "
            raise ParamError("schedule", words + "order of the run that saved them, or leave the schedule out")


def restore_schedule(model: nn.Module, schedule: LRScheduler, saved: dict[str, Any]) -> None:
    """Set a schedule's state to the saved one."""
    device = compute_device(model)
    schedule.load_state_dict({key: from_json(value, device) for key, value in saved["state"].items()})
