"""Traces of a run at several sizes, and what is read off straight lines through two of them."""

from __future__ import annotations

from math import inf

from ...core.fake_tensors import tensors_of
from ...core.plan import MemoryEvent, WrapPlan
from ...core.quantize import quantized_copy
from ...params import ParamError, RunParams
from ...params.run import with_cluster
from ...params.variables import with_variables
from ...predict import Estimate, Machine
from ...predict.larger_units import with_example
from ...predict.lines import Lines
from ...predict.memory_events import Recording, with_recording
from ..models.kinds import kind_of
from ..run.rank_count import with_ranks
from .fit_search import search
from .fit_sizes import Size
from .prepare import cost_of, kept_with_cache, plan_run, planned_train

QUICK_OPERATORS = 3_000
"""Operators of a step that is traced in about a second, so that its peak need not be read off lines."""
MAX_GROWTH = 1.5
"""Times as many operators as the first trace's that a step may have to be traced where its peak can be read off lines.
Qwen2.5-VL's vision encoder calls attention for each window of each picture, and LLaVA slices each picture's features
out of the batch's, so that a trace of a large batch may take minutes."""
MAX_INPUTS = 1 << 30
"""Bytes of the inputs of such a step. What depends on no parameter is computed with real values: SmolVLM looks for
tiles of zeros."""
MAX_PAIRS = 4
"""Pairs of traces that are tried for lines. Steps so small that the loss is computed in less than a whole piece are not
on the lines of larger ones."""


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
        self.lines: Lines | None = None
        """Those that a third trace confirmed; None before they are needed, and where all are traced."""
        self.sought_lines = False
        # By steps of the size.
        self.recordings: dict[int, Recording] = {}
        """Of what was traced."""
        self.peaks: dict[int, int] = {}
        """Bytes."""
        self.inputs_bytes: dict[int, int] = {}
        """Of inputs with values."""
        self.why_not: dict[int, str] = {}
        """The mistake that a step of this size is."""

    def room(self, n: int) -> float:
        """Return the bytes that a step of this size leaves free; infinite where there is none, as `search` wants."""
        try:
            if self.lines is None or n < self.size.first or n in self.recordings:
                self.trace(n)
            else:
                self.size.check(n)
                self.peaks[n] = self._peak_on(self.lines, n)
        except ParamError as error:
            self.why_not[n] = str(error)
            return inf if self.size.name == "length" else -inf  # too short for the picture, or too long for the text
        return self.plans.room(self.peaks[n])

    def guess(self) -> int:
        """Return the largest size that fits, if all that is held lies on lines through that of two traces.

        They are the two that leave least room or lack least; 1 before there are two.
        """
        if len(self.recordings) < 2:
            return 1
        nearest = sorted(self.recordings, key=lambda n: abs(self.plans.room(self.peaks[n])))[:2]
        largest = self._largest_on(self.lines or self._lines(*sorted(nearest)))
        if self.size.is_linear and not self.sought_lines and self.operators(largest) > QUICK_OPERATORS:
            self.sought_lines, self.lines = True, self._confirmed_lines()
            if self.lines:
                largest = self._largest_on(self.lines)
        return largest

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
            values = [t for t in tensors_of(inputs) if not t.is_meta]
            self.inputs_bytes[n] = sum(t.nbytes for t in values)
            model = quantized_copy(self.plans.model, self.plans.params.fsdp)
            self.recordings[n] = self.plans.cache.record(model, self.first_plan(), inputs)
            self.peaks[n] = self._peak(self.recordings[n].memory_events)
        return self.recordings[n]

    def operators(self, n: int) -> float:
        """Return the operators of a step, on the line through the smallest and the largest trace."""
        low, *_, high = sorted(self.recordings)
        few, many = self.recordings[low].operators, self.recordings[high].operators
        return many + (many - few) * (n - high) / (high - low)

    def is_light(self, n: int) -> bool:
        """Return whether a step of this size has few enough operators and inputs to be traced."""
        first = min(self.recordings)
        many = self.operators(n) > MAX_GROWTH * self.recordings[first].operators
        return not many and self.inputs_bytes[first] * n <= MAX_INPUTS * first

    def _confirmed_lines(self) -> Lines | None:
        """Return lines through two traces, on which a third one lies; None if the rest is traced.

        The third is the largest size that fits, or the largest one that is light, or lies between both. If a larger
        one is not on the lines, the next are drawn through it. If the answer itself is not light, the last are taken.
        """
        low, high = min(self.recordings), max(self.recordings)
        for _ in range(MAX_PAIRS):
            lines = self._lines(low, high)
            check = largest = self._largest_on(lines)
            while check > high and not self.is_light(check):
                check = check * 3 // 4
            if check <= high < largest:
                check = (low + high) // 2
            if check < self.size.first or check in self.recordings:
                break
            if lines.at(check) == self.trace(check).memory_events:
                return lines
            if check < high:
                break
            low, high = max(self.size.first, check // 2), check
        return None if self.is_light(largest) else lines

    def _lines(self, low: int, high: int) -> Lines:
        return Lines(low, self.trace(low), high, self.trace(high))

    def _largest_on(self, lines: Lines) -> int:
        """Return the largest size that fits if its peak is on the lines."""

        def room(n: int) -> float:
            try:
                self.size.check(n)
            except ParamError:
                return -inf
            return self.plans.room(self._peak_on(lines, n))

        fits, _ = search(room, max(self.recordings))
        return fits

    def _peak_on(self, lines: Lines, n: int) -> int:
        return self._peak(lines.at(n))

    def _peak(self, events: tuple[MemoryEvent, ...]) -> int:
        recording = next(iter(self.recordings.values()))._replace(memory_events=events)
        peak = cost_of(with_recording(self.first_plan(), recording), self.plans.params).peak_bytes
        assert peak is not None
        return peak
