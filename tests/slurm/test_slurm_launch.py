"""Runs on a real Slurm of two nodes: what they are given, what is seen of them, and how they end."""

import re
import stat
import sys

import pytest

from mmfsdp import Run, sweep
from mmfsdp.kit.run.files.folder import read_json
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.slurm import slurm_queue as queue
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.kit.run.state import is_run
from mmfsdp.kit.run.trust import check_trusted
from tests.slurm.conftest import light
from tests.waiting import until

pytestmark = pytest.mark.real


def test_ranks_are_placed_and_the_batch_file_is_what_was_shown(submit, tmp_path, timed):
    changes = {"launch.gpus_per_node": 2, "launch.cpus_per_task": 3, "train.device": "auto", "launch.name": "a"}
    shown = sbatch_text(light(tmp_path, **changes))
    wrapped = {
        "launch.python": f"setpriv --no-new-privs {sys.executable}",
        "launch.setup": ["export PLACE=b", "export NCCL_SOCKET_IFNAME=ib0"],
    }
    runs = [submit("places", **changes), submit("places", **{"launch.name": "b"} | wrapped)]
    ports = set()
    for run in runs:
        state = run.wait(600)
        assert state.ok, f"{state}\n{run.logs(0)}"
        for rank in range(4):
            words, port = run.logs(rank).splitlines()
            gpus, threads, place, nccl = ("0,1", 3, None, "=lo") if run.name == "a" else ("", 1, "b", "ib0")
            assert words == (
                f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
                f"OMP_NUM_THREADS={threads} CUDA_VISIBLE_DEVICES={gpus} PLACE={place} "
                f"GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME={nccl} HF_HUB_OFFLINE=1 node=127.0.0.{1 + rank // 2}"
            )
            ports.add((run.name, port))
    assert len({name for name, _ in ports}) == len(ports) == len({port for _, port in ports}) == 2
    (submitted,) = (runs[0].path / "logs").glob("*_submission.sh")
    assert submitted.read_text() == shown
    assert stat.S_IMODE(runs[0].path.stat().st_mode) == 0o700


def test_no_other_machine_reaches_the_ranks_of_a_job_of_one_node(submit):
    run = submit("listen", **{"launch.nodes": 1, "launch.ranks": 2})
    state = run.wait(600)
    assert state.ok, f"{state}\n{run.logs(0)}"
    for rank in range(2):
        assert "listens at ['127.0.0.1']" in run.logs(rank)


def test_a_run_is_followed_and_cancelled_from_a_process_on_another_node(submit, cluster):
    run = submit("stream")
    until(lambda: run.state().step > 60, words=lambda: str(run.state()))
    code = (
        "import sys; from mmfsdp import Run; r = Run.open(sys.argv[1]); print(r.state().status, r.logs(3)); r.cancel()"
    )
    there = ("srun", "--nodelist=127.0.0.2", "--overlap", sys.executable, "-c", code, str(run.path))
    done = cluster.ask(*there)
    assert done.returncode == 0 and re.match(r"RUNNING at [\d.]+\n", done.stdout), done.stdout + done.stderr
    assert run.state().status is Status.CANCELLED and run.wait() == run.cancel()
    until(lambda: not [p for p in cluster.processes() if str(run.path) in " ".join(p.info["cmdline"] or ())])


LAUNCHER = """
import sys
from mmfsdp import RunParams, launch
run = launch(RunParams.from_yaml(sys.argv[1]), entry="tests.launch_entries:places")
print(run.wait(600))
"""


def test_a_python_in_a_path_with_a_space_submits(cluster, tmp_path):
    (tmp_path / "a b").symlink_to(sys.prefix)
    light(tmp_path).to_yaml(tmp_path / "params.yaml")
    done = cluster.ask(str(tmp_path / "a b/bin/python"), "-c", LAUNCHER, str(tmp_path / "params.yaml"), timeout=600)
    assert done.stdout.startswith("COMPLETED"), done.stdout + done.stderr
    (batch,) = (tmp_path / "first/logs").glob("*_submission.sh")
    assert f"'{tmp_path}/a b/bin/python' -u -m submitit" in batch.read_text()


def test_a_python_without_the_package_is_the_reason(submit):
    state = submit("places", **{"launch.python": f"{sys.executable} -S"}).wait(600)
    words = r"rank \d on 127.0.0.\d: Exited with exit code 1 before it started: .*No module named 'submitit'.*"
    assert state.status is Status.FAILED and re.fullmatch(words, state.reason), state


def test_a_waiting_run_says_why_and_is_cancelled_at_once(submit, cluster):
    run = submit("stream", **{"launch.partition": "short", "launch.timeout_min": 30})
    state = until(lambda: (s := run.state()).reason.count("PartitionTimeLimit") and s, words=lambda: str(run.state()))
    assert state.status is Status.QUEUED
    assert run.cancel().status is Status.CANCELLED


ENDS = {
    "raises": (Status.FAILED, 2, "rank 2: RuntimeError: the cause", 'raise RuntimeError("the cause")'),
    "die": (Status.FAILED, 1, "rank 1 on 127.0.0.1: Killed", "last words of rank 1"),
    "hang": (Status.FAILED, 3, "rank 3 does not answer (in step 3 compute)", "in hang_here"),
}


def test_every_end_is_told_with_its_cause(submit, cluster):
    silence = {"launch.silence_s": 10}  # for the one that hangs: a rank may not begin five times as late as that
    runs = {entry: submit(entry, **(silence if entry == "hang" else {})) for entry in ENDS}
    outside = submit("stream")
    until(lambda: outside.state().step > 0, words=lambda: str(outside.state()))
    cluster.ask("scancel", str(outside.job))
    for entry, (status, rank, reason, traceback) in ENDS.items():
        state = runs[entry].wait(600)
        assert (state.status, state.rank) == (status, rank), f"{entry}: {state}\n{runs[entry].logs(0)}"
        assert reason in state.reason and traceback in state.traceback, f"{entry}: {state}\n{state.traceback}"
        assert read_json(runs[entry].path / "status.json")["status"] == "FAILED", "the folder keeps it"
    state = outside.wait(600)
    assert state.status is Status.CANCELLED and "by scancel" in state.reason


def test_a_refusal_is_in_slurms_words(submit):
    run = submit("stream", **{"launch.partition": "nope"})
    state = run.wait(600)
    assert state.status is Status.FAILED
    assert state.reason.startswith("Slurm refuses it: sbatch: error: ") and "invalid partition" in state.reason
    assert state.reason.endswith("; change launch.partition")


def test_a_line_before_the_ranks_that_fails_is_the_reason(submit):
    lines = {
        "setup": (["export A=b", "source $A/file"], "setup: source $A/file failed with exit code 1"),
        "python": ("/no/python", "python: /no/python failed with exit code 127"),
        "modules": (["cuda/1"], "modules: module load cuda/1 failed with exit code 127"),
    }
    runs = {f: submit("places", **{"launch.name": f, f"launch.{f}": value}) for f, (value, _) in lines.items()}
    for field, (_, words) in lines.items():
        state, fix = runs[field].wait(600), f"correct launch.{field}; its output is in the log"
        assert state.status is Status.FAILED and state.reason == f"launch.{words}; {fix}", state
        assert (runs[field].path / "logs/ranks.end").read_text().strip() == words.split()[-1]


def test_a_preempted_job_is_requeued_unless_cancelled(submit, cluster, monkeypatch):
    again, outside = submit("polite", **{"launch.name": "again"}), submit("polite", **{"launch.name": "outside"})
    for run in (again, outside):
        for rank in range(4):
            until(lambda run=run, rank=rank: "life 0 step 2" in run.logs(rank), words=lambda run=run: str(run.state()))
    with monkeypatch.context() as patch:
        patch.setattr(queue, "SQUEUE_INTERVAL_S", 1000.0)  # the ranks' own report stands until Slurm is asked again
        cluster.ask("scancel", "--signal=USR2", again.job)
        cluster.ask("scancel", outside.job)
        until(lambda: again.state().reason == f"job {again.job}: preempted; requeued")
    state = until(
        lambda: (s := again.state()).reason.count("BeginTime") and s,
        words=lambda: f"{again.state()}\n{cluster.ask('squeue', '-t', 'all').stdout}\n{again.logs(0)}",
    )
    assert state.status is Status.QUEUED and " waits" in state.reason and "expected to start at" in state.reason
    cluster.release()
    until(lambda: "life 1 step 2" in again.logs(0), words=lambda: f"{again.state()}\n{again.logs(0)}")
    assert again.state().status is Status.STARTING and "life 0 step 2" in again.logs(0)
    assert again.cancel().status is Status.CANCELLED
    state = outside.wait(600)
    assert state.status is Status.CANCELLED and "by scancel" in state.reason
    assert "life 1" not in outside.logs(0)


def test_an_edit_changes_nothing_of_jobs_that_wait(submit, cluster, tmp_path, monkeypatch):
    """Of a job, and of the members of a job array: each runs its copy of the person's own code."""
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "my_words.py"
    code.write_text("def say(words='as launched'):\n    return words")
    own = {"launch.sbatch": ["hold"], "launch.nodes": 1, "launch.ranks": 1}
    run = submit("call_own_code", **own, **{"train.callbacks": "my_words:say"})
    params = light(tmp_path, **own, **{"launch.name": "both"})
    grid = {"train.callbacks": ["my_words:say", {"call": "my_words:say", "words": "of the second"}]}
    both = sweep(params, grid=grid, at_once=2, entry="tests.launch_entries:call_own_code")
    runs = [run.path, both.path / "000", both.path / "001"]
    until(lambda: all(is_run(path) and Run(path).job for path in runs), words=lambda: f"{run.state()}\n{both}")
    code.write_text("raise RuntimeError('edited')")
    for job in (run.job, Run(runs[1]).job.partition("_")[0]):
        cluster.ask("scontrol", "release", job)
    for path, words in zip(runs, ["as launched", "as launched", "of the second"], strict=True):
        state = Run(path).wait(600)
        assert state.status is Status.COMPLETED, f"{state}\n{state.traceback}"
        assert Run(path).logs().splitlines()[-1] == words
        assert (path / "code/my_words.py").read_text().startswith("def say")
        check_trusted(path, Run(path).params)
