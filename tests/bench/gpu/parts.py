"""`python -m tests.bench.gpu.parts FOLDER`: start the parts, each with its own limit, and sum up what they wrote.

Imports Python's own library only, so that it can tell which packages are missing. One worker (`__main__.py`) does all
parts, and imports and starts the GPU once. A part that is over its limit ends the worker; another one goes on with the
parts that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from tests.bench.gpu.goals import closing_table

TOTAL_S = 560
"""Seconds that all parts may take together, starts included, unless `--total` says less: a machine that is lent for ten
minutes needs some of them for an installation."""
START_S = 35
"""Seconds in which a worker must have imported everything and begun its first part."""
GRACE_S = 5
"""Seconds between asking a worker to end and killing it."""
STATE_FILE = "parts.jsonl"

NEEDS_TORCH = ("torch", "pydantic", "yaml")
NEEDS_MODELS = (
    *NEEDS_TORCH,
    *("transformers", "safetensors", "huggingface_hub", "open_clip", "torchvision", "PIL"),
    *("filelock", "psutil", "braceexpand"),
)
NEEDS_RUNS = (*NEEDS_MODELS, "submitit", "ipywidgets")
DISTRIBUTIONS = {"yaml": "pyyaml", "open_clip": "open_clip_torch", "PIL": "pillow"}
"""What pip calls a package that is imported by another name."""


@dataclass(frozen=True)
class Part:
    """One thing to measure."""

    name: str
    limit: int
    """Seconds."""
    needs: tuple[str, ...]
    """Packages that it imports."""


PARTS = (  # those first that are worth most
    Part("machine", 10, NEEDS_TORCH),
    Part("waits", 45, NEEDS_MODELS),
    Part("busy", 45, NEEDS_MODELS),
    Part("methods", 90, NEEDS_MODELS),
    Part("norms", 40, NEEDS_MODELS),
    Part("works", 60, NEEDS_MODELS),  # it compiles
    Part("formats", 35, NEEDS_MODELS),
    Part("vlm", 40, NEEDS_MODELS),
    Part("several", 40, NEEDS_MODELS),
    Part("kernel", 30, NEEDS_TORCH),
    Part("demo", 50, NEEDS_RUNS),
    Part("saving", 20, NEEDS_MODELS),
    Part("traces", 20, NEEDS_MODELS),
)


def missing_packages() -> list[str]:
    """Return the packages of all parts that this Python cannot import."""
    return [package for package in NEEDS_RUNS if find_spec(package) is None]


def parts_without(missing: list[str]) -> list[Part]:
    """Return the parts that need none of the missing packages; print what is left out, and why."""
    possible = []
    for part in PARTS:
        lacks = [package for package in part.needs if package in missing]
        if lacks:
            print(f"left out: {part.name}, which needs {', '.join(lacks)}")
        else:
            possible.append(part)
    if missing:
        names = " ".join(DISTRIBUTIONS.get(package, package) for package in missing)
        print(f"install: {sys.executable} -m pip install {names}")
        print("without internet: tests/bench/gpu_wheels.sh fetches the wheels elsewhere")
    return possible


def events(folder: Path) -> list[dict[str, object]]:
    """Return what workers have written about their parts: {part, event: begins or ends, ...}."""
    path = folder / STATE_FILE
    if not path.exists():
        return []
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]  # the last line may be half written
    return [json.loads(line) for line in complete.splitlines()]


def note(folder: Path, **event: object) -> None:
    """Append an event."""
    with (folder / STATE_FILE).open("a") as file:
        file.write(json.dumps(event) + "\n")


def run_worker(parts: list[Part], folder: Path, end: float) -> list[Part]:
    """Start a worker on parts, and return those that are left when it has ended."""
    begun_before = len(events(folder))
    command = [sys.executable, "-m", "tests.bench.gpu", str(folder), *(f"{part.name}={part.limit}" for part in parts)]
    with (folder / "log.txt").open("a") as log:
        worker = subprocess.Popen(command, stderr=log, start_new_session=True)
        reason = watch(worker, parts, folder, begun_before, end)
    new_events = events(folder)[begun_before:]
    begun = [event["part"] for event in new_events if event["event"] == "begins"]
    done = {event["part"] for event in new_events if event["event"] == "ends"}
    # The part that the worker ended in, or the first one if it could not even start.
    current = begun[-1] if begun else parts[0].name
    if current not in done and (reason or worker.returncode):
        reason = reason or f"the worker ended with exit code {worker.returncode}; see log.txt"
        print(f"  {current}: {reason}", flush=True)
        note(folder, part=current, event="ends", failed=reason)
        done.add(current)
    return [part for part in parts if part.name not in done]


def watch(worker: subprocess.Popen[bytes], parts: list[Part], folder: Path, number: int, end: float) -> str:
    """Wait for a worker. Stop it if a part is over its limit, or all together are, and return the reason.

    number: of events that are older.
    """
    limit_s, limit_end = START_S, time.monotonic() + START_S
    while worker.poll() is None:
        time.sleep(0.1)
        for event in events(folder)[number:]:
            number += 1
            limit_s = START_S
            if event["event"] == "begins":
                limit_s = next(part.limit for part in parts if part.name == event["part"])
            limit_end = time.monotonic() + limit_s
        if time.monotonic() > end:
            stop(worker)
            return "stopped at the limit of all parts together"
        if time.monotonic() > limit_end:
            stop(worker)
            return f"stopped at its limit of {limit_s} s"
    return ""


def stop(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and its ranks: ask, then kill."""
    os.killpg(worker.pid, signal.SIGTERM)
    try:
        worker.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(worker.pid, signal.SIGKILL)  # what it has started may not have ended with it
    except ProcessLookupError:
        pass
    worker.wait()


def main() -> None:
    """Run all parts that are possible here; exit with 1 if one failed or was stopped."""
    parser = argparse.ArgumentParser(prog="tests/bench/gpu.sh")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu_results"))
    parser.add_argument("--patience", type=int, default=1, help="factor of all limits, for a slow machine")
    parser.add_argument("--total", type=int, default=TOTAL_S, metavar="S", help="seconds of all parts together")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="leave out the other parts")
    choices = parser.parse_args()
    folder = choices.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.jsonl"), folder / "log.txt"]:
        old.unlink(missing_ok=True)
    end = time.monotonic() + choices.total * choices.patience
    missing = missing_packages()
    print(f"missing packages: {', '.join(missing) or 'none'}")
    parts = [part for part in parts_without(missing) if part.name in choices.only]
    left = [replace(part, limit=part.limit * choices.patience) for part in parts]
    possible = len(left)
    while left and time.monotonic() < end:
        left = run_worker(left, folder, end)
    for part in left:
        note(folder, part=part.name, event="ends", failed="there was no time left")
    text = closing_table(folder)
    (folder / "summary.txt").write_text(text + "\n")
    print(text)
    if possible < len(choices.only):
        print(f"{len(choices.only) - possible} parts were left out; see the first lines")
    sys.exit(any("failed" in event for event in events(folder)))


if __name__ == "__main__":
    main()
