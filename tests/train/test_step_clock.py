"""The seconds of steps over a week, by events as a GPU has them and a host's clock that drifts."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmfsdp.core.same_parts import UsedParts
from mmfsdp.core.step import FIGURES, StepMetrics
from mmfsdp.kit.train.callbacks import Callback
from mmfsdp.kit.train.step_rows import StepRows

DAY_S = 24 * 3600.0
DRIFT = 20e-6
"""Seconds by which the host's clock gains on the GPU's in a second."""
STEPS = 20
"""Steps that are driven each day."""


class Machine:
    """A host and a GPU with a queue; all times in seconds by the GPU's clock."""

    def __init__(self):
        self.host_s = self.gpu_free_s = 5 * DAY_S

    def issue(self, seconds: float) -> None:
        """Give the GPU work behind what it has to do."""
        self.gpu_free_s = max(self.gpu_free_s, self.host_s) + seconds

    def perf_counter(self) -> float:
        return self.host_s * (1 + DRIFT)

    def event(self, **_: bool) -> "QueuedEvent":
        return QueuedEvent(self)


class QueuedEvent:
    """An event of CUDA: `elapsed_time` is a float32 of milliseconds."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def record(self, stream: object = None) -> None:
        self.at_s = max(self.machine.gpu_free_s, self.machine.host_s)

    def synchronize(self) -> None:
        self.machine.host_s = max(self.machine.host_s, self.at_s)

    def elapsed_time(self, later: "QueuedEvent") -> float:
        return float(np.float32((later.at_s - self.at_s) * 1e3))


class KeptRows(Callback):
    def __init__(self):
        self.rows = []

    def on_step_end(self, row: dict) -> None:
        self.rows.append(row)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of compute")
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    return machine


def rows_of_a_week(machine: Machine, *, data_s: float, compute_s: float) -> list[dict]:
    """The rows of some steps on each of eight days; in between, the host and the GPU do something else."""
    kept = KeptRows()
    state = SimpleNamespace(step=0, skipped=0, skipped_in_a_row=0)
    training = SimpleNamespace(device=torch.device("cuda"), state=state, callbacks=kept, preempted=False)
    rows = StepRows(training)
    for _ in range(8):
        for _ in range(STEPS):
            state.step += 1
            began = rows.begin()
            machine.host_s += data_s
            machine.issue(compute_s)
            values = dict.fromkeys(FIGURES, 1.0) | {"tokens": 600.0, "samples": 60.0, "stop_votes": 0.0}
            figures = torch.tensor([*values.values(), 1.0], dtype=torch.float64)
            arrived = machine.event()
            arrived.record()
            rows.add(StepMetrics(figures, arrived, False, ["data"], 300, 1e-3, UsedParts()), began, {})
        rows.read()
        machine.host_s += DAY_S
    return kept.rows


@pytest.mark.parametrize("compute_s", [0.3, 0.05, 0.0005])
def test_steps_take_as_long_after_a_week_as_on_the_first_day(machine, compute_s):
    rows = rows_of_a_week(machine, data_s=0.0, compute_s=compute_s)
    assert [row["step"] for row in rows] == list(range(1, 8 * STEPS + 1))
    assert [row["step_s"] for row in rows] == pytest.approx([compute_s] * len(rows), rel=1e-4)
    assert [row["samples_per_s"] for row in rows] == pytest.approx([60 / compute_s] * len(rows), rel=1e-4)
    assert [row["rank_tokens_per_s"] for row in rows] == pytest.approx([300 / compute_s] * len(rows), rel=1e-4)


def test_the_seconds_of_steps_that_follow_each_other_add_up_to_the_time_that_passed(machine):
    rows = rows_of_a_week(machine, data_s=0.01, compute_s=0.3)
    in_a_day = [row["step_s"] for row in rows[:STEPS]]
    assert sum(in_a_day) == pytest.approx(0.01 + STEPS * 0.3, rel=1e-6)


def test_a_step_that_waits_for_data_takes_as_long_as_they_do(machine):
    rows = rows_of_a_week(machine, data_s=0.2, compute_s=0.05)
    for day in range(8):
        first, *others = [row["step_s"] for row in rows[day * STEPS : (day + 1) * STEPS]]
        assert first == pytest.approx(0.25, rel=1e-6)  # the GPU had nothing to do while the data were loaded
        assert others == pytest.approx([0.2] * (STEPS - 1), rel=1e-6)
