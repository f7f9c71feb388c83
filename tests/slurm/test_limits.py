"""Limits of a cluster, on a real Slurm with accounting: jobs that never start, and jobs that wait for their turn."""

import pytest

from mmfsdp import sweep
from mmfsdp.kit.run.files.run_record import Status
from tests.slurm.conftest import light
from tests.waiting import until

pytestmark = pytest.mark.real

LAB = {"launch.account": "lab"}


def test_a_job_that_can_never_start_says_what_to_change(accounted, submit):
    accounted.ask("scontrol", "create", "partitionname=picky", "nodes=ALL", "allowqos=small")
    accounted.ask("sacctmgr", "--immediate", "add", "account", "poor", "set", "GrpTRESMins=cpu=0")
    accounted.ask("sacctmgr", "--immediate", "add", "user", "root", "account=poor")
    failed = accounted.ask("sbatch", "--parsable", "--account=lab", "--hold", "--time=2", "--wrap=true").stdout.strip()
    cases = {
        "wall": ({"launch.qos": "small", "launch.timeout_min": 60}, "lower launch.timeout_min, 60 now"),
        "time": ({"launch.partition": "short", "launch.timeout_min": 720}, "lower launch.timeout_min, 720 now"),
        "nodes": ({"launch.nodes": 8, "launch.ranks": 8}, ("lower launch.cpus_per_task, or change", "change launch.")),
        "budget": ({"launch.account": "poor"}, "the compute time of this account or QOS is used up: choose another "),
        "qos": ({"launch.partition": "picky"}, "choose another launch.qos or launch.partition"),
        "depends": ({"launch.sbatch": [f"dependency=afterok:{failed}"]}, "the job that it depends on has failed"),
        "held": ({"launch.sbatch": ["hold"]}, "it is held; `scontrol release "),
    }
    runs = {}
    for name, (changes, _) in cases.items():
        runs[name] = submit("places", **LAB | {"launch.name": name} | changes)
    until(lambda: runs["depends"].job, words=lambda: str(runs["depends"].state()))
    accounted.ask("scancel", failed)
    for name, (_, fix) in cases.items():
        run = runs[name]
        # A job may have the general reason PartitionConfig until the scheduler has looked at it.
        state = until(
            lambda r=run, f=fix: (s := r.state()).why.fix.startswith(f) and s,
            words=lambda r=run: str(r.state()),
        )
        assert state.status is Status.QUEUED
        assert f"job {run.job} will not start: " in state.reason and state.why.fix in state.reason


def test_a_held_requeue_says_how_it_goes_on(submit, cluster):
    run = submit("stream")
    until(lambda: run.state().status is Status.RUNNING, words=lambda: str(run.state()))
    assert cluster.ask("scontrol", "requeuehold", run.job).returncode == 0
    state = until(lambda: (s := run.state()).why.fix and s, words=lambda: str(run.state()))
    assert state.status is Status.QUEUED and f"`scontrol release {run.job}`" in state.reason, state
    assert run.cancel(timeout=600).status is Status.CANCELLED


def test_members_beyond_a_limit_on_submitted_jobs_wait_for_their_turn(accounted, cluster, tmp_path):
    changes = LAB | {
        "launch.qos": "small",
        "launch.timeout_min": 5,
        "launch.ranks": 2,
        "train.steps": 4,
        "launch.name": "lr",
    }
    found = sweep(
        light(tmp_path, **changes),
        grid={"train.lr": [0.5, 1, 3, 4]},
        at_once=2,
        entry="tests.launch_entries:member",
    )
    waiting = until(lambda: [s for s in found.states().values() if "QOSMaxSubmitJobPerUserLimit" in s.reason])
    assert {state.status for state in waiting} == {Status.QUEUED} and "waits for its turn" in waiting[0].reason
    until(found.done, seconds=600, words=lambda: str(found))
    assert all(state.ok for state in found.states().values()), str(found)


def test_a_member_that_waits_for_its_turn_is_cancelled_alone_and_with_all(accounted, cluster, tmp_path):
    changes = LAB | {
        "launch.qos": "small",
        "launch.timeout_min": 5,
        "launch.ranks": 2,
        "train.steps": 4,
        "launch.name": "long",
    }
    found = sweep(
        light(tmp_path, **changes),
        grid={"train.lr": [7, 8, 9, 10]},
        at_once=2,
        entry="tests.launch_entries:member",
    )
    until(lambda: "QOSMaxSubmitJobPerUserLimit" in found.states()["003"].reason, words=lambda: str(found))
    assert found.run("003").cancel().status is Status.CANCELLED
    assert found.states()["002"].status is Status.QUEUED and not found.done()
    assert {state.status for state in found.cancel(timeout=600).values()} == {Status.CANCELLED} and found.done()
