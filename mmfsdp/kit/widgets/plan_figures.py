"""A plan in figures: those that plans are compared by, with their change since a pinned plan; findings; every unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ...core.plan import WrapPlan
from ...params.in_words import count, size
from ...predict import Estimate
from .markup import note, table

SAME_SHARE = 0.005
"""A change of less than this part of a figure says nothing about a choice."""


@dataclass(frozen=True)
class Figure:
    """A number of bytes of one rank, or of seconds."""

    nbytes: float
    label: str
    pinned: float | None = None
    """The same figure of the pinned plan."""

    @property
    def change(self) -> str:
        """The change since the pinned plan: +54 %, × 12 from ten times on, same; empty without one."""
        if self.pinned is None:
            return ""
        if self.kind == "same":
            return "same"
        if not self.pinned:
            return "from 0 B"
        if self.nbytes >= 10 * self.pinned:
            return f"× {self.nbytes / self.pinned:,.0f}"
        share = 100 * (self.nbytes / self.pinned - 1)
        digits = 0 if abs(share) >= 0.95 else 1
        return f"{share:+.{digits}f} %".replace("-", "−")

    @property
    def kind(self) -> str:
        """Return more, less or same, which is less than SAME_SHARE apart; empty without a pinned plan."""
        if self.pinned is None:
            return ""
        if abs(self.nbytes - self.pinned) < SAME_SHARE * (self.pinned or 1):
            return "same"
        return "more" if self.nbytes > self.pinned else "less"


def plan_figures(
    plan: WrapPlan,
    cost: Estimate,
    *,
    pinned: tuple[WrapPlan, Estimate] | None = None,
    ran: tuple[int, int | None] | None = None,
) -> list[Figure]:
    """Return what a rank sends in a step, its weights at rest, the most without activations, and the peaks.

    pinned: another plan with its cost. ran: after a run, the peak predicted for the largest batch that ran, and the
    measured one. Two peaks are named: the plan's is of a batch of the longest texts, which may not occur; the other is
    of a batch of the data, before the run one of the first, after it the largest that ran.
    """
    other_plan, other = pinned if pinned else (None, None)
    figures = [
        Figure(cost.wire_bytes, "sent by each rank in a step", other.wire_bytes if other else None),
        Figure(
            plan.bytes_at_rest, "weights on each rank between steps", other_plan.bytes_at_rest if other_plan else None
        ),
        Figure(cost.memory_bytes, "peak memory without activations", other.memory_bytes if other else None),
    ]
    if cost.peak_bytes is not None:
        activations = cost.peak.activations if cost.peak else 0
        label = f"peak memory, if all texts have the maximum length; {size(activations)} of it activations"
        figures.append(Figure(cost.peak_bytes, label, other.peak_bytes if other else None))
    if ran:
        predicted, measured = ran
        label = "predicted peak memory of the largest batch that ran"
        if measured is not None:
            label += f"; measured {size(measured)}"
        figures.append(Figure(predicted, label))
    elif cost.batch_peak_bytes is not None:
        before = other.batch_peak_bytes if other else None
        figures.append(Figure(cost.batch_peak_bytes, f"peak memory of {cost.batch}", before))
    return figures


def figures_html(figures: Sequence[Figure]) -> str:
    """Return figures side by side, each with its change and label."""
    cells = ""
    for figure in figures:
        change = ""
        if figure.change:
            change = f' <span class="mm-{figure.kind}">{escape(figure.change)}</span>'
        cells += f"<div><b>{escape(size(figure.nbytes))}{change}</b>{escape(figure.label)}</div>"
    return f'<div class="mm-figures mm-plan-figures">{cells}</div>'


def findings(plan: WrapPlan) -> str:
    """Return what the lint found, and what AUTO chose."""
    html = ""
    for finding in plan.lint:
        kind = "quiet" if finding.level == "note" else finding.level
        html += note(f"{finding.level}: {finding.message}", kind)
    return html + (note(plan.why) if plan.why else "")


def unit_table(plan: WrapPlan) -> str:
    """Return every unit with its parameters, bytes and traffic."""
    head = ["unit", "kind", "policy", "parameters", "at rest", "unsharded", "all-gathers", "reduced"]
    rows: list[list[object]] = []
    for unit in plan.units:
        nbytes = (unit.bytes_at_rest, unit.unsharded_bytes, unit.reduced_bytes)
        at_rest, unsharded, reduced = [size(value) if value else "–" for value in nbytes]
        gathers = f"{unit.gathers_forward} + {unit.gathers_backward}"
        policy = unit.frozen_policy or ""
        rows.append([unit.name, unit.kind, policy, count(unit.numel), at_rest, unsharded, gathers, reduced])
    about = "at rest: per rank. all-gathers: in forward + backward. reduced: gradients summed over ranks."
    return table(head, rows) + note(about)
