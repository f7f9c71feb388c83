"""fit: solve a plan backwards. What is the largest batch on these GPUs, and how few GPUs are enough for this run?

What a step holds after each allocation is linear in the batch and in the pictures, so that a large batch is read off
small traces. It is not in the tokens, where attention may be quadratic: a length is bracketed by lines, then found by
exact traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import linear_regression
from typing import Any

from ...params import FrozenPolicy, ParamError, RunParams
from ...params.enums import FIT_FOR
from ...params.fsdp import LEAST_RECOMPUTATION
from ...predict import Machine
from .fit_answers import Answer, Curve, Fit, Way
from .fit_search import search
from .fit_sizes import Size, sizes_of
from .fit_traces import RunPlans, Traces

MAX_NODES = 128


def fit(params: RunParams, machine: Machine, *asked: str) -> Fit:
    """Return what fits on a machine. Needs no weights, no GPU and no process group; the data are not opened.

    Args:
        params: A run. What is not asked for stays as it is set there.
        machine: The GPU of each rank: how much memory it has, and how much must be free beyond the tensors.
        asked: Of params.enums.FIT_FOR; each is solved for by itself. Default: batch.

    Returns:
        An answer for each, confirmed both ways: it fits, and one step further does not. Print it for a table.

    Raises:
        ParamError: For something else that is asked, for a model whose inputs are not known without its data, and for
            what cannot be planned.
    """
    for name in asked:
        if name not in FIT_FOR:
            raise ParamError("fit", f"{name!r} is not one of {', '.join(FIT_FOR)}")
    if params.train.freeze_from:
        words = "the run has several phases, and what fits differs; unset it, and set model.freeze to that of one phase"
        raise ParamError("train.freeze_from", words)
    solver = Solver(params, machine)
    answers, curve = [], None
    for name in asked or ("batch",):
        if name == "gpus":
            answers.append(solver.fewest_gpus())
        elif name == "policy":
            answers.append(solver.best_way())
        else:
            size = solver.sizes[name]()
            answers.append(solver.largest(size))
            curve = curve or solver.curve(size)
    return Fit(machine, tuple(answers), curve)


class Solver(RunPlans):
    """Solve the plans of one run; its model is built once, and what was traced is kept."""

    def __init__(self, params: RunParams, machine: Machine) -> None:
        super().__init__(params, machine)
        self.sizes = sizes_of(self.model, self.params, self.processor)
        self.peaks: dict[str, dict[int, int]] = {}
        """Bytes of the peaks that are known, by name of a size and its steps."""

    # A size

    def largest(self, size: Size) -> Answer:
        """Return the largest value of a size that fits."""
        traces = Traces(self, size)
        traces.first_plan()  # what is wrong with the run itself is raised here
        fits, too_many = search(traces.room, size.first, guess=traces.guess)
        self.peaks[size.name] = traces.peaks
        if fits not in traces.peaks:  # none is large enough to be, and small enough to fit
            fits = 0
        return Answer(
            asked=size.name,
            unit=size.unit,
            value=fits * size.step,
            now=size.now * size.step,
            change={size.field: fits * size.step} if size.field and fits else {},
            peak=traces.peaks.get(fits),
            further=None if too_many is None else too_many * size.step,
            further_peak=None if too_many is None else traces.peaks.get(too_many),
            why_not="" if too_many is None else traces.why_not.get(too_many, ""),
            read_off=bool(fits) and fits not in traces.recordings,
        )

    def curve(self, size: Size) -> Curve | None:
        """Return the straight line of peaks over visual tokens that is nearest to all peaks; None without two."""
        points = [(size.tokens(n), peak) for n, peak in sorted(self.peaks[size.name].items())]
        tokens, peaks = [point[0] for point in points], [point[1] for point in points]
        if len(set(tokens)) < 2:
            return None
        slope, intercept = linear_regression(tokens, peaks)
        return Curve(intercept, slope, tuple(points))

    # The ranks, and the policy

    def fewest_gpus(self) -> Answer:
        """Return the fewest GPUs that are enough, of whole nodes beyond the first."""
        node = self.machine.gpus_per_node
        numbers = [*range(1, node + 1), *(node * nodes for nodes in range(2, MAX_NODES + 1))]
        peaks: dict[int, int] = {}
        fsdp = self.params.fsdp.with_node_size(node)  # before the ranks are spread over the nodes of the run

        def too_few(n: int) -> float:
            """Return 1 if so many GPUs are too few, else -1: the largest number that is too few is searched."""
            ranks = numbers[n - 1]
            try:
                _, cost = self.planned(self.params.change(fsdp=fsdp.to_dict(), **{"launch.ranks": ranks}))
            except ParamError:  # a mesh that these ranks do not fill
                return 1
            assert cost.peak_bytes is not None
            peaks[ranks] = cost.peak_bytes
            return -1 if self.room(cost.peak_bytes) >= 0 else 1

        # From below: where units are small, their padding makes more ranks hold more again.
        last_too_few, enough = search(too_few, 1, most=len(numbers))
        value = 0 if enough is None else numbers[enough - 1]
        further = numbers[last_too_few - 1] if last_too_few else None
        return Answer(
            asked="gpus",
            unit=f"GPUs, {node} in each node",
            value=value,
            now=self.params.launch.world_size,
            change={"launch.ranks": value} if value else {},
            peak=peaks.get(value),
            further=further,
            further_peak=peaks.get(further) if further else None,
        )

    def ways(self) -> Iterator[Way]:
        """Yield every frozen policy with every recomputation of activations, as the run is else."""
        own = self.params.fsdp.activation_checkpointing
        budget = (self.machine.capacity - self.machine.needed_bytes(0)) / (1 + self.machine.fragmentation)
        for recompute in dict.fromkeys((own if own != LEAST_RECOMPUTATION else "none", "none", "all")):
            for policy in FrozenPolicy:
                change: dict[str, Any] = {
                    "fsdp.frozen_policy": policy,
                    "fsdp.activation_checkpointing": recompute,
                }
                if policy is FrozenPolicy.AUTO:
                    change["fsdp.memory_budget_gib"] = int(budget / 2**20) / 2**10
                try:
                    plan, cost = self.planned(self.params.change(**change))
                except ParamError as error:
                    yield Way(change, why_not=error.message)
                    continue
                assert cost.peak_bytes is not None
                fits = self.room(cost.peak_bytes) >= 0
                yield Way(change, cost.peak_bytes, cost.wire_bytes, plan.hardware_flops, fits)

    def best_way(self) -> Answer:
        """Return the policy and the recomputation that send least of those that fit, then those that compute least."""
        ways = sorted(self.ways(), key=Way.order)
        best = next((way for way in ways if way.fits), None)
        return Answer(
            asked="policy",
            unit="frozen policy, and recomputation of activations",
            value=best.words if best else 0,
            now=Way.words_of(self.params.fsdp.frozen_policy, self.params.fsdp.activation_checkpointing),
            change=best.change if best else {},
            peak=best.peak if best else None,
            ways=tuple(ways),
        )
