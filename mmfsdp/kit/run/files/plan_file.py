"""plan.json: the plan of a run and its cost; with `train.freeze_from`, those of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .folder import PathLike, read_json

PLAN_FILE = "plan.json"
BEGIN, LATER = "begin", "later"
"""Keys of plan.json: the steps that are done when a later phase begins, and the list of the later phases."""


def read_plan(folder: PathLike, *, done: int = 0) -> dict[str, Any]:
    """Return the plan of a run after so many steps, with its cost; {} if the run has none."""
    return planned_after(read_json(f"{folder}/{PLAN_FILE}") or {}, done)


def plans_by_begin(values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the plans of all phases by the steps that are done when a phase begins, in their order.

    values: what plan.json holds; somebody else may have written it.
    """
    if not values:
        return {}
    first = {key: value for key, value in values.items() if key not in (BEGIN, LATER)}
    plans = {values.get(BEGIN, 0): first}
    later = values.get(LATER)
    for each in later if isinstance(later, list) else ():
        if isinstance(each, dict):
            plans[each.get(BEGIN, 0)] = {key: value for key, value in each.items() if key != BEGIN}
    return dict(sorted((begin, plan) for begin, plan in plans.items() if type(begin) is int))


def plan_file_of(plans: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what plan.json holds, from the plans of the phases by their beginning."""
    in_order = [{**plans[begin], BEGIN: begin} if begin else dict(plans[begin]) for begin in sorted(plans)]
    first, later = in_order[0], in_order[1:]
    return {**first, LATER: later} if later else first


def planned_after(values: Mapping[str, Any], done: int) -> dict[str, Any]:
    """Return the plan of the phase in which a run is after so many steps; {} without one.

    values: what plan.json holds.
    """
    plans = plans_by_begin(values)
    begun = [plan for begin, plan in plans.items() if begin <= done]
    return begun[-1] if begun else next(iter(plans.values()), {})
