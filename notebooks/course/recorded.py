"""Traces of steps that ran before: lesson 10 reads them, so that it needs no run. `python -m course.recorded`, in
notebooks/, records them anew.

Each is in the format that torch's profiler writes and https://ui.perfetto.dev opens, with only the outermost operators
and the collectives of one forward and backward of rank 0: two ranks over gloo train eight layers on CPUs.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "measured"
NAMES = ("aten::", "fsdp::", "gloo:")
WAYS = ("FSDP2", "DDP")
STEPS = """
from pathlib import Path

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.kit.train.meters import Collectives

layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(8)]
model = torch.nn.Sequential(*layers)
if WAY == "DDP":
    model = DistributedDataParallel(model, bucket_cap_mb=1)  # a bucket for each layer
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
x = torch.randn(2048, 512)
for step in range(3):
    model(x).square().mean().backward()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, Collectives() as counted:
    model(x).square().mean().backward()
if rank == 0:
    profiler.export_chrome_trace(str(Path(__file__).with_name("trace.json")))
save(wire_bytes=counted.wire_bytes)
"""
"""What each rank runs."""


def trace_file(way: str) -> Path:
    """Return where the trace of a way to train is, FSDP2 or DDP."""
    return FOLDER / f"trace_{way.lower()}.json.gz"


def events_of(way: str) -> list[dict[str, Any]]:
    """Return the events of a recorded step: each has a name, a start "ts" and a duration "dur" in microseconds."""
    return json.loads(gzip.decompress(trace_file(way).read_bytes()))["traceEvents"]


def facts_of(way: str) -> dict[str, Any]:
    """Return what is known of the recorded step: "way", "wire_bytes", "torch", "what"."""
    return json.loads(gzip.decompress(trace_file(way).read_bytes()))["facts"]


def outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that are in no other event of the same thread, in order."""
    kept: list[dict[str, Any]] = []
    end_of_thread: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        if end > end_of_thread.get(event["tid"], 0.0):
            end_of_thread[event["tid"]] = end
            kept.append(event)
    return kept


def trimmed(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the work in a trace of torch's profiler, with times from its begin."""
    work = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event["name"].startswith(NAMES)]
    start = min(event["ts"] for event in work)
    short = []
    thread_numbers: dict[Any, int] = {}
    for event in outermost(work):
        thread = thread_numbers.setdefault(event["tid"], len(thread_numbers))
        times = {"ts": round(event["ts"] - start, 1), "dur": round(event["dur"], 1)}
        short.append({"name": event["name"], "ph": "X", "pid": 0, "tid": thread, **times})
    return short


def record(way: str) -> None:
    """Run four steps on two ranks, profile the last one, and write its trace."""
    import torch

    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts, results, run_on_ranks

    name = f"trace_{way.lower()}"
    print(run_on_ranks(STEPS.replace("WAY", repr(way)), 2, name)[0])
    trace = json.loads((artifacts(name) / "trace.json").read_text())
    facts = {"way": way, "wire_bytes": results(name)[0]["wire_bytes"], "torch": torch.__version__.split("+")[0]}
    facts["what"] = "forward and backward of rank 0 of two, over gloo, on CPUs"
    text = json.dumps({"facts": facts, "traceEvents": trimmed(trace)})
    trace_file(way).write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{trace_file(way)}: {trace_file(way).stat().st_size:,} bytes")


if __name__ == "__main__":
    os.environ.setdefault("MMFSDP_COURSE", "../runs/course")
    for name in sys.argv[1:] or WAYS:
        record(name)
