"""Run the demo as a person does; then a run that begins on the CPU and goes on on the GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from mmfsdp.kit.run.files.folder import read_json
from tests.bench.gpu.device import DEVICE, ON_GPU
from tests.bench.gpu.rows import Rows

KEYS = ("heldout_exact_match", "frozen_parameters_changed", "wire_bytes_measured", "wire_bytes_predicted")


def demo(rows: Rows) -> None:
    """Write a row for each run."""
    runs = rows.folder / "runs"
    try:
        if ON_GPU:  # on a CPU tests/test_demo.py does it
            rows.attempt({"run": "demo"}, partial(whole_run, runs))
        rows.attempt({"run": "half"}, partial(begun_on_the_cpu, runs))
    finally:
        # A run goes on when its caller is stopped. Of one that has ended, cancel only says so.
        for path in runs.glob("*/run.json"):
            mmfsdp("cancel", str(path.parent), check=False)


def whole_run(runs: Path) -> dict[str, Any]:
    """Plan, train, caption and report."""
    start = time.monotonic()
    mmfsdp("run", "--config", "tiny", *in_folder(runs, "demo"), "--train.eval-samples", "200")
    return result_of(runs / "demo") | {"s": time.monotonic() - start}


def begun_on_the_cpu(runs: Path) -> dict[str, Any]:
    """Cancel a run on the CPU after its first checkpoint; resume it on this device."""
    options = ["--train.steps", "40", "--train.warmup-steps", "2", "--train.batch-size", "8", "--train.device", "cpu"]
    options += ["--train.save-every", "5", "--train.async-save", "--train.eval-samples", "4"]
    mmfsdp("launch", "--config", "tiny", *in_folder(runs, "half"), *options)
    run = runs / "half"
    until = time.monotonic() + 60
    while not list(run.glob("checkpoints/step_*/complete.json")) and time.monotonic() < until:
        time.sleep(0.1)
    mmfsdp("cancel", str(run))
    mmfsdp("resume", str(run), "--train.device", DEVICE.type)
    return result_of(run)


def in_folder(runs: Path, name: str) -> list[str]:
    """Return the options that put a run of one rank there."""
    return ["--launch.folder", str(runs), "--launch.name", name, "--launch.replace", "--launch.ranks", "1"]


def result_of(run: Path) -> dict[str, Any]:
    """Return the result's figures. Raises RuntimeError where there is none, AssertionError for wrong ones."""
    result = read_json(run / "result.json")
    if not result:
        raise RuntimeError("it left no result.json")
    row = {key: result.get(key) for key in KEYS}
    if row["frozen_parameters_changed"] or row["wire_bytes_measured"] != row["wire_bytes_predicted"]:
        raise AssertionError(str(row))
    return row


def mmfsdp(*words: str, check: bool = True) -> None:
    """Call the command; what it prints goes to the log."""
    subprocess.run([sys.executable, "-m", "mmfsdp", *words], check=check, stdout=sys.stderr)
