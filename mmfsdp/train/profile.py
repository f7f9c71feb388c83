"""The profiler's trace of some steps, and how much of their communication nothing runs beside."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import runs
from ..measure import silent
from ..params import TrainParams

WARM = 2
"""Steps before the first that is recorded: allocators, gloo's and NCCL's connections and kernels are there then."""
COMPUTES = ("aten::", "fsdp::")
"""What the host's operators that compute or copy are called."""
KINDS = {"gather": "all-gather", "broadcast": "all-gather", "scatter": "reduce-scatter", "all_to_all": "reduce-scatter"}
KINDS |= {"reduce": "all-reduce"}
"""Part of a collective's name in a trace, the first that is found, and its kind; see wrap.gloo for how gloo gathers."""
SEEN = 1 / 2000
"""Share of a step below which a pause is not kept for the picture."""

Spans = list[tuple[float, float]]
"""Intervals, (start, end) in seconds, in order and apart from each other."""


@contextmanager
def profiled(folder: Path, settings: TrainParams, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Gives what is to be called after each step, and tells whether the next one is recorded.

    Writes profile/rank<N>.json.gz (the trace) and profile/rank<N>.json, which holds: steps, seconds (of a step),
    communication_s, exposed_s (of which no compute runs beside), compute_s, and lanes: for each kind of work the
    intervals of the last step, in seconds.
    """
    done, profiler = 0, None

    def stepped() -> bool:
        nonlocal done, profiler
        done += 1
        if settings.profile and done == WARM:
            profiler = _profiler(device)
            with silent():
                profiler.start()
        elif profiler is not None and done == WARM + settings.profile:
            _stop(profiler, folder, settings.profile, device)
            profiler = None
        elif profiler is not None:
            profiler.step()
        return profiler is not None

    yield stepped
    if profiler is not None:  # the run was shorter
        _stop(profiler, folder, done - WARM, device)


def _profiler(device: torch.device) -> torch.profiler.profile:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    return torch.profiler.profile(activities=kinds)


def _stop(profiler: torch.profiler.profile, folder: Path, steps: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with silent():
        profiler.stop()
    into = folder / "profile"
    into.mkdir(exist_ok=True)
    rank = dist.get_rank()
    profiler.export_chrome_trace(str(into / f"rank{rank}.json.gz"))
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    found = summary(((e.name(), e.device_type().name, e.start_ns(), e.end_ns()) for e in events), steps=steps)
    runs.write_json(into / f"rank{rank}.json", found | {"device": device.type, "host": platform.node()})
    print(
        f"profile of {steps} steps: {found['seconds']:.3f} s each, communication {found['communication_s']:.3f} s, "
        f"of which {found['exposed_s']:.3f} s with nothing beside it; {os.fspath(into)}/rank{rank}.json.gz opens at "
        "https://ui.perfetto.dev"
    )


def summary(events: Iterable[tuple[str, str, int, int]], *, steps: int) -> dict[str, Any]:
    """What a trace's events (name, CPU or CUDA, start and end in nanoseconds) say of so many steps."""
    on_gpu: dict[str, Spans] = {}
    on_host: dict[str, Spans] = {}
    for name, device, start, end in events:
        lane = _lane(name, device)
        if lane:
            (on_gpu if device == "CUDA" else on_host).setdefault(lane, []).append((start / 1e9, end / 1e9))
    lanes = {lane: union(spans) for lane, spans in (on_gpu or on_host).items()}
    compute = lanes.get("compute", [])
    talk = union(span for lane, spans in lanes.items() if lane != "compute" for span in spans)
    begin = min((spans[0][0] for spans in lanes.values()), default=0.0)
    until = max((spans[-1][1] for spans in lanes.values()), default=0.0)
    seconds = (until - begin) / steps
    last = {
        lane: [(max(0.0, a - until + seconds), b - until + seconds) for a, b in spans if b > until - seconds]
        for lane, spans in lanes.items()
    }
    return {
        "steps": steps,
        "seconds": seconds,
        "communication_s": length(talk) / steps,
        "exposed_s": (length(union([*talk, *compute])) - length(compute)) / steps,
        "compute_s": length(compute) / steps,
        "lanes": {lane: union(spans, gap=seconds * SEEN) for lane, spans in last.items()},
    }


def _lane(name: str, device: str) -> str:
    """compute, a kind of collective, or none."""
    if name.startswith("gloo:") or (device == "CUDA" and name.startswith("nccl")):
        return next((kind for part, kind in KINDS.items() if part in name.lower()), "other")
    return "compute" if device == "CUDA" or name.startswith(COMPUTES) else ""


def union(spans: Iterable[tuple[float, float]], *, gap: float = 0.0) -> Spans:
    """The same time, in intervals that are more than `gap` apart."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Seconds in all."""
    return sum(end - start for start, end in spans)
