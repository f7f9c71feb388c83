"""Customs of clusters on a real Slurm: GPUs of a type, none that it manages, one a rank; addresses; containers."""

import sys

import pytest

from mmfsdp.kit.cli import main
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.params import load
from tests.slurm.cluster import BARE, FILES, TYPED
from tests.waiting import until

pytestmark = pytest.mark.real

ONE_NODE = {"launch.nodes": 1, "launch.ranks": 2}
ONE_NODE |= {"train.device": "auto", "launch.gpus_per_node": 2}

LAYOUTS = {
    "typed": {
        "launch.sbatch": [f"nodelist={TYPED}"],
        "launch.gpus_per_node": "a100:2",
        "launch.cpus_per_task": 1,
        "launch.gpus_as": "gres",
        "launch.gres": ["localssd:50"],
    },
    "whole_node": {"launch.sbatch": [f"nodelist={BARE}"], "launch.gpus_as": "none"},
    "by_hand": {
        "launch.sbatch": [f"nodelist={BARE}", "no-requeue"],
        "launch.gpus_per_node": 0,
        "launch.setup": ["export CUDA_VISIBLE_DEVICES=1", f"export MASTER_ADDR={BARE}", "export MASTER_PORT=20123"],
    },
    "one_each": {
        "launch.gpus_as": "gpus-per-task",
        "launch.interface": ["lo", "ib0"],
        "launch.srun": ["cpu-bind=none"],
    },
}
SEEN = {
    "typed": "CUDA_VISIBLE_DEVICES=0,1 ",
    "whole_node": "CUDA_VISIBLE_DEVICES=None ",
    "by_hand": "CUDA_VISIBLE_DEVICES=1 ",
    "one_each": "GLOO_SOCKET_IFNAME=lo,ib0 NCCL_SOCKET_IFNAME==lo,ib0 ",
}


@pytest.fixture
def more_nodes(cluster):
    """Two more nodes of the Slurm."""
    for node in (TYPED, BARE):
        cluster.start_node(node)
    until(lambda: [cluster.nodes().get(node) for node in (TYPED, BARE)] == ["idle"] * 2, words=cluster.words)
    yield
    for node in (TYPED, BARE):
        cluster.forget_node(node)


def test_gpus_names_and_containers_as_clusters_have_them(submit, cluster, more_nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "grant7")
    monkeypatch.setenv("SBATCH_GPUS", "9")
    far = submit("places", **ONE_NODE | {"launch.name": "far", "launch.setup": ["export MASTER_ADDR=255.255.255.255"]})
    runs = {name: submit("places", **ONE_NODE | {"launch.name": name} | LAYOUTS[name]) for name in LAYOUTS}
    runs["boxed"] = submit("places", **ONE_NODE | {"launch.name": "boxed"} | boxed(tmp_path, monkeypatch))
    for name, run in runs.items():
        assert run.wait(600).ok, f"{name}: {run.state()}\n{run.logs(0)}"
        told = cluster.ask("scontrol", "show", "job", run.job).stdout
        assert "Account=grant7" in told and "WCKey" not in told, told
        for rank in range(2):
            assert SEEN.get(name, "") in run.logs(rank), name
    assert " MASTER_ADDR=127.0.0.6 " in runs["by_hand"].logs(1) and "port=20123" in runs["by_hand"].logs(1)
    assert "Requeue=0" in cluster.ask("scontrol", "show", "job", runs["by_hand"].job).stdout
    visible = [runs["one_each"].logs(rank).partition("CUDA_VISIBLE_DEVICES=")[2].split()[0] for rank in range(2)]
    # Which of the node's GPUs they are depends on the jobs that run beside this one.
    assert all(gpu.isdecimal() for gpu in visible) and len(set(visible)) == 2, (
        f"each rank sees one of its own: {visible}"
    )
    assert "PLACE=image" in runs["boxed"].logs(1)
    state = far.wait(600)
    assert state.status is Status.FAILED and state.rank == 1
    assert "no rank reaches 255.255.255.255 (255.255.255.255):" in state.reason and "launch.host" in state.reason, state


def boxed(folder, monkeypatch) -> dict:
    """Changes of a run in a container: a stand-in for Pyxis, whose image has the Python; the host's does not work."""
    for place in ("host", "image"):
        (folder / place / "bin").mkdir(parents=True)
    for place, file, text in (
        ("host", "srun", (FILES / "srun").read_text()),
        ("host", "python", "#!/bin/sh\nexit 9\n"),
        ("image", "python", f'#!/bin/sh\nPLACE=image exec {sys.executable} "$@"\n'),
    ):
        path = folder / place / "bin" / file
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("BOXES", str(folder))
    return {
        "launch.setup": ["shopt -q login_shell", "export PATH=$BOXES/host/bin:$PATH"],
        "launch.python": "python",
        "launch.srun": [f"container-image={folder}/image", f"container-mounts={folder}:{folder}"],
    }


def test_a_dry_run_says_when_and_where_slurm_would_start_the_job(cluster, tmp_path, capsys):
    words = "--launch.executor slurm --launch.nodes 2 --launch.ranks 4"
    words += f" --train.device cuda --launch.partition main,short --launch.folder {tmp_path}"
    assert main(["launch", "--dry-run", "--config", "tiny", *words.split()]) == 0
    out, err = capsys.readouterr()
    changes = {"launch.executor": "slurm", "launch.nodes": 2, "launch.ranks": 4, "train.device": "cuda"}
    changes["launch.cpus_per_task"] = 2  # nodes have 8 for 4 GPUs
    changes |= {"launch.partition": "main,short", "launch.folder": str(tmp_path)}
    limited = load("tiny").change(**changes, **{"launch.timeout_min": 5})
    assert out == sbatch_text(limited), "the limit is the partition's"
    lines = err.split("\n")
    assert "asks for 4 GPUs for 5 min: at most 0.3333 GPU-hours" in lines
    assert [line.partition(": Slurm would start it at ")[0] for line in lines[2:4]] == ["main", "short"], err
    assert lines[2].endswith(" on 127.0.0.[1-2]"), err
    refused = ["--launch.partition", "nope", "--launch.timeout-min", "5", "--launch.executor", "slurm"]
    assert main(["launch", "--dry-run", "--config", "tiny", "--train.device", "cpu", *refused]) == 0, "no gate"
    assert "nope: Slurm would refuse it: " in (err := capsys.readouterr().err) and "change launch.partition" in err
    assert cluster.ask("squeue", "--noheader", "--name=tiny").stdout == ""
