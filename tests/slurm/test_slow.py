"""Runs on a real Slurm each of whose commands takes 6 s: no answer is never taken for a no."""

import json
import subprocess
import sys

import pytest
import yaml

from mmfsdp.kit.run.files.run_record import Status
from tests.slurm.conftest import light
from tests.waiting import until

pytestmark = pytest.mark.real

ONE = {"launch.nodes": 1, "launch.ranks": 1}


def test_states_are_those_of_the_job_however_long_slurm_takes(submit, slow):
    held = submit("stream", **ONE, **{"launch.name": "held", "launch.sbatch": ["hold"]})
    taken = submit("stream", **ONE, **{"launch.name": "taken", "launch.sbatch": ["hold"]})
    runs = submit("stream", **ONE)
    until(lambda: "JobHeldUser" in held.state().reason, words=lambda: str(held.state()))
    until(lambda: runs.state().step > 3, words=lambda: str(runs.state()))
    slow.ask("scancel", held.job)
    state = held.wait(600)
    assert state.status is Status.CANCELLED and "by scancel" in state.reason, state
    assert slow.ask("scontrol", "suspend", runs.job).returncode == 0
    until(lambda: runs.state().status is Status.SUSPENDED, words=lambda: str(runs.state()))
    assert slow.ask("scontrol", "resume", runs.job).returncode == 0
    until(lambda: runs.state().status is Status.RUNNING, words=lambda: str(runs.state()))
    for run in (taken, runs):
        state = run.cancel()  # which answers within 10 s
        assert state.done or "being cancelled; Slurm was asked, no answer yet" in state.reason, state
        assert run.wait(600).status is Status.CANCELLED
    assert not slow.ask("squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED").stdout


def test_a_check_of_a_slow_cluster_finds_nothing_wrong(slow, tmp_path):
    profile = tmp_path / "slow.yaml"
    profile.write_text(yaml.safe_dump({"cpus_per_task": 1}))
    words = ["--cluster", str(profile), "--json", "--launch.folder", str(tmp_path / "runs"), "--train.device", "cpu"]
    command = [sys.executable, "-m", "mmfsdp", "check", *words, "--launch.ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = {line["code"]: line for line in json.loads(done.stdout)["lines"]}
    assert not [line for line in lines.values() if line["level"] == "wrong"], done.stdout + done.stderr
    assert (lines["requeue"]["level"], lines["scancel"]["level"]) == ("ok", "ok"), lines


CANCEL = """
import subprocess, sys
from mmfsdp import RunParams, launch
from tests.slurm.conftest import light
from tests.waiting import until

run = launch(RunParams.from_yaml(sys.argv[1]), entry="tests.launch_entries:stream")
until(lambda: run.state().step > 3, words=lambda: str(run.state()))
state = run.cancel()
print(run.wait(600) if state.done or "being cancelled" in state.reason else state)
print(subprocess.run(["squeue", "--steps", "--noheader", "--format=%j"], capture_output=True, text=True).stdout)
"""


def test_a_step_of_a_job_is_cancelled_alone(slow, tmp_path):
    light(tmp_path, **ONE | {"launch.executor": "srun", "launch.nodes": 1}).to_yaml(tmp_path / "params.yaml")
    allocation = ("salloc", "--quiet", "--nodes=1", "--ntasks=2", "--time=5")
    words = [*allocation, sys.executable, "-c", CANCEL, str(tmp_path / "params.yaml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.startswith("CANCELLED") and "mmfsdp-" not in done.stdout, done.stdout + done.stderr
