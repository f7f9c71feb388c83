"""Real training over the nodes of a real Slurm."""

import json
import sys

import pytest

from mmfsdp import launch
from tests.tiny_run import tiny_run

pytestmark = pytest.mark.real

SLURM = {"launch.executor": "slurm", "launch.nodes": 2, "launch.ranks": 4, "launch.timeout_min": 30}
HYBRID = {"fsdp.sharding_strategy": "HYBRID_SHARD"}
"""Without sizes: one replica per node."""

LAUNCHER = """
import sys
from mmfsdp import RunParams, launch
run = launch(RunParams.from_yaml(sys.argv[1]))
print(run.wait(600), run.job)
"""


def test_two_nodes_train_hybrid_as_this_one_sharded_from_within_an_allocation(cluster, tmp_path, monkeypatch):
    """They learn the same. The job is launched by another one, whose SLURM_ variables it must not see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    params = tiny_run(tmp_path, **SLURM | {"train.steps": 3, "train.save_every": None, "data.augment": False})
    sharded = launch(params.change(**{"launch.name": "sharded", "launch.executor": "local", "launch.nodes": 1}))
    params.change(**{"launch.name": "hybrid"} | HYBRID).to_yaml(tmp_path / "hybrid.yaml")
    job = ("srun", "--ntasks=1", "--cpus-per-task=1", "--gpus=1", "--mem=1G", "--time=9", "--job-name=notebook")
    done = cluster.ask(*job, sys.executable, "-c", LAUNCHER, str(tmp_path / "hybrid.yaml"), timeout=600)
    state, number = done.stdout.rsplit(maxsplit=1) if done.stdout else ("", "")
    assert "COMPLETED" in state, done.stdout + done.stderr
    told = cluster.ask("scontrol", "show", "job", number).stdout
    assert "JobName=hybrid" in told and "NumNodes=2" in told and "NumTasks=4" in told and "gres:gpu" not in told
    assert "MinMemoryNode=0" in told and f"TimeLimit=00:{SLURM['launch.timeout_min']}:00" in told
    state = sharded.wait(600)
    assert state.ok, f"{state}\n{sharded.logs(0)}"
    curves = [[row["loss"] for row in run.metrics()] for run in (sharded, type(sharded).open(tmp_path / "runs/hybrid"))]
    plan = json.loads((tmp_path / "runs/hybrid/plan.json").read_text())["plan"]
    assert (plan["replicate"], plan["shard"]) == (2, 2)
    assert len(curves[0]) == 3 and curves[0] == pytest.approx(curves[1], rel=1e-4)
