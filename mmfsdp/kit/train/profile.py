"""Profile some steps of a run.

The profile tells how much of a step's communication is exposed: no compute runs at the same time.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..run.files.folder import make_inner_folder, write_json
from .callbacks import Callback, Training
from .cpu_memory import silent

WARMUP_STEPS = 2
"""Steps before the first that is recorded: allocators, connections of gloo and NCCL, and kernels are there then."""
COMPUTE_OPERATORS = ("aten::", "fsdp::")
"""Prefixes of the host's operators that compute or copy."""
COLLECTIVES = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
"""Part of a collective's name in a trace and its kind; the first match. gloo names its reduce-scatter all_reduce."""
SHORTEST_GAP = 1 / 2000
"""Share of a step below which a pause is left out of the timeline."""

Spans = list[tuple[float, float]]
"""Intervals, (start, end) in seconds, in order and apart from each other."""


def training_profile(training: Training) -> StepProfile | None:
    """Return the profile of a training, if `train.profile` asks for one."""
    return StepProfile(training) if training.setup.params.train.profile else None


class StepProfile(Callback):
    """Records some steps with torch's profiler, once the warm-up is over.

    Writes profile/rank<N>.json.gz (the trace) and profile/rank<N>.json (see `summary`) in the run folder.
    """

    def __init__(self, training: Training) -> None:
        self.folder, self.steps = training.setup.folder / "profile", training.setup.params.train.profile
        self.device, self._training = training.device, training
        self._done = 0
        self._profiler: torch.profiler.profile | None = None

    def after_step(self, step: int) -> dict[str, Any]:
        """Begin to record after the warm-up, and end after the steps that are asked for."""
        self._done += 1
        if self._profiler is not None and self._done == WARMUP_STEPS + self.steps:
            self._training.beat(f"step {step} profile")
            self._stop()
        elif self._profiler is not None:
            self._profiler.step()
        elif self._done == WARMUP_STEPS and not self._training.ends:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            with silent():
                self._profiler.start()
        self._training.profiled = self._profiler is not None
        return {}

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Write what was recorded where the run was shorter than the profile."""
        if self._profiler is not None:
            self._stop()

    def close(self) -> None:
        """End without writing: an error, or a preemption, has ended the training."""
        if self._profiler is not None:
            with silent():
                self._profiler.stop()
            self._profiler = None

    def _stop(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        with silent():
            profiler.stop()  # waits for the GPU
        make_inner_folder(self.folder)
        trace = self.folder / f"rank{dist.get_rank()}.json.gz"
        profiler.export_chrome_trace(str(trace))
        events = work_events(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
        figures = summary(events, steps=self._done - WARMUP_STEPS)
        write_json(trace.with_suffix(""), figures | {"device": self.device.type, "host": platform.node()})
        exposed = f"{figures['exposed_s']:.3f} s of exposed communication"
        print(f"profile: {figures['seconds']:.3f} s a step, {exposed}; open {trace} at https://ui.perfetto.dev")


def work_events(recorded: Iterable[Any]) -> list[tuple[str, str, int, int]]:
    """Return (name, device, start and end in nanoseconds) of the events that torch's profiler recorded.

    Left out are user annotations on the GPU's timeline, such as FSDP::post_backward. The profiler draws each from the
    first to the last kernel that was launched inside a `record_function`: nothing need run in between.
    """
    events = []
    for event in recorded:
        device = event.device_type().name
        # On the host, gloo's collectives are user annotations, too.
        if device != "CPU" and event.is_user_annotation():
            continue
        events.append((event.name(), device, event.start_ns(), event.end_ns()))
    return events


def summary(events: Iterable[tuple[str, str, int, int]], *, steps: int) -> dict[str, Any]:
    """Sum up a trace's events (name, CPU or CUDA, start and end in nanoseconds) of so many steps.

    Keys: steps; seconds, compute_s, communication_s and exposed_s of a step; lanes: for each kind of work its intervals
    in the last step. With events of a GPU those count, and the host's, which only issue them, do not.
    """
    events = list(events)
    # torch counts from 1970, and a float of so many seconds cannot tell 0.2 microseconds apart: count from the first.
    origin = min((start for _, _, start, _ in events), default=0)
    by_device: dict[str, dict[str, Spans]] = {"CUDA": {}, "CPU": {}}
    for name, device, start, end in events:
        lane = _lane(name, device)
        if lane:
            by_device[device].setdefault(lane, []).append(((start - origin) / 1e9, (end - origin) / 1e9))
    lanes = {lane: union(spans) for lane, spans in (by_device["CUDA"] or by_device["CPU"]).items()}
    begin = min((spans[0][0] for spans in lanes.values()), default=0.0)
    end_s = max((spans[-1][1] for spans in lanes.values()), default=0.0)
    seconds = (end_s - begin) / steps
    compute = lanes.get("compute", [])
    communication: Spans = []
    last_step = {}
    for lane, spans in lanes.items():
        if lane != "compute":
            communication += spans
        step_start = end_s - seconds
        in_last = [(max(0.0, a - step_start), b - step_start) for a, b in spans if b > step_start]
        last_step[lane] = union(in_last, gap=seconds * SHORTEST_GAP)
    return {
        "steps": steps,
        "seconds": seconds,
        "communication_s": length(union(communication)) / steps,
        "exposed_s": (length(union([*communication, *compute])) - length(compute)) / steps,
        "compute_s": length(compute) / steps,
        "lanes": last_step,
    }


def _lane(name: str, device: str) -> str:
    """Return compute, a kind of collective, or nothing for an event that is neither."""
    if name.startswith("gloo:") or (device == "CUDA" and name.startswith("nccl")):
        for part, kind in COLLECTIVES.items():
            if part in name.lower():
                return kind
        return "other"
    return "compute" if device == "CUDA" or name.startswith(COMPUTE_OPERATORS) else ""


def union(spans: Iterable[tuple[float, float]], *, gap: float = 0.0) -> Spans:
    """Join intervals that overlap, or are at most `gap` apart."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def length(spans: Spans) -> float:
    """Return the seconds of all intervals together."""
    return sum(end - start for start, end in spans)
