"""`mmfsdp plan`, and what of it `run`, `launch` and `resume` show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..loading import collector_paused
from ..params import RunParams
from .words import parse

if TYPE_CHECKING:
    from ..plan import WrapPlan


def plan(argv: list[str]) -> int:
    """Print the plan and what it will cost; on a machine, how long a step takes and which mesh is best.

    Returns 1 where the lint found errors.
    """
    from ..params.flags import number_taken, taken

    machine, ranks = taken(argv, "--machine"), number_taken(argv, "--world-size", "ranks")
    params = parse("plan", argv)
    if ranks:
        params = params.change(**{"launch.ranks": ranks})
    found = print_plan(params)
    if machine and not found.refused:
        print_times(found, params, *machine)
    return int(any(f.level == "error" for f in found.lint))


def print_times(plan: WrapPlan, params: RunParams, machine: str) -> None:
    """How long a step takes on one of estimate's machines, the cluster profile's figures first, and every mesh."""
    from ..estimate import machine_of, mesh_table, meshes, step_time
    from ..params import Backend
    from ..params.cluster import read_cluster

    profile = read_cluster(params.launch.cluster).machine if params.launch.cluster else {}
    given = machine_of(machine, profile)
    print(step_time(plan, params.train, machine=given))
    if plan.backend is not Backend.DDP and plan.world_size > 1:
        print(mesh_table(meshes(plan, params.train, machine=given), given))


def print_plan(params: RunParams) -> WrapPlan:
    """Print the plan and its cost, and return it. Raises ParamError for what cannot be planned."""
    with collector_paused(for_good=True):
        from ..preview import preview

        plan, cost = preview(params)
    print(plan)
    print(cost)
    return plan


def check_plan(params: RunParams) -> None:
    """Print what the lint warns of. Raises ParamError for its errors: they stop a launch."""
    with collector_paused(for_good=True):
        from ..preview import check

        found = check(params).lint
    for finding in found:
        print(f"{finding.level}: {finding.message}", file=sys.stderr)
