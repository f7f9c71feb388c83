"""Traces of a run at several sizes, and what is read off the straight lines through two of them."""

from __future__ import annotations

from math import inf

from ...core.plan import WrapPlan
from ...core.quantize import quantized_copy
from ...params import ParamError, RunParams
from ...params.run import with_cluster
from ...params.variables import with_variables
from ...predict import Estimate, Machine
from ...predict.larger_units import with_example
from ...predict.memory_events import Recording, with_recording
from ...predict.work import Work
from ..models.kinds import kind_of
from ..run.rank_count import with_ranks
from .fit_search import search
from .fit_sizes import Size
from .prepare import cost_of, kept_with_cache, plan_run, planned_train

MAX_GROWTH = 3
"""Times as many operators as the first trace's that a step may have to be traced. Most steps have hardly more operators
for a larger batch. Qwen2.5-VL's vision encoder calls attention for each window of each picture, and LLaVA slices each
picture's features out of the batch's, so that a trace of a large batch may take minutes; its peak is read off the lines
of two smaller ones."""


class RunPlans:
    """Plan one run again and again; its model is built once, and what was traced is kept."""

    def __init__(self, params: RunParams, machine: Machine) -> None:
        params = with_ranks(with_variables(params))
        self.params = params.change(launch=with_cluster(params.launch))
        self.machine = machine
        self.model, self.processor, self.cache = kept_with_cache(self.params)

    def planned(self, params: RunParams) -> tuple[WrapPlan, Estimate]:
        """Return the plan of the run with other choices, and its cost. Raises ParamError where there is none."""
        example = kind_of(params.model).example(self.model, params, self.processor)
        if example is None:
            words = "the model's inputs are not known without its data; set model.picture, or give its processor"
            raise ParamError("fit", f"{words}'s folder as model.name")
        plan = plan_run(self.model, params, example, self.cache)
        plan.check()
        if not plan.memory_events:
            model = quantized_copy(self.model, params.fsdp)
            plan = with_example(model, plan, example, self.cache, planned_train(params))
        return plan, cost_of(plan, params)

    def room(self, peak: int) -> float:
        """Return the bytes of a GPU that a peak leaves free; negative if it does not fit."""
        return self.machine.capacity - self.machine.needed_bytes(peak)


class Traces:
    """Peaks of a run over one size."""

    def __init__(self, plans: RunPlans, size: Size) -> None:
        self.plans, self.size = plans, size
        self.plan: WrapPlan | None = None
        # By steps of the size.
        self.recordings: dict[int, Recording] = {}
        """Of what was traced."""
        self.peaks: dict[int, int] = {}
        """Bytes."""
        self.why_not: dict[int, str] = {}
        """The mistake that a step of this size is."""

    def room(self, n: int) -> float:
        """Return the bytes that a step of this size leaves free; infinite where there is none, as `search` wants."""
        try:
            if self.is_quick(n):
                self.trace(n)
            else:
                self.peaks[n] = self._peak(self.on_lines(n, *self._quick_pair(n)))
        except ParamError as error:
            self.why_not[n] = str(error)
            return inf if self.size.name == "length" else -inf  # too short for the picture, or too long for the text
        return self.plans.room(self.peaks[n])

    def guess(self) -> int:
        """Return the largest size that fits, if all events lie on the lines through those of two traces.

        They are the two that leave least room or lack least; 1 before there are two.
        """
        nearest = sorted(self.recordings, key=lambda n: abs(self.plans.room(self.peaks[n])))[:2]
        if len(nearest) < 2:
            return 1
        low, high = sorted(nearest)
        fits, _ = search(lambda n: self.plans.room(self._peak(self.on_lines(n, low, high))), high)
        return fits

    def first_plan(self) -> WrapPlan:
        """Return the plan with the units of the first trace, which are those of all: the order of modules stays."""
        if self.plan is None:
            params = self.plans.params
            if self.size.name == "batch":  # quicker to trace
                params = params.change(**{"train.batch_size": self.size.first})
            self.plan, _ = self.plans.planned(params)
        return self.plan

    def trace(self, n: int) -> Recording:
        """Return the recording of a step on fake tensors. Raises ParamError where there are no inputs."""
        if n not in self.recordings:
            inputs = self.size.inputs(n)
            assert inputs is not None  # `planned` has raised
            model = quantized_copy(self.plans.model, self.plans.params.fsdp)
            self.recordings[n] = self.plans.cache.record(model, self.first_plan(), inputs)
            self.peaks[n] = self._peak(self.recordings[n])
        return self.recordings[n]

    def is_quick(self, n: int) -> bool:
        """Return whether a step of this size has few enough operators to be traced."""
        if len(self.recordings) < 2 or not self.size.is_linear:
            return True
        operators = {steps: recording.operators for steps, recording in self.recordings.items()}
        least, largest = min(operators), max(operators)
        slope = (operators[largest] - operators[least]) / (largest - least)
        return operators[least] + slope * (n - least) <= MAX_GROWTH * operators[least]

    def on_lines(self, n: int, low: int, high: int) -> Recording:
        """Return a recording whose events lie on the straight lines through those of two traces, without work."""
        events = []
        first, second = self.trace(low), self.trace(high)
        for before, after in zip(first.memory_events, second.memory_events, strict=True):
            values = {}
            for name in ("peak", "peak_without_grads", "allocated", "grads"):
                a, b = getattr(before, name), getattr(after, name)
                values[name] = b + (b - a) * (n - high) // (high - low)
            events.append(after._replace(**values))
        return second._replace(memory_events=tuple(events), work=Work())

    def _quick_pair(self, n: int) -> tuple[int, int]:
        """Return the largest size that is traced quickly, by doubling, and half of it."""
        largest = max(self.recordings)
        while 2 * largest < n and self.is_quick(2 * largest):
            largest *= 2
        return max(1, largest // 2), largest

    def _peak(self, recording: Recording) -> int:
        peak = cost_of(with_recording(self.first_plan(), recording), self.plans.params).peak_bytes
        assert peak is not None
        return peak
