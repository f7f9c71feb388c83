"""The table that `print(plan)` shows."""

from __future__ import annotations

import re
import textwrap

from ..core.plan import MAX_SINGLE_LINES, Unit, WrapPlan
from ..params import Backend
from ..params.numbers import WIDTH, count, size
from .items import WITHOUT_LOSS

ROW = "  {:<17} {:>6} {:>9} {:>8} {:>8} {:>8} {:>7} {:>8}"
COLUMNS = "unit\n" + ROW.format("kind policy", "params", "dtype", "held", "gathered", "reduced", "gathers", "sent")
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LEGEND = (
    "*: backward passes through (grad flow). dtype: at rest > in compute. held, gathered, reduced: bytes of a rank at "
    "rest, of the unit while it runs, and of its gradients. gathers: in forward + backward; ^: in backward ahead of "
    "need, while the unit after it runs. sent: bytes a rank sends in a step of one micro-step."
)


def plan_table(plan: WrapPlan) -> str:
    """Return a table of at most 80 columns: the name of each unit, in the order in which they run, above its figures.

    Totals and the lint's findings follow.
    """
    units = [unit for unit in plan.units if unit.params]
    mesh = str(plan.shard) if plan.replicate == 1 else f"{plan.replicate} x {plan.shard}"
    title = f"{plan.backend} on {plan.world_size} ranks ({mesh}), "
    if plan.backend is not Backend.DDP:  # which shards nothing
        title += f"{plan.fsdp.sharding_strategy}, "
    title += f"{plan.fsdp.auto_wrap_policy}: {len(units)} units"
    rule = "-" * WIDTH
    lines = [*textwrap.wrap(title, WIDTH), COLUMNS, rule]
    for alike in _share_lines(units):
        lines += _unit_lines(plan, alike)
    numel = trainable = at_rest = sent = 0
    for unit in units:
        numel += unit.numel
        trainable += unit.trainable_numel
        at_rest += unit.bytes_at_rest
        sent += plan.wire_bytes(unit)
    lines.append(rule)
    lines.append(ROW.format("total", count(numel), "", size(at_rest), "", "", "", size(sent)))
    legend = f"{count(trainable)} of {count(numel)} parameters train. {LEGEND}"
    if trainable and not plan.memory_events:
        legend += " Made without an example: modules are assumed to run in the order in which the model has them."
    if plan.without_loss:
        legend += f" Here {WITHOUT_LOSS}."
    lines += textwrap.wrap(legend, WIDTH)
    notes = [plan.why]
    for finding in plan.lint:
        notes.append(f"{finding.level}: {finding.message}")
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _share_lines(units: list[Unit]) -> list[list[Unit]]:
    """Return the units of each line: in a large plan, those that differ only in the numbers of their names."""
    lines: dict[tuple, list[Unit]] = {}
    for unit in units:
        name = unit.name
        if len(units) > MAX_SINGLE_LINES:
            name = re.sub(r"\d+", "*", name)
        figures = (unit.grad_flow, unit.gathers_backward, unit.bytes_at_rest, unit.unsharded_bytes)
        lines.setdefault((name, unit.kind, *figures), []).append(unit)
    return list(lines.values())


def _unit_lines(plan: WrapPlan, alike: list[Unit]) -> list[str]:
    unit, name = alike[0], alike[0].name
    if len(alike) > 1:
        name = f"{len(alike)} x " + re.sub(r"\d+", "*", name)
    if len(name) > WIDTH:
        # Names differ at their ends.
        name = "..." + name[-(WIDTH - 3) :]
    kind = str(unit.kind)
    if unit.frozen_policy:
        kind += f" {unit.frozen_policy}"
        if unit.grad_flow:
            kind += "*"
    at_rest = _shown_dtype(unit)
    computed = SHORT_DTYPES.get(unit.compute_dtype, unit.compute_dtype) or at_rest
    if any(p.num_weights is not None for p in unit.params):
        at_rest = str(plan.fsdp.frozen_dtype)
    dtype = f"{at_rest}>{computed}"
    gathered = size(unit.unsharded_bytes) if unit.gathers_forward else "-"
    reduced = size(unit.reduced_bytes) if unit.reduced_bytes else "-"
    gathers = f"{unit.gathers_forward}+{unit.gathers_backward}"
    if unit in plan.prefetched_in_backward.values():
        gathers += "^"
    held, sent = size(unit.bytes_at_rest), size(plan.wire_bytes(unit))
    return [name, ROW.format(kind, count(unit.numel), dtype, held, gathered, reduced, gathers, sent)]


def _shown_dtype(unit: Unit) -> str:
    """Return the dtype of a unit's parameters at rest; "mix" if there are several."""
    dtypes = {SHORT_DTYPES.get(p.dtype, p.dtype) for p in unit.params if p.is_floating or p.num_weights is None}
    return dtypes.pop() if len(dtypes) == 1 else "mix"
