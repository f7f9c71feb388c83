"""Slurm runs in trouble: squeue out of order, a blind node, folders of somebody else."""

import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.files.snapshot import Snapshot
from mmfsdp.kit.run.slurm import slow_start, slurm_log
from tests.slurm.cluster import NODES, NOWHERE
from tests.waiting import until

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent.parent


def test_squeue_may_fail_for_a_while(submit, cluster):
    run = submit("stream")
    until(lambda: run.state().status is Status.RUNNING, words=lambda: str(run.state()))
    (cluster.folder / "squeue.broken").touch()
    try:
        state = until(lambda: (s := run.state()).reason.count("squeue: ") and s, words=lambda: str(run.state()))
        assert state.status is Status.RUNNING and "Unable to contact slurm controller" in state.reason
        step = state.step
        assert until(lambda: run.state().step > step), "it is still followed"
    finally:
        (cluster.folder / "squeue.broken").unlink()
    until(lambda: "squeue" not in run.state().reason)
    assert run.cancel(timeout=600).status is Status.CANCELLED


def test_a_suspended_job_is_shown_as_suspended_and_goes_on(submit, cluster):
    run = submit("stream")
    until(lambda: run.state().status is Status.RUNNING, words=lambda: str(run.state()))
    assert cluster.ask("scontrol", "suspend", run.job).returncode == 0
    state = until(lambda: (s := run.state()).status is Status.SUSPENDED and s, words=lambda: str(run.state()))
    assert not state.done and "suspended by Slurm" in state.reason
    assert cluster.ask("scontrol", "resume", run.job).returncode == 0
    until(lambda: run.state().status is Status.RUNNING and run.state().step > state.step)
    assert run.cancel(timeout=600).status is Status.CANCELLED


def test_a_job_says_what_is_slow_before_its_ranks_report(submit, cluster, tmp_path, monkeypatch):
    """Its login shell, a line of its setup, its ranks' Python: each waits here until the test has seen it told."""
    monkeypatch.setattr(slow_start, "SLOW_START_S", 1.0)
    start_file, python = Path(cluster.environment["HOME"], ".bash_profile"), tmp_path / "python"
    wait = f"while [ ! -e {tmp_path}/$0.over ]; do sleep 0.1; done"
    start_file.write_text(wait.replace("$0", "login"))
    (tmp_path / "setup.sh").write_text(f"echo bringing an image\n{wait.replace('$0', 'setup')}")
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {wait.replace("$0", "ranks")}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stages = {
        "login": r"its login shell has read start files, such as ~/.bash_profile, for \d+ s: what is slow there\?",
        "setup": rf"its batch script is in `launch.setup: source {tmp_path}/setup.sh` for \d+ s: what is slow there\?; "
        "its last words are: bringing an image",
        "ranks": r"ranks 0 to 3 started \d+ s ago and reported nothing yet: Python may be read from a slow disk",
    }
    try:
        run = submit("places", **{"launch.setup": [f"source {tmp_path}/setup.sh"], "launch.python": str(python)})
        for stage, words in stages.items():
            until(lambda words=words: re.search(words, run.state().reason), words=lambda: f"{run.state()}")
            (tmp_path / f"{stage}.over").touch()
    finally:
        start_file.unlink()
    assert run.wait(600).ok, f"{run.state()}\n{run.logs(0)}"


def test_a_node_that_cannot_see_the_folder_is_named_so(submit, cluster, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    os.chown(hidden, 65534, 65534)
    words = {NODES[1]: "in start; can its node see launch.folder?", NODES[0]: "put launch.folder where all nodes can"}
    for node in NODES[1], NODES[0]:
        cluster.start_node(node, blind=True)
        until(lambda: set(cluster.nodes().values()) == {"idle"}, words=cluster.words)
        changes = {"launch.folder": str(hidden), "launch.name": f"without-{node}", "launch.silence_s": 10}
        run = submit("hang", **changes)
        state = run.wait(600)
        assert state.status is Status.FAILED and words[node] in state.reason, f"{state}\n{run.logs(0)[:2000]}"
    for node in NODES:
        cluster.start_node(node)
    until(lambda: set(cluster.nodes().values()) == {"idle"}, words=cluster.words)


def test_a_node_name_without_an_address_is_the_reason_and_launch_host_the_way_out(submit, cluster):
    cluster.start_node(NOWHERE)
    there = {"launch.sbatch": [f"nodelist={NOWHERE},{NODES[1]}"]}
    try:
        until(lambda: cluster.nodes().get(NOWHERE) == "idle", words=cluster.words)
        state = submit("places", **there).wait(600)
        assert state.status is Status.FAILED
        assert f"OSError: no rank reaches {NOWHERE}: '{NOWHERE}' has no address on " in state.reason, state
        assert "by launch.host, such as {host}i" in state.reason and "launch.folder" not in state.reason
        run = submit("places", **there, **{"launch.name": "suffix", "launch.host": "{host}7f.4"})
        assert run.wait(600).ok, f"{run.state()}\n{run.logs(3)}"
        assert " MASTER_ADDR=127.0.0.4 " in run.logs(0) and " MASTER_ADDR=127.0.0.4 " in run.logs(3), "its address"
    finally:
        cluster.forget_node(NOWHERE)


def test_a_run_whose_job_slurm_has_forgotten_is_lost(submit):
    run = submit("places")
    assert run.wait(600).ok
    (run.path / "logs/ranks.end").unlink()
    for rank in range(4):
        (run.path / f"logs/rank{rank}.json").write_text('{"state": "running", "time": 0}')
    (run.path / "status.json").write_text('{"status": "QUEUED", "job": "999999"}')
    os.utime(run.path / "status.json", (1, 1))
    state = run.wait(600)
    assert state.status is Status.LOST and state.reason.startswith("Slurm no longer knows job 999999"), state


def test_a_run_whose_time_is_up_is_told_so(timed, cluster):
    state = timed.wait(600)
    assert state.status is Status.FAILED and state.step > 0
    assert state.reason == "the time limit was reached; raise launch.timeout_min"
    assert slurm_log.state_in_log(Snapshot(timed.path).log(0)) == "TIMEOUT", "known also where Slurm has forgotten it"


def test_a_folder_that_names_another_job_cannot_touch_it(submit, cluster, tmp_path, capsys):
    """Somebody hands a folder over; who cancels or drills it has a job of their own."""
    own = submit("polite", **{"launch.timeout_min": 10})  # longer than this takes where Slurm is slow
    for rank in range(4):
        until(lambda rank=rank: "life 0 step 2" in own.logs(rank), words=lambda: str(own.state()))
    handed = tmp_path / "handed"
    shutil.copytree(own.path, handed)
    for logs in ("copied", "linked"):
        if logs == "linked":
            shutil.rmtree(handed / "logs")
            (handed / "logs").symlink_to(own.path / "logs")
        for job in (own.job, "--user=root", f"{own.job} {own.job}", "--me"):
            write_json(handed / "status.json", {"status": "QUEUED", "job": job})
            for command in ("drill", "cancel"):
                cli.main([command, str(handed)])
            (handed / "cancel").unlink(missing_ok=True)
            said = capsys.readouterr().err
            assert said.count(f"the folder names job {own.job}, whose batch script is {own.path}") == 2, said
    assert "life 0" in own.logs(0) and own.state().status in (Status.STARTING, Status.RUNNING), own.state()
    assert cluster.ask("squeue", "--noheader", "--format=%i %T").stdout == f"{own.job} RUNNING\n"
    own.drill()
    until(lambda: (own.path / "logs/ranks.preempted").exists(), words=lambda: own.logs(0))
    assert own.cancel().status is Status.CANCELLED


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


OPENER = """
import os, sys
import mmfsdp.params, mmfsdp.kit.run.slurm.slurm_log
from mmfsdp import Run
os.setuid(65534)
run = Run.open(sys.argv[1])
print(run.state(), run.logs(0), run.metrics(), run.result(), run.events(), run.params.launch.name)
"""


def test_somebody_elses_run_is_read_without_unpickling_and_without_writing(submit, tmp_path):
    run = submit("places")
    assert run.wait(600).ok
    for pickled in (run.path / "logs").glob("*.pkl"):
        assert stat.S_IMODE(pickled.stat().st_mode) == 0o600, pickled
        pickled.write_bytes(pickle.dumps(Bomb()))
    (run.path / "status.json").write_text('{"status": "QUEUED", "job": "1", "submitted": 0}')
    for folder in (run.path, *run.path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    subprocess.run(["chmod", "-R", "a+rX", run.path], check=True)
    done = subprocess.run([sys.executable, "-c", OPENER, str(run.path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("COMPLETED") and "RANK=0" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "exploded").exists()
    sources = [path.read_text() for path in (ROOT / "mmfsdp/kit/run").rglob("*.py")]
    unpickling = ("pickle.load", ".result()", ".results()", "result_pickle")
    assert not [word for word in unpickling for source in sources if word in source]


def test_accounting_knows_what_squeue_has_forgotten(accounted, submit):
    refused = submit("places", **{"launch.account": "nope"})
    assert "Invalid account" in refused.wait(600).reason
    run = submit("stream", **{"launch.account": "lab", "launch.slurm_cluster": "test"})
    until(lambda: (run.path / "logs/rank0.json").exists(), words=lambda: str(run.state()))
    number, _, cluster = run.job.partition(";")
    assert cluster == "test" and f"job {number} of cluster test" in run.state().reason, run.state()
    accounted.ask("scancel", number)
    until(lambda: number not in accounted.ask("squeue", "--states=all", "--noheader", "--format=%i").stdout)
    state = run.wait(600)
    assert state.status is Status.CANCELLED and state.reason.endswith("the cluster's administrators (by 0)")


def test_a_job_whose_ranks_are_interrupted_is_not_complete(submit, cluster):
    """A node is set down, the ranks end with exit code 0, and the batch script outlives them.

    srun ends with 0, or with 143 where Slurm's SIGTERM reached it before its ranks had ended.
    """
    run = submit("vanishes", **{"launch.setup": ["trap : TERM"]})
    until(lambda: "step 2" in run.logs(0) and "step 2" in run.logs(3), words=lambda: f"{run.state()}\n{run.logs(0)}")
    cluster.ask("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    try:
        until((run.path / "logs/ranks.end").exists, words=lambda: run.logs(0))
        code = until((run.path / "logs/ranks.end").read_text)  # the shell makes the file before it writes
        assert int(code) in (0, 128 + signal.SIGTERM), run.logs(0)
        assert not run.state().done
        state = until(lambda: (s := run.state()).reason.count(" waits") and s, words=lambda: str(run.state()))
        assert state.status is Status.QUEUED, state
    finally:
        # As after a reboot. A node that is only set up again may still have a step of the first life to end: Slurm then
        # takes that end for the second life's, and the job has one node of two.
        cluster.start_node(NODES[1])
    until(lambda: cluster.release() or "life 1" in run.logs(3), words=lambda: f"{run.state()}\n{run.logs(0)}")
    assert run.cancel(timeout=600).status is Status.CANCELLED


def test_a_job_that_ends_before_its_ranks_report_their_end_is_not_complete(submit):
    run = submit("leaves", **{"launch.name": "leaves"})
    state = run.wait(600)
    words = "the job ended before ranks 1, 2, 3 finished: interrupted, as by a node that was set down; resume it"
    assert state.status is Status.FAILED and state.reason == words
