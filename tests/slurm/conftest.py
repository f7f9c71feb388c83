"""One Slurm for all tests in this folder that ask for it, and runs on it."""

from pathlib import Path

import pytest

from mmfsdp import Run, launch
from mmfsdp.params import RunParams
from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def slurm():
    """A Slurm with two nodes; skips where it is not installed."""
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def accounted(monkeypatch):
    """A Slurm of its own, with accounting."""
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster(accounting=True)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(request, monkeypatch):
    """The Slurm, with an environment that reaches it and no job of an earlier test."""
    slurm = request.getfixturevalue("accounted" if "accounted" in request.fixturenames else "slurm")
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)  # TMPDIR is read again: answers of squeue are this cluster's
    yield slurm
    slurm.ask("scancel", "--user=root")
    slurm.ask("scancel", "--user=root", "--signal=KILL", "--full")
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch):
    """Submits a run of entries.py to two nodes with two ranks each."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def go(entry: str, **changes) -> Run:
        params = light(tmp_path, **{"launch.name": entry} | changes)
        return launch(params, entry=f"tests.slurm.entries:{entry}")

    return go


def light(folder: Path, **changes) -> RunParams:
    """Parameters of a run whose ranks train nothing."""
    values = {"train.steps": 5, "train.warmup_steps": 0, "train.device": "cpu", "launch.folder": str(folder)}
    slurm = {"launch.executor": "slurm", "launch.nodes": 2, "launch.ranks": 4, "launch.timeout_min": 2}
    return RunParams().change(**values | slurm | changes)
