"""What may befall a rank, and what is known of it afterwards, how soon. Real trainings, real processes."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mmfsdp import ParamError, Run, launch, runs
from mmfsdp.runs import Status, read_json
from tests.test_resume import curve, final
from tests.tiny_run import tiny_run

ROOT = Path(__file__).resolve().parent.parent
SILENCE = 4


@dataclass(frozen=True)
class Fault:
    """What happens in rank 1, and what is expected of the run."""

    entry: str
    """The function in tests/fault_entries.py that every rank runs."""
    reason: str
    """In the state's reason."""
    seconds: float
    """From the fault to the end of the run, every process gone."""
    traceback: str = ""
    """In what is shown of the rank."""


FAULTS = {
    "raises": Fault("raises", "rank 1: RuntimeError: a bad day", 5, 'raise RuntimeError("a bad day")'),
    "is killed": Fault("is_killed", "rank 1 died without a traceback: killed from outside, out of memory", 5),
    "is stopped": Fault("is_stopped", "rank 1 does not answer (in step 4 data): it is stopped by a", SILENCE + 6),
    "hangs": Fault("hangs", "rank 1 does not answer (in step 4 data): it hangs", SILENCE + 6, "in hang_at"),
    "has no memory": Fault("has_no_memory", "rank 1: RuntimeError", 5, "allocate memory"),
    "may write no more": Fault("may_not_write", "rank 1 could not write: [Errno 27] File too large", 5),
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launches the tiny run; whatever is left of it after the test is stopped."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    started = []

    def go(entry: str, **changes) -> Run:
        params = tiny_run(tmp_path, **{"launch.silence_s": SILENCE, "train.save_every": None, **changes})
        started.append(launch(params, entry=entry))
        return started[-1]

    yield go
    for run in started:
        if run.record:
            run.record.stop(grace=0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_in_time_with_its_cause(start, name):
    fault = FAULTS[name]
    run = start(f"tests.fault_entries:{fault.entry}")
    state = run.wait(120)
    noticed = time.time() - (run.path / "fault").stat().st_mtime
    assert state.status is Status.FAILED and state.rank == 1 and fault.reason in state.reason, state
    assert fault.traceback in state.traceback
    assert noticed < fault.seconds
    while run.record.members():  # the supervisor is the last to go
        assert time.time() - (run.path / "fault").stat().st_mtime < fault.seconds + 1, "every process is gone"


def test_a_full_disk_ends_the_run_with_its_cause(start, tmp_path):
    """A disk of 3 MB where one can be mounted; elsewhere a quota, as above."""
    disk = tmp_path / "runs"
    disk.mkdir()
    real = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode == 0
    try:
        run = start(f"tests.fault_entries:{'fills_the_disk' if real else 'may_not_write'}")
        state = run.wait(120)
        assert state.status is Status.FAILED and state.rank is not None, state
        assert ("No space left on device" if real else "File too large") in state.reason
        assert "Traceback" in state.traceback
        run.record.stop()
    finally:
        if real:
            subprocess.run(["umount", "-l", disk], check=True)


def test_ten_kills_at_random_moments_lose_nothing(tmp_path):
    params = tiny_run(tmp_path, **{"train.steps": 24, "train.save_every": 2, "train.keep_last": 2})
    for name, kills in (("whole", 0), ("broken", 10)):
        (tmp_path / name).mkdir()
        params.to_yaml(tmp_path / name / "params.yaml")
        command = [sys.executable, "-m", "tests.kill_and_resume", str(tmp_path / name), "2", str(kills)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed at step") == 10
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole") and len(curve(tmp_path / "whole")) == 24
    assert final(tmp_path / "broken") == final(tmp_path / "whole")
    assert [p.name for p in (tmp_path / "broken/checkpoints").iterdir() if not p.name.startswith("step_")] == []


def test_a_launched_run_is_resumed_in_its_folder(start):
    run = start("tests.fault_entries:is_killed_once", **{"train.save_every": 1, "train.steps": 5})
    assert run.wait(120).status is Status.FAILED
    broken = run.record
    with pytest.raises(ValueError, match=r"step: 9 has no complete checkpoint; those of .* are \[1, 2, 3\]"):
        run.resume(step=9)
    damaged = run.path / "checkpoints/step_00000003/ranks/00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    state = run.resume().wait(120)
    assert state.status is Status.FAILED and "00001.safetensors is missing, truncated or altered" in state.reason
    assert "the one before is step_00000002: go on from it with `mmfsdp resume RUN --step 2`" in state.reason
    more = run.params.change(**{"train.steps": 6})
    again = run.resume(step=2, params=more)
    with pytest.raises(ParamError, match="cancel it before it is resumed"):
        run.resume()
    state = again.wait(120)
    assert state.ok and state.step == state.steps == 6, state
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert [row.get("resumed_from") for row in run.metrics()] == [None, None, 2, None, None, None]
    assert run.record.identity != broken.identity and read_json(run.path / "status.json")["status"] == "COMPLETED"
    assert [path.name[-8:] for path in runs.complete_checkpoints(run.path / "checkpoints")][0] == "00000001"
    assert "resumed from step 2" in run.logs(0)
    with pytest.raises(ParamError, match="train.steps: all 6 of .* are done; ask for more"):
        run.resume()
