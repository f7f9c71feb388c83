"""tests/bench/gpu.sh: all of it on the CPU, smaller; what is left out, stopped and counted; the closing table."""

import ast
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.bench import gpu_wheels
from tests.bench.gpu import goals, parts, waits
from tests.processes import in_fresh_python

ROOT = Path(__file__).resolve().parent.parent.parent
IMPORTED = """
import sys
before = set(sys.modules)
import {names}
print(sorted(set(sys.modules) - before))
"""
NEEDED = set(parts.NEEDS_RUNS)


def read(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


@pytest.mark.extended
@pytest.mark.real
def test_what_is_measured_on_a_gpu_runs_here_smaller(tmp_path):
    """As it will be called on a GPU; what is stopped keeps its rows."""
    command = [ROOT / "tests/bench/gpu.sh", tmp_path, "--patience", "5"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, text=True, capture_output=True)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout[-5000:] + log[-5000:]
    for part in parts.PARTS:
        rows = read(tmp_path, part.name)
        assert rows and not any({"failed", "stopped"} & row.keys() for row in rows)
        assert f"== {part.name}, at most {5 * part.limit} s" in done.stdout
    assert all(0.9 < row["predicted / measured"] < 1.1 for row in read(tmp_path, "works"))
    assert all(0.9 < row["predicted peak / measured"] < 1.1 for row in read(tmp_path, "formats"))
    assert (tmp_path / "profile.json.gz").stat().st_size > 10_000
    assert "beside OpenFlamingo's" in done.stdout and "on a CPU this only shows that everything runs" in done.stdout
    assert "NOT MET" not in done.stdout


@pytest.mark.real
def test_parts_that_take_too_long_are_stopped_and_the_others_go_on(tmp_path):
    command = [ROOT / "tests/bench/gpu.sh", tmp_path, "--patience", "5", "--only", "machine"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-5000:] + (tmp_path / "log.txt").read_text()[-5000:]
    assert read(tmp_path, "machine") and "on a CPU this only shows that everything runs" in done.stdout

    # Its limit is over before the first row is there; then the time of all parts together.
    short, after = parts.Part("formats", 1, ()), parts.Part("machine", 60, ())
    assert parts.run_worker([short, after], tmp_path, time.monotonic() + 300) == [after]
    assert parts.run_worker([after], tmp_path, time.monotonic() + 0.5) == []
    ends = [event["failed"] for event in parts.events(tmp_path) if "failed" in event]
    assert ends == ["stopped at its limit of 1 s", "stopped at the limit of all parts together"]


def test_limits_leave_room_in_ten_minutes():
    assert parts.START_S + sum(part.limit for part in parts.PARTS) <= parts.TOTAL_S <= 560


def test_missing_packages_leave_out_the_parts_that_need_them(capsys, monkeypatch):
    assert parts.missing_packages() == []
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name in ("open_clip", "submitit") else name)
    missing = parts.missing_packages()
    assert [part.name for part in parts.parts_without(missing)] == ["machine", "kernel"]
    text = capsys.readouterr().out
    assert "left out: demo, which needs open_clip, submitit" in text
    assert "pip install open_clip_torch submitit" in text


@pytest.mark.parametrize("needs", [parts.NEEDS_TORCH, parts.NEEDS_MODELS], ids=["torch", "models"])
def test_parts_import_no_more_than_they_say(needs):
    """All but `demo`, which calls the command."""
    names = [f"tests.bench.gpu.{part.name}" for part in parts.PARTS if part.needs == needs]
    modules = ast.literal_eval(in_fresh_python(IMPORTED.format(names=", ".join(names))))
    imported = {name.partition(".")[0] for name in modules}
    assert "torch" in imported and not NEEDED & imported - set(needs)
    assert "pytest" not in imported


def test_waits_are_counted_by_the_place_in_our_code():
    ours = waits.package_folders()["mmfsdp"] / "core/step.py"
    code = f"warnings.warn({waits.SYNC_MESSAGE!r}); warnings.warn('something else')"
    with waits.noted_waits() as places:
        for _ in range(2):
            exec(compile(code, ours, "exec"), {"warnings": warnings})
        warnings.warn(waits.SYNC_MESSAGE, stacklevel=1)
    (place, count), (elsewhere, one) = places.items()
    assert place.startswith("mmfsdp/core/step.py:1") and count == 2
    assert "test_gpu_parts.py" in elsewhere and one == 1


def test_the_closing_table_says_which_goals_are_met(tmp_path):
    def write(part, *rows):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half a ro')

    write("machine", {"device": "NVIDIA H100"})
    write("waits", {"waits of mmfsdp": 0, "waits of others": 1, "done before the GPU": True})
    step = {"samples": 16, "mask": False, "samples/s": 20.0, "MFU": 0.4, "peak GB": 12.0, "seconds in range": True}
    step["usual s / measured"] = 0.9
    theirs = step | {"way": goals.OPENFLAMINGO, "samples/s": 10.0, "peak GB": 24.0}
    ours, larger = (
        step | {"way": "frozen-aware SHARD"},
        step | {"way": "frozen-aware SHARD", "samples": 32, "MFU": 0.51, "usual s / measured": 1.2},
    )
    keep = step | {"way": "frozen-aware KEEP", "peak GB": 20.0}
    failed = {"way": "frozen-aware REPLICATE", "samples": 16, "mask": False, "failed": "RuntimeError: no"}
    write("methods", ours, theirs, keep, failed, larger, {"way": "frozen-aware SHARD", "stopped": "out of memory"})
    write("formats", {"form": "bf16", "s / bf16": 1.0}, {"form": "nf4", "tokens": 4096, "s / bf16": 1.25})
    (tmp_path / "parts.jsonl").write_text('{"part": "methods", "event": "ends", "failed": "rows say why"}\n')
    table = goals.closing_table(tmp_path)
    verdicts = {}
    for line in table.splitlines():
        if line.endswith("met") or line.endswith("NOT MET"):
            verdicts[line.split("  ")[0]] = line.endswith("NOT MET")
    assert verdicts == {
        "steps in which mmfsdp waits": False,
        "fused kernel of nf4": True,
        "int8 and nf4: bits as on the CPU": True,
        "MFU, of the measured matrix rate": False,
        "frozen-aware SHARD beside OpenFlamingo's": False,
        "frozen-aware KEEP beside OpenFlamingo's": True,
        "a step in nf4 beside bf16, 4,096 tokens": True,
        "the usual seconds over measured": True,
    }
    assert "51.0% (frozen-aware SHARD, 32 samples)" in table and "methods: rows say why" in table


def test_wheels_are_for_what_the_parts_import_and_leave_torch_to_the_machine():
    wanted = {gpu_wheels.distribution(requirement) for requirement in gpu_wheels.requirements()}
    assert "jupyterlab" not in wanted and "torch" in wanted
    brought_along = {"safetensors", "huggingface_hub", "torchvision", "pillow"}  # by transformers and open_clip
    for package in set(parts.NEEDS_RUNS):
        name = parts.DISTRIBUTIONS.get(package, package)
        assert name in brought_along or gpu_wheels.distribution(name) in wanted
    of_torch = [name for name in ("torch", "torchvision", "nvidia-nccl-cu13") if gpu_wheels.OF_TORCH.match(name)]
    assert of_torch == ["torch", "nvidia-nccl-cu13"]
    options = gpu_wheels.target_options("3.12", "aarch64")
    assert "manylinux_2_17_aarch64" in options and "--only-binary=:all:" in options
