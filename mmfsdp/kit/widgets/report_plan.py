"""The parts of a report that tell what was trained, how and where: facts in words, and the plan with its pictures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from ...core.plan import WrapPlan
from ...params import Backend, TrainParams
from ...params.base import from_plain, leaves
from ...params.in_words import count, size
from ...predict import Estimate, estimate
from ...predict.memory import Memory
from ...predict.timeline import step_timeline
from ..run.files.plan_file import plans_by_begin
from ..run.files.run_record import RunRecord, replay_words
from ..run.launchers.registry import launcher_named
from .markup import note
from .pictures.plan_pictures import plan_pictures
from .plan_figures import figures_html, findings, plan_figures, unit_table

REPORT_WIDTH = 980
STEP_FIELDS = ("accumulation", "device")
"""Fields of TrainParams that the cost of a plan depends on."""


def facts(
    params: Mapping[str, Any],
    planned: Mapping[str, Any],
    record: RunRecord | None,
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Return model, policy, machine, data and steps of a run as lines of words; what is not known is left out."""
    values = leaves(dict(params))
    lines = {
        "model": _model(values, planned),
        "policy": _policy(values, planned),
        "machine": _machine(record, planned, rows),
        "data": _data(values),
        "training": _training(values),
    }
    html = ""
    for name, words in lines.items():
        if words:
            html += f"<dt>{name}</dt><dd>{escape(words)}</dd>"
    return f'<dl class="mm-facts">{html}</dl>' if html else ""


def _model(values: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    words = str(values.get("model.kind") or "")
    towers = []
    for tower in ("vision", "language"):
        for field in ("name", "config.model_type", "source"):
            if values.get(f"model.{tower}.{field}"):
                towers.append(f"{tower}: {str(values[f'model.{tower}.{field}'])[:60]}")
                break
    name = values.get("model.name") or values.get("model.build")
    if name:
        towers = [str(name)[:60]]
    if towers:
        words += f" ({', '.join(towers)})"
    if planned:
        words += f"; {_trainable(planned)} parameters train"
        for begin, later in list(plans_by_begin(planned).items())[1:]:
            words += f", from step {begin + 1} on {_trainable(later)}"
    return words


def _trainable(planned: Mapping[str, Any]) -> str:
    plan = WrapPlan.from_dict(planned["plan"])
    trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
    return f"{count(trainable)} of {count(numel)}"


def _policy(values: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    name = str(values.get("fsdp.backend") or "")
    if planned:  # the backend that runs: NO_SHARD, for example, is DDP
        name = str(WrapPlan.from_dict(planned["plan"]).backend)
    if not name:
        return ""
    parts = [name]
    # Another version may have written a backend that this one does not know.
    ignored = Backend(name).rules.ignores if name in list(Backend) else {}
    if "sharding_strategy" not in ignored:
        parts.append(str(values.get("fsdp.sharding_strategy")))
    if "frozen_policy" not in ignored:
        parts.append(f"frozen weights {values.get('fsdp.frozen_policy')}")
    parts.append(f"computed in {values.get('fsdp.mixed_precision') or 'fp32'}")
    if values.get("fsdp.frozen_dtype"):
        parts.append(f"frozen weights stored in {values['fsdp.frozen_dtype']}")
    if values.get("fsdp.activation_checkpointing") not in (None, "none"):
        parts.append(f"activation checkpointing: {values['fsdp.activation_checkpointing']}")
    return ", ".join(parts)


def _machine(record: RunRecord | None, planned: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if record is None:
        return ""
    words = "1 rank" if record.ranks == 1 else f"{record.ranks} ranks"
    if rows:  # only GPUs have an allocator that reserves
        words += " on a GPU each" if "reserved_bytes" in rows[-1] else " on CPUs"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    words += f", launched {started} from {record.host}"
    launcher = launcher_named(record.executor)
    if not launcher.has_ranks:
        words = words.partition(", launched")[0] + f", {replay_words(record.replay_of)}; played {started}"
    elif not launcher.here:
        words += f" by {record.executor}"
    versions = planned.get("versions") or {}
    return f"{words}; torch {versions['torch']}" if "torch" in versions else words


def _data(values: Mapping[str, Any]) -> str:
    source = values.get("data.source")
    path = values.get("data.path")
    more = values.get("data.more") or ()
    words = f"{source}, {str(path)[:80]}" if path else str(source or "")
    return f"{words}, and {len(more)} more" if more else words


def _training(values: Mapping[str, Any]) -> str:
    if not values.get("train.steps"):
        return ""
    words = f"{values['train.steps']} steps of {values.get('train.batch_size')} samples a rank"
    if values.get("train.accumulation", 1) != 1:
        words += f" x {values['train.accumulation']} micro-steps"
    return f"{words}, lr {values.get('train.lr')}"


def with_batch_of(planned: Mapping[str, Any], cost: Estimate) -> Estimate:
    """Return the cost of a plan with the peak of a batch of the data, as far as what plan.json holds has one."""
    values = planned.get("estimate") or {}
    if not values.get("batch_peak"):
        return cost
    return replace(cost, batch_peak=from_plain(Memory, values["batch_peak"]), batch=str(values.get("batch")))


def plan_sections(
    plans: Mapping[int, Mapping[str, Any]],
    params: Mapping[str, Any],
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Return what plan.json holds, phase by phase; empty without it. plans: by the steps that are done before a phase.

    Of the phases but the last, what a step sent stands beside the plan; the last one's is in a table of its own.
    """
    html = ""
    begins = list(plans)
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        if len(plans) > 1:
            html += f"<h3>From step {begin + 1} on</h3>"
        of_phase = [row for row in rows if begin < row.get("step", 0) and (end is None or row["step"] <= end)]
        if end is not None and of_phase:
            predicted = (plans[begin].get("estimate") or {}).get("wire_bytes", 0)
            measured = of_phase[-1].get("wire_bytes", 0)
            html += note(f"sent in a step: {size(measured)}, predicted {size(predicted)}")
        html += plan_section(plans[begin], params, result if end is None else {}, of_phase)
    return html


def plan_section(
    planned: Mapping[str, Any], params: Mapping[str, Any], result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    """Return a plan with its cost, as figures, pictures and a table.

    The peaks that were predicted for the longest batch and for the batches that ran are both named, with the measured.
    """
    plan = WrapPlan.from_dict(planned["plan"])
    values = params.get("train") or {}
    train = TrainParams.from_dict({name: values[name] for name in STEP_FIELDS if name in values})
    sources = 1 + len((params.get("data") or {}).get("more") or ())
    peak = result.get("peak")
    ran = None
    if peak:
        ran = peak["bytes"], rows[-1].get("memory_bytes") if rows else None
    cost = with_batch_of(planned, estimate(plan, train, sources=sources))
    html = figures_html(plan_figures(plan, cost, ran=ran))
    rates = planned.get("learning_rates")
    if isinstance(rates, str) and rates:
        html += f"<p>{escape(rates)}</p>"
    html += findings(plan) + plan_pictures(plan, step_timeline(plan, train, sources=sources), width=REPORT_WIDTH)
    return f"{html}<details><summary>every unit, with its bytes</summary>{unit_table(plan)}</details>"
