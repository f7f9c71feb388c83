"""`mmfsdp bench redraw`: seconds from a changed choice to the plan's page, as a notebook shows it."""

from __future__ import annotations

import time
from typing import Any

from ...params import load
from ...predict import LAPTOP
from ..run.state import text_table
from ..train.prepare import previews


def bench_redraw(*, preset: str = "openflamingo_9b", ranks: int = 64) -> dict[str, Any]:
    """Plan and draw a preset, then again after each change of policy, ranks and backend. Starts no ranks.

    The first row builds the model without weights, records a step of it, and traces what AUTO needs, which the cockpit
    does while a person looks at the first plan; DDP needs a recording of its own.
    """
    from ..widgets.plan_page import PlannedRun, plan_page

    half = max(1, ranks // 2)
    changes: dict[str, dict[str, Any]] = {
        "first plan": {},
        "KEEP": {"fsdp.frozen_policy": "KEEP"},
        "REPLICATE": {"fsdp.frozen_policy": "REPLICATE"},
        f"SHARD on {half} ranks": {"launch.ranks": half},
        "DDP, first": {"fsdp.backend": "DDP"},
        f"DDP on {half} ranks": {"fsdp.backend": "DDP", "launch.ranks": half},
        "SHARD": {},
        "AUTO, first": {"fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 10.0},
        "AUTO, 12 GiB": {"fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 12.0},
    }
    params = load(preset).change(**{"launch.ranks": ranks})
    rows, pinned = [], None
    for name, change in changes.items():
        changed = params.change(**change)
        begin = time.perf_counter()
        *_, (plan, cost) = previews(changed, for_auto=True)
        planned = PlannedRun(changed, plan, cost)
        page = plan_page(planned, machine=LAPTOP, pinned=pinned)
        seconds = time.perf_counter() - begin
        rows.append({"change": name, "seconds": seconds, "page_bytes": len(page.encode()), "units": len(plan.units)})
        pinned = pinned or planned
    return {"title": f"{preset} on {ranks} ranks, from a choice to the page of its plan", "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [("", "s", "page kB", "units")]
    for row in result["rows"]:
        lines.append((row["change"], f"{row['seconds']:.2f}", f"{row['page_bytes'] / 1e3:.0f}", str(row["units"])))
    return f"{result['title']}\n{text_table(lines)}"
