"""The run folder: whole files, tolerant readers, and a state that is true whatever a crash has left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mmfsdp import ParamError, RunParams
from mmfsdp.kit.run import local
from mmfsdp.kit.run.files.folder import MetricsWriter, last_row, metrics_path, read_json, read_metrics, write_json
from mmfsdp.kit.run.files.run_record import RunRecord, Status, check_entry
from mmfsdp.kit.run.rank_count import with_ranks
from mmfsdp.kit.run.start import git_commit, make_folder, make_record
from mmfsdp.kit.run.state import run_state
from mmfsdp.params import LaunchParams


def record(**changes) -> RunRecord:
    """Of a run whose supervisor is this very process."""
    mine = RunRecord(
        executor="local",
        entry="tests.launch_entries:talk",
        ranks=2,
        steps=5,
        threads=1,
        timeout_min=1,
        device="cpu",
        host=socket.gethostname(),
        pid=os.getpid(),
        start=local.process_start(os.getpid()),
        identity="this one",
        created=time.time(),
        version="0",
    )
    return replace(mine, **changes)


def dead() -> dict[str, float]:
    """A process id that no process has any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    start = local.process_start(process.pid) or time.time()
    process.wait()
    return {"pid": process.pid, "start": start}


def a_finished_run(folder: Path) -> Path:
    """A run that has completed."""
    (folder / "logs").mkdir(parents=True)
    (folder / "params.yaml").write_text("{}\n")
    write_json(folder / "status.json", {"status": "COMPLETED"})
    record().write(folder)
    return folder


def test_of_eight_launches_with_replace_one_replaces_the_run_and_the_others_are_told_so(tmp_path):
    def launch(_) -> str:
        start.wait()
        try:
            make_folder(params)
        except ParamError as error:
            return str(error)
        return "made"

    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            start, params = threading.Barrier(8), LaunchParams(folder=str(tmp_path / str(turn)), replace=True)
            folder = a_finished_run(tmp_path / f"{turn}/first")
            answers = sorted(pool.map(launch, range(8)))
            assert answers.pop() == "made" and "made" not in answers, answers
            for words in answers:
                assert "the run " in words and ("is being launched" in words or "exists already (" in words), words
            assert {path.name for path in folder.parent.iterdir()} == {"first", "first-1"}
            assert (folder.parent / "first-1/run.json").exists() and not (folder / "run.json").exists()


def test_readers_of_a_file_see_it_whole(tmp_path):
    path, stop = tmp_path / "value.json", threading.Event()
    write_json(path, {"n": 0, "text": ""})

    def write() -> None:
        for n in range(60):
            write_json(path, {"n": n, "text": "x" * 50_000})
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not stop.is_set():
        seen.append(json.loads(path.read_text())["n"])
    writer.join()
    assert seen == sorted(seen)
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]
    assert read_json(path)["n"] == 59


def test_half_rows_and_damaged_rows_are_skipped(tmp_path):
    assert read_metrics(tmp_path) == [] and last_row(tmp_path) == {}
    MetricsWriter(tmp_path).write({"step": 1, "loss": float("nan")})
    MetricsWriter(tmp_path, 1).write({"step": 9})
    path = metrics_path(tmp_path)
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    MetricsWriter(tmp_path).write({"step": 3})  # after a crash: the torn line spoils nothing that follows
    with open(path, "ab") as file:
        file.write(b"\x00\x00\xff\n17\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    assert read_metrics(tmp_path, 1) == [{"step": 9}]
    MetricsWriter(tmp_path).write({"step": 4, "more": "x" * 30_000})
    MetricsWriter(tmp_path).write({"step": 5})
    assert [row["step"] for row in read_metrics(tmp_path, last_bytes=1000)] == [5] and last_row(tmp_path)["step"] == 5
    MetricsWriter(tmp_path, after=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_an_entry_is_one_of_few(monkeypatch):
    monkeypatch.delenv("MMFSDP_ENTRIES", raising=False)
    assert check_entry("train") == "train"
    former = "mmfsdp.train.evaluate:train_and_caption"
    assert check_entry(former) == "train_and_caption", "run.json of a run before entries had names"
    for entry in ("os:system", "mmfsdp.kit.train:build", "somebody.elses:code", ""):
        with pytest.raises(ParamError, match="entry: .* is not an entry of mmfsdp"):
            check_entry(entry)


@pytest.mark.real
def test_a_process_is_known_by_its_id_and_start():
    start = local.process_start(os.getpid())
    assert local.is_same_process(os.getpid(), start)
    assert not local.is_same_process(os.getpid(), start - 3600), "another process has been given the id"
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert local.process_start(zombie.pid) is None
    zombie.wait()


SLEEPER = "import time; print(flush=True); time.sleep(60)"  # until it prints, its environment may not be readable


@pytest.mark.real
@pytest.mark.parametrize("leader_lives", [True, False])
def test_only_processes_that_say_so_themselves_are_of_a_run(tmp_path, leader_lives):
    """Also after their supervisor died. run.json may name any process of whoever cancels the run."""
    own, copy = tmp_path / "own", tmp_path / "copy"
    own.mkdir()
    copy.mkdir()
    end = "input()" if leader_lives else ""
    child = f"from subprocess import *; Popen([{sys.executable!r}, '-c', {SLEEPER!r}], stdout=PIPE).stdout.readline()"
    environment = os.environ | {"MMFSDP_RUN": "this one", "MMFSDP_FOLDER": str(own)}
    start, options = time.time(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    leader = subprocess.Popen([sys.executable, "-c", f"{child}; print(flush=True); {end}"], env=environment, **options)
    assert leader.stdout.readline()
    if not leader_lives:
        leader.wait()
    run = record(pid=leader.pid, start=start)
    assert len(local.processes_of(run, own)) == 1 + leader_lives
    assert local.processes_of(replace(run, identity="another"), own) == []
    assert local.processes_of(run, copy) == [], "a copy of its run.json"
    assert local.stop_processes(run, copy) and len(local.processes_of(run, own)) == 1 + leader_lives
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, start_new_session=True)
    assert stranger.stdout.readline()
    named = {"pid": stranger.pid, "start": local.process_start(stranger.pid)}
    assert local.stop_processes(record(**named), copy)
    local.signal_rank(copy, record(**named), named, signal.SIGUSR2)
    assert stranger.poll() is None
    stranger.kill()
    stranger.communicate()
    assert local.stop_processes(run, own)
    assert local.processes_of(run, own) == []
    leader.communicate()


HALF_WRITTEN = {
    "nothing": ({}, Status.QUEUED),
    "params only": ({"params.yaml": "{}"}, Status.QUEUED),
    "torn record": ({"run.json": '{"ranks": 2, "ho'}, Status.QUEUED),
    "record only": ({"run.json": record()}, Status.QUEUED),
    "strange status": ({"run.json": record(), "status.json": '{"status": "HAPPY"}'}, Status.QUEUED),
    "no step": ({"run.json": record(), "status.json": '{"status": "STARTING"}'}, Status.STARTING),
    "a step": (
        {"run.json": record(), "status.json": '{"status": "STARTING"}', "metrics.jsonl": '{"step": 3}\n{"ste'},
        Status.RUNNING,
    ),
    "finished": ({"run.json": record(), "status.json": '{"status": "COMPLETED"}'}, Status.COMPLETED),
    "gone": ({"run.json": record(**dead()), "status.json": '{"status": "STARTING"}'}, Status.LOST),
    "id given away": ({"run.json": record(start=1.0), "status.json": '{"status": "STARTING"}'}, Status.LOST),
    "gone, cancelled": (
        {"run.json": record(**dead()), "cancel": "", "metrics.jsonl": '{"step": 5}\n'},
        Status.CANCELLED,
    ),
    "gone, all done": (
        {"run.json": record(**dead()), "logs/rank0.json": '{"state": "done"}', "logs/rank1.json": '{"state": "done"}'},
        Status.COMPLETED,
    ),
    "gone, cancelled after its last step": (
        {"run.json": record(**dead(), created=1.0), "cancel": "", "result.json": "{}"},
        Status.COMPLETED,
    ),
    "gone, half done": ({"run.json": record(**dead()), "logs/rank0.json": '{"state": "done"}'}, Status.LOST),
    "gone, failed": (
        {
            "run.json": record(**dead()),
            "logs/rank0.json": '{"rank": 0, "state": "failed", "time": 2, "error": "Gone: peer", "traceback": "x"}',
            "logs/rank1.json": '{"rank": 1, "state": "failed", "time": 1, "error": "Bad: cause", "traceback": "y"}',
        },
        Status.FAILED,
    ),
    "elsewhere": ({"run.json": record(host="another", created=time.time() + 10_000)}, Status.QUEUED),  # by its clock
}


@pytest.mark.parametrize("name", HALF_WRITTEN)
def test_the_state_of_any_folder_is_known(tmp_path, name):
    files, expected = HALF_WRITTEN[name]
    (tmp_path / "logs").mkdir()
    for file, content in files.items():
        content.write(tmp_path) if isinstance(content, RunRecord) else (tmp_path / file).write_text(content)
    state = run_state(tmp_path)
    assert state.status is expected, state
    assert state.done == (expected not in (Status.QUEUED, Status.STARTING, Status.RUNNING))
    if expected is Status.RUNNING:
        assert (state.step, state.steps) == (3, 5)
    if name == "gone, failed":
        assert (state.rank, state.traceback) == (1, "y") and "Bad: cause" in str(state)
    if expected is Status.LOST or name == "elsewhere":
        assert state.reason


READ_BY_RUNS = ["run.json", "status.json", "metrics.jsonl", "logs/rank0.json", "logs/rank0.beat", "logs/supervisor.log"]
LIST = "import sys; from mmfsdp.kit.run.state import find_runs, runs_table; print(runs_table(find_runs(sys.argv[1])))"


@pytest.mark.real
def test_no_folder_stops_the_list_of_runs(tmp_path):
    """A FIFO, a link without end, a strange value: the other runs are listed all the same."""
    good = {"run.json": record(**dead()), "status.json": '{"status": "COMPLETED"}'}
    folders = {"good": good}
    for executor in ("local", "slurm"):
        for file in READ_BY_RUNS:
            for kind in ("fifo", "zero"):
                name = f"{executor}-{kind}-{file.replace('/', '-')}"
                job = {"status.json": '{"status": "QUEUED", "job": "99"}', "logs/ranks.end": "1"}
                folders[name] = {"run.json": record(**dead(), executor=executor), **job, file: kind}
    values = json.loads(json.dumps(asdict(record(**dead()))))
    for key, value in {"ranks": 10**12, "created": "noon", "executor": "moon", "steps": [], "pid": "x"}.items():
        folders[f"strange-{key}"] = {"run.json": json.dumps(values | {key: value})}
    folders["strange-status"] = {"run.json": record(**dead()), "status.json": '{"status": "FAILED", "reason": 7}'}
    folders["strange-deep"] = {"run.json": "[" * 100_000}
    folders["strange-row"] = {"run.json": record(**dead()), "metrics.jsonl": '{"step": "x", "loss": []}'}
    for name, files in folders.items():
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "params.yaml").write_text("{}")
        for file, content in files.items():
            path = tmp_path / name / file
            if isinstance(content, RunRecord):
                content.write(tmp_path / name)
            elif content in ("fifo", "zero"):
                path.unlink(missing_ok=True)
                os.mkfifo(path) if content == "fifo" else path.symlink_to("/dev/zero")
            else:
                path.write_text(content)
    done = subprocess.run([sys.executable, "-c", LIST, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines()[1:] if not line.startswith(" ")]  # reasons are indented
    listed = {line.split()[0]: line for line in rows}
    assert set(listed) == set(folders) and "COMPLETED" in listed["good"]
    assert "cannot be read" not in done.stdout, "values of another type are left out"


GONE = dead()
BAD = float("nan")
ENDS = {
    "all well": ([{"loss": 1.0}], True, "COMPLETED, step 8 of 8"),
    "a loss": (
        [{"loss": BAD, "grad_norm": BAD, "skipped_steps": 7, "skipped_in_a_row": 7}] * 7,
        False,
        "COMPLETED, 7 of 8 steps skipped: loss not finite since step 2",
    ),
    "a norm": (
        [{"loss": 1.0, "grad_norm": float("inf"), "skipped_steps": 3, "skipped_in_a_row": 2}] * 2,
        False,
        "COMPLETED, 3 of 8 steps skipped: gradient norm not finite since step 7",
    ),
    "fp16 finds its loss scale": (
        [{"loss": 1.0, "grad_norm": BAD, "skipped_steps": 3, "skipped_in_a_row": 2, "loss_scale": 2.0}] * 2,
        True,
        "COMPLETED, 3 of 8 steps skipped",
    ),
    "both": (
        [{"loss": loss, "grad_norm": BAD, "skipped_steps": 2, "skipped_in_a_row": 2} for loss in (1.0, BAD)],
        False,
        "COMPLETED, 2 of 8 steps skipped: loss or gradient norm not finite since step 7",
    ),
    "the last step": (
        [{"loss": float("inf"), "grad_norm": BAD, "skipped_steps": 1, "skipped_in_a_row": 1}],
        False,
        "COMPLETED, 1 of 8 steps skipped: loss not finite in step 8",
    ),
    "a step between": (
        [{"loss": 1.0, "grad_norm": 1.0, "skipped_steps": 1, "skipped_in_a_row": 0}],
        True,
        "COMPLETED, 1 of 8 steps skipped",
    ),
    "without a count in a row": (
        [{"loss": BAD, "skipped_steps": 7}],
        False,
        "COMPLETED, 7 of 8 steps skipped: loss not",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_completed_run_says_what_was_not_finite(tmp_path, name):
    rows, ok, words = ENDS[name]
    record(**GONE, steps=8).write(tmp_path)
    write_json(tmp_path / "status.json", {"status": "COMPLETED"})
    writer = MetricsWriter(tmp_path)
    for step, row in enumerate(rows, 9 - len(rows)):
        writer.write({"step": step, **row})
    state = run_state(tmp_path)
    assert str(state).startswith(words) and state.ok is ok and state.status is Status.COMPLETED, state


@pytest.mark.parametrize("status", ["COMPLETED", "FAILED"])
def test_only_a_completed_run_says_which_callback_has_ended_it(tmp_path, status):
    record(**GONE, steps=8).write(tmp_path)
    write_json(tmp_path / "result.json", {"stopped": "stopped by my_watch:Watch: enough"})  # a resume leaves it there
    write_json(tmp_path / "status.json", {"status": status})
    MetricsWriter(tmp_path).write({"step": 3, "loss": 1.0})
    reason = ": stopped by my_watch:Watch: enough" if status == "COMPLETED" else ""
    assert str(run_state(tmp_path)) == f"{status}, step 3 of 8{reason}"


def test_a_run_that_goes_on_says_that_its_loss_is_not_finite(tmp_path):
    record(steps=8).write(tmp_path)
    write_json(tmp_path / "status.json", {"status": "STARTING"})
    MetricsWriter(tmp_path).write({"step": 3, "loss": BAD, "skipped_steps": 2, "skipped_in_a_row": 2})
    assert str(run_state(tmp_path)) == "RUNNING, step 3 of 8: 2 of 3 steps skipped: loss not finite since step 2"


def test_a_launch_that_was_cut_short_is_lost_after_a_while(tmp_path):
    (tmp_path / "params.yaml").write_text("{}")
    os.utime(tmp_path, (1, 1))
    assert run_state(tmp_path).status is Status.LOST
    assert run_state(tmp_path / "nowhere").status is Status.LOST


def test_a_run_on_another_machine_is_lost_when_it_falls_silent(tmp_path):
    write_json(tmp_path / "status.json", {"status": "STARTING"})
    record(host="another", created=1.0).write(tmp_path)
    state = run_state(tmp_path)
    assert state.status is Status.LOST and "another" in state.reason
    record(host="another", created=time.time()).write(tmp_path)
    assert run_state(tmp_path).status is Status.STARTING
    for age_s, status in ((0, Status.STARTING), (600, Status.LOST)):  # whatever the clock of the file server
        for skew_s in (-3600, 3600):
            write_json(tmp_path / "status.json", {"status": "STARTING", "alive": time.time() - age_s})
            os.utime(tmp_path / "status.json", (time.time() + skew_s,) * 2)
            assert run_state(tmp_path).status is status


@pytest.mark.real
def test_run_json_has_the_commit_of_the_folder_it_was_launched_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_commit() == ""
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "--quiet"], check=True)
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert make_record(with_ranks(RunParams()), "x:y", identity="1", pid=os.getpid(), folder=tmp_path).commit == commit
