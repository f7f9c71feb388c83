"""Runs in an allocation, as on a hub whose notebooks run in a job: each is a step of it, and only that step ends."""

import json
import sys

import pytest

from mmfsdp import ParamError, Run, launch
from mmfsdp.kit.run.files.run_record import Status
from tests.slurm.conftest import light
from tests.waiting import until

pytestmark = pytest.mark.real

NOTEBOOK = """
import json, subprocess, sys
from mmfsdp import RunParams, launch
from tests.waiting import until

params = RunParams.from_yaml(sys.argv[1])

def go(entry, **changes):
    return launch(params.change(**{"launch.name": entry} | changes), entry=f"tests.launch_entries:{entry}")

runs = {name: go(name) for name in ("places", "killed", "stream", "preemptible")}
runs["hang"] = go("hang", **{"launch.silence_s": 10})
until(lambda: runs["stream"].state().step > 5, words=lambda: str(runs["stream"].state()))
until(lambda: runs["preemptible"].state().step > 3, words=lambda: str(runs["preemptible"].state()))
runs["preemptible"].drill()
steps = subprocess.run(["squeue", "--steps", "--noheader"], capture_output=True, text=True).stdout
runs["stream"].cancel()
after = subprocess.run(["squeue", "--steps", "--noheader"], capture_output=True, text=True).stdout
ends = {name: [str(run.wait(600).status), run.wait(600).reason] for name, run in runs.items()}
logs = [runs["places"].logs(rank).splitlines()[0] for rank in range(4)]
events = [event["kind"] for event in runs["preemptible"].events()]
job = subprocess.run(["squeue", "--noheader", "--format=%T"], capture_output=True, text=True).stdout
print(json.dumps([ends, logs, events, len(steps.splitlines()), len(after.splitlines()), job.split()]))
"""


def test_runs_in_an_allocation_are_steps_that_end_alone(cluster, tmp_path):
    step = {"launch.executor": "srun", "train.device": "auto", "launch.gpus_per_node": 2}
    light(tmp_path, **step).to_yaml(tmp_path / "params.yaml")
    allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=5")
    done = cluster.ask(*allocation, sys.executable, "-c", NOTEBOOK, str(tmp_path / "params.yaml"), timeout=600)
    assert done.stdout, done.stderr
    ends, logs, events, before, after, jobs = json.loads(done.stdout.splitlines()[-1])
    assert ends["places"] == ["COMPLETED", ""], ends
    for rank, line in enumerate(logs):
        assert line.startswith(
            f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
        )
        assert " CUDA_VISIBLE_DEVICES=0,1 " in line and line.endswith(f"node=127.0.0.{1 + rank // 2}")
        assert " HF_HUB_OFFLINE=1 " in line, "as in a job"
    assert ends["killed"] == ["FAILED", "rank 2 on 127.0.0.2: Killed"], ends
    assert ends["hang"][1].startswith("rank 3 does not answer (in step 3 compute)"), ends
    assert ends["stream"][0] == "CANCELLED" and after < before and jobs == ["RUNNING"], "the job goes on"
    assert ends["preemptible"] == ["COMPLETED", ""] and events == ["drill", "preempted", "requeued", "resumed"], events
    until(lambda: not [p for p in cluster.processes() if str(tmp_path) in " ".join(p.info["cmdline"] or ())])


ASKED = {
    "--gpus-per-node=2": 2,
    "--gres=gpu:3": 3,
    "--gpus=4": 4,
    "--gpus-per-task=1": 2,
    "--mem=0": 0,
}
COUNT = """
import sys
from mmfsdp import RunParams
from mmfsdp.kit.run.rank_count import trains_on
print(trains_on(RunParams.from_yaml(sys.argv[1])))
"""


def test_the_gpus_of_an_allocation_are_known_whichever_way_it_asked_for_them(cluster, tmp_path):
    changes = {"launch.executor": "srun", "launch.ranks": None, "launch.nodes": 1, "train.device": "cuda"}
    light(tmp_path).change(**changes).to_yaml(tmp_path / "params.yaml")
    for option, gpus in ASKED.items():
        allocation = ("salloc", "--quiet", "--nodes=1", "--ntasks=2", option, "--time=5")
        done = cluster.ask(*allocation, sys.executable, "-c", COUNT, str(tmp_path / "params.yaml"), timeout=600)
        words = f"{gpus} GPUs in {gpus} ranks, as launch.ranks is unset" if gpus else "the CPU in 2 ranks"
        assert done.stdout.startswith(f"trains on {words}"), f"{option}: {done.stdout}{done.stderr}"


END = """
import os, sys
from mmfsdp import RunParams, launch
from tests.waiting import until

params = RunParams.from_yaml(sys.argv[1])
for entry in ("stream", "preemptible"):
    run = launch(params.change(**{"launch.name": entry}), entry=f"tests.launch_entries:{entry}")
    until(lambda: run.state().step > 3, words=lambda: str(run.state()))
print(os.environ["SLURM_JOB_ID"])
"""


def test_a_run_whose_allocation_ends_is_told_so_and_is_not_started_again(cluster, tmp_path):
    light(tmp_path, **{"launch.executor": "srun", "launch.nodes": 1, "launch.ranks": 2}).to_yaml(
        tmp_path / "params.yaml"
    )
    allocation = ("salloc", "--quiet", "--nodes=1", "--ntasks=2", "--time=5")
    done = cluster.ask(*allocation, sys.executable, "-c", END, str(tmp_path / "params.yaml"), timeout=600)
    assert done.stdout, done.stderr
    words = f"the job {done.stdout.split()[-1]} that it was a step of has ended; resume continues it in another"
    for entry in ("stream", "preemptible"):
        run = Run(tmp_path / entry)
        state = run.wait(600)
        assert (state.status, state.reason) == (Status.FAILED, words), f"{entry}: {state}"
        log = (run.path / "logs/supervisor.log").read_text()
        assert log.count("srun starts ") == 1, log


def test_a_step_outside_of_an_allocation_or_larger_than_it_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    params = light(tmp_path, **{"launch.executor": "srun"})
    with pytest.raises(
        ParamError, match="launch.executor: srun needs the Slurm job that this notebook .* choose slurm"
    ):
        launch(params, entry="tests.launch_entries:places")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    with pytest.raises(ParamError, match="launch.nodes: 2 are more than the 1 of the job"):
        launch(params, entry="tests.launch_entries:places")
    with pytest.raises(ParamError, match="launch.partition: 'gpu' "):
        params.change(**{"launch.partition": "gpu"})
