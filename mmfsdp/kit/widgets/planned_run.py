"""Parameters with their plan and its cost, as the cockpit shows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...core.plan import WrapPlan
from ...params import RunParams
from ...predict import Estimate
from ...predict.timeline import Timeline
from .pictures.plan_pictures import NO_EXAMPLE, timeline_of

COUNTING = "One step on a rank: its activations are being counted."


@dataclass(frozen=True)
class PlannedRun:
    """Parameters, their plan and its cost."""

    params: RunParams
    plan: WrapPlan
    cost: Estimate
    rates: str = ""
    """The learning rates by part in a line."""
    counting: bool = False
    """Its activations are being counted."""

    @cached_property
    def timeline(self) -> Timeline | None:
        """One step of a rank; None without an example."""
        return timeline_of(self.params, self.plan)

    @property
    def missing(self) -> str:
        """The reason why there is no timeline, in words."""
        return COUNTING if self.counting else NO_EXAMPLE
