"""One Slurm for all tests in this folder that ask for it, and runs on it."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmfsdp import Run, launch
from mmfsdp.kit.run.slurm import slurm_queue as queue
from mmfsdp.params import RunParams
from tests import waiting
from tests.slurm.cluster import Cluster, missing

SLOW = os.environ.get("MMFSDP_SLOW_SLURM", "")
"""Seconds that each of Slurm's commands is to take in all tests here; they pass with 6, too, and take long."""


@contextmanager
def started(**kind):
    """A Slurm with two nodes; skips where it is not installed."""
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster(**kind)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def slurm():
    """The Slurm that the tests share."""
    with started() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def accounted():
    """Another Slurm, with accounting and two limits: quality of service `small` takes 2 jobs of 5 minutes each."""
    with started(accounting=True) as cluster:
        limits = ("MaxWall=5", "MaxSubmitJobsPerUser=2")
        cluster.ask("sacctmgr", "--immediate", "add", "qos", "small", "set", *limits)
        cluster.ask("sacctmgr", "--immediate", "modify", "user", "root", "set", "qos+=small")
        yield cluster


@pytest.fixture
def cluster(request, monkeypatch):
    """The Slurm, with an environment that reaches it and no job of an earlier test."""
    slurm = request.getfixturevalue("accounted" if "accounted" in request.fixturenames else "slurm")
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(queue, "known_queues", {})  # answers of squeue are this cluster's
    monkeypatch.setattr(queue, "SQUEUE_INTERVAL_S", 1.0)  # in this process
    if SLOW:
        (slurm.folder / "slow").write_text(SLOW)
    yield slurm
    for line in slurm.ask("squeue", "--noheader", "--format=%i %j").stdout.splitlines():
        number, name = line.split()
        if name != "timed":
            slurm.ask("scancel", number)
            slurm.ask("scancel", "--signal=KILL", "--full", number)


@pytest.fixture
def slow(cluster):
    """Let each of Slurm's commands take 6 s, as at a large centre at noon, but for those that the tests call."""
    (cluster.folder / "slow").write_text(SLOW or "6")
    yield cluster
    if not SLOW:
        (cluster.folder / "slow").unlink()


@pytest.fixture(scope="session")
def timed(slurm):
    """A run whose minute passes while other tests go on."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.environment.items():
            patch.setenv(name, value)
        changes = {"launch.name": "timed", "launch.nodes": 1, "launch.ranks": 1, "launch.timeout_min": 1}
        return launch(light(slurm.folder / "timed", **changes), entry="tests.launch_entries:stream")


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a run of launch_entries.py to two nodes with two ranks each."""

    def go(entry: str, **changes) -> Run:
        params = light(tmp_path, **{"launch.name": entry} | changes)
        return launch(params, entry=f"tests.launch_entries:{entry}")

    return go


def light(folder: Path, **changes) -> RunParams:
    """Parameters of a run whose ranks train nothing, on two nodes."""
    slurm = {"launch.executor": "slurm", "launch.nodes": 2, "launch.ranks": 4, "launch.timeout_min": 15}
    return waiting.light(folder, **slurm | changes)
