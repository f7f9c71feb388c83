"""A sweep on a real Slurm: job arrays, no more at once than was asked, a failed member resumed alone."""

import re
import signal

import pytest
from filelock import FileLock

from mmfsdp import ParamError, launch, sweep
from mmfsdp.kit.models.generated import generated_folder
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.params import load
from tests.shapes.test_pretrain import minute_params
from tests.slurm.conftest import light
from tests.waiting import until

pytestmark = pytest.mark.real

ENTRY = "tests.launch_entries:member"


@pytest.fixture
def base(cluster, tmp_path):
    return light(tmp_path, **{"launch.name": "lr", "launch.ranks": 2, "train.steps": 4})


def test_a_sweep_is_as_many_job_arrays_as_slurm_needs(cluster, base):
    with pytest.raises(ParamError, match="launch.nodes: is the same for all of a job array"):
        sweep(base, grid={"launch.nodes": [1, 2]})
    found = sweep(base, grid={"train.lr": [1, 2, 3, 4, 0.5, 0.25]}, at_once=2, entry=ENTRY)  # an array takes 4
    most = 0

    def over() -> bool:
        nonlocal most
        lines = cluster.ask("squeue", "--noheader", "--name=lr", "--array", "--format=%i %T").stdout.splitlines()
        most = max(most, sum(line.endswith("RUNNING") for line in lines))
        return found.done()

    until(over, seconds=600, words=lambda: str(found))
    assert most == 2
    jobs = [found.run(name).job for name in found.members]
    assert [job[-2:] for job in jobs] == ["_0", "_1", "_2", "_3", "_0", "_1"]
    assert len({job[:-2] for job in jobs[:4]}) == len({job[:-2] for job in jobs[4:]}) == 1 and jobs[0] != jobs[4]
    rows = {row["name"]: row for row in found.rows()}
    assert [rows[name]["state"] for name in found.members] == ["COMPLETED", "FAILED", *["COMPLETED"] * 4], str(found)
    assert "a bad member" in rows["001"]["why"] and found.run("002").logs(1) == ""
    assert list((found.path / "005/logs").glob("*_0_log.out"))
    assert re.search("#SBATCH --array=0-3%2\n", (found.path / "array_0/array.sh").read_text())
    assert re.search("#SBATCH --array=0-1%2\n", (found.path / "array_1/array.sh").read_text())
    assert found.run("001").resume().wait(600).ok
    assert found.run("001").job != jobs[1] and found.run("000").job == jobs[0]


def test_a_waiting_and_running_array_is_cancelled_whole(cluster, base):
    found = sweep(base, grid={"train.lr": [7, 8, 9, 10, 11]}, at_once=1, entry=ENTRY)
    until(lambda: found.states()["000"].step, seconds=600, words=lambda: str(found))
    assert found.states()["002"].status is found.states()["004"].status is Status.QUEUED
    assert {state.status for state in found.cancel(timeout=600).values()} == {Status.CANCELLED} and found.done()


def test_a_cancel_while_slurm_does_not_answer_returns_and_goes_on(cluster, base):
    found = sweep(base, grid={"train.lr": [7, 8, 9]}, at_once=2, entry=ENTRY)
    until(lambda: found.states()["000"].step and found.states()["001"].step, seconds=600, words=lambda: str(found))
    cluster.daemons["slurmctld"].send_signal(signal.SIGSTOP)
    try:
        states = found.cancel()  # while Slurm is still stopped
        asked = [state for state in states.values() if "Slurm was asked, no answer yet" in state.reason]
        assert asked and not any(state.done for state in asked), states
    finally:
        cluster.daemons["slurmctld"].send_signal(signal.SIGCONT)
    until(found.done, seconds=600, words=lambda: str(found))
    assert {state.status for state in found.states().values()} == {Status.CANCELLED}


def test_a_member_whose_plan_is_wrong_is_never_submitted(cluster, tmp_path):
    wrong = light(tmp_path).change(model=load("tiny").model.change(freeze=("*",)))
    with pytest.raises(ParamError, match="leaves nothing to train"):
        sweep(wrong, grid={"train.lr": [1e-3, 2e-3]})
    assert not (tmp_path / wrong.launch.name).exists()
    assert str(tmp_path) not in cluster.ask("scontrol", "show", "job").stdout


def test_backbones_are_pretrained_before_a_job_is_submitted(cluster, tmp_path, monkeypatch):
    """By the process that submits it, which a cancel ends; of a sweep once for all members with this model."""
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path / "cache"))
    slurm = {"launch.executor": "slurm", "launch.nodes": 1, "launch.ranks": 1, "launch.timeout_min": 15}
    params = minute_params().change(**slurm | {"launch.folder": str(tmp_path), "train.device": "cpu"})
    wanted = generated_folder(params.model)
    wanted.parent.mkdir()
    with FileLock(f"{wanted}.lock"):  # as of a process that works on them
        run = launch(params)
        until(lambda: run.state().status is Status.PREPARING, words=lambda: str(run.state()))
        assert run.job is None and run.cancel().status is Status.CANCELLED
        members = sweep(params.change(**{"launch.name": "lr"}), grid={"train.lr": [1, 2]})
        until(lambda: members.states()["000"].status is Status.PREPARING, words=lambda: str(members))
        assert {state.status for state in members.cancel().values()} == {Status.CANCELLED}
        run.resume()
        until(lambda: run.state().status is Status.PREPARING, words=lambda: str(run.state()))
        for part in ("vision", "language"):
            (wanted / part).mkdir(parents=True)
    until(lambda: run.job, words=lambda: str(run.state()))
    assert run.cancel().status is Status.CANCELLED
