"""Phases of a run: from some steps on, other parameters are frozen (`train.freeze_from`)."""

from __future__ import annotations

from typing import NamedTuple

from .run import RunParams


class Phase(NamedTuple):
    """The steps of a run in which the same parameters are frozen."""

    begin: int
    """Steps that are done when it begins."""
    end: int
    """Steps that are done when it ends."""
    params: RunParams
    """The parameters of the run, with the `model.freeze` of this phase."""

    def __str__(self) -> str:
        return f"steps {self.begin + 1} to {self.end}"


def phases_of(params: RunParams) -> list[Phase]:
    """Return the phases of a run in their order: one, unless `train.freeze_from` is set."""
    begins = [0, *params.train.freeze_from]
    ends = [*begins[1:], params.train.steps]
    phases = []
    for begin, end in zip(begins, ends, strict=True):
        if begin:
            params = params.change(**{"model.freeze": params.train.freeze_from[begin]})
        phases.append(Phase(begin, end, params))
    return phases


def next_phase(params: RunParams, done: int) -> Phase:
    """Return the phase in which a run goes on after so many steps; the last one after all steps."""
    return [phase for phase in phases_of(params) if phase.begin <= done][-1]


def phase_of_step(params: RunParams, step: int) -> Phase:
    """Return the phase that a step belongs to, counted from 1, and the checkpoint that is saved after it."""
    return next_phase(params, max(0, step - 1))
