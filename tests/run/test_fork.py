"""Forks of a process are processes of their own; the ranks of a run are forks, of a warm process if one is there."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from tiny_run import tiny_run

from mmfsdp import launch
from mmfsdp.kit.run.files.folder import read_metrics
from mmfsdp.kit.run.files.run_record import rank_status
from mmfsdp.kit.run.local import belongs_to, process_start, processes_of
from mmfsdp.kit.run.ranks import warm
from mmfsdp.kit.run.ranks.address import reserved_port
from mmfsdp.params import LaunchParams, RunParams
from mmfsdp.params.launching import JOB_SIGNALS
from tests.processes import in_fresh_python
from tests.run.test_runs import record
from tests.waiting import light, runs_of, until

FORKED = """
import atexit, json, os, random, signal, sys, threading, time
from pathlib import Path
import numpy
from mmfsdp.kit.run.ranks.fork import fork, may_fork, set_output

assert may_fork()
signal.signal(signal.SIGTERM, lambda number, frame: print("the parent's handler"))
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
atexit.register(print, "at exit", flush=True)

def work(folder, way):
    with open(folder / f"{way}.log", "wb") as log:
        set_output(log.fileno())
    values = {"signals": [repr(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]}
    values["random"] = [random.random(), numpy.random.rand()]
    values["name"] = __import__("multiprocessing").current_process().name
    print(json.dumps(values))
    print("not flushed", end="")
    print("an error", file=sys.stderr)
    if way == "raises":
        raise ValueError("planted")
    if way == "exits":
        raise SystemExit(3)
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread ended"))).start()

folder = Path(sys.argv[1])
for way in ("ends", "raises", "exits", "is killed"):
    child = fork(lambda: work(folder, way))
    while child.poll() is None:
        time.sleep(0.01)
    (folder / f"{way}.code").write_text(str(child.poll()))
"""


@pytest.mark.real
def test_a_fork_begins_and_ends_as_a_new_python_does(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED, tmp_path], check=True, capture_output=True)
    codes = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.code")}
    assert codes == {"ends": 0, "raises": 1, "exits": 3, "is killed": -signal.SIGKILL}
    logs = {way: (tmp_path / f"{way}.log").read_text() for way in codes}
    values = {way: json.loads(log.splitlines()[0]) for way, log in logs.items()}
    for value in values.values():
        handlers = [signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN]
        assert value["signals"] == [repr(handler) for handler in handlers]
        assert value["name"] == "MainProcess"
    for number in range(2):
        assert len({value["random"][number] for value in values.values()}) == len(values)
    assert logs["ends"].endswith("not flushedan error\nthread ended\nat exit\n")
    assert "ValueError: planted" in logs["raises"] and logs["raises"].endswith("at exit\n")
    assert logs["exits"].endswith("an error\nat exit\n") and logs["is killed"].endswith("an error\n")


def test_a_process_with_threads_is_not_forked():
    code = """
import threading
from mmfsdp.kit.run.ranks.fork import may_fork
before, end = may_fork(), threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
print(before, may_fork())
end.set()
thread.join()
"""
    assert in_fresh_python(code) == "True False\n"


HELPED = """
import sys, threading, time
from pathlib import Path
from mmfsdp.kit.run.ranks.helpers import start_helper
if sys.argv[2] == "has a thread":
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
start_helper(Path(sys.argv[1]), "watchdog")
print("started", flush=True)
time.sleep(1000)
"""


@pytest.mark.real
@pytest.mark.parametrize("rank", ["is alone", "has a thread"])
def test_the_helper_of_a_rank_is_a_fork_where_it_can_be_and_outlives_the_signals_of_a_job(rank, tmp_path):
    record(ranks=1).write(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HELPED, tmp_path, rank], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    (helper,) = psutil.Process(process.pid).children()
    assert (helper.cmdline() == psutil.Process(process.pid).cmdline()) == (rank == "is alone")
    assert ("watchdog" in helper.cmdline()) == (rank == "has a thread")
    for number in JOB_SIGNALS:
        helper.send_signal(number)
    (tmp_path / "cancel").touch()
    assert process.wait(600) == -signal.SIGKILL, "by its helper"
    until(lambda: process_start(helper.pid) is None)
    process.stdout.close()


@pytest.fixture
def ways(tmp_path, monkeypatch):
    """Three runs of the same parameters: by the warm process, by one that imports for all, by a Python for each."""
    path = warm.socket_path(dict(os.environ))
    until(path.exists)
    runs = {"warm": launch(tiny_run(tmp_path, **{"launch.name": "warm"}), tell=lambda finding: None)}
    monkeypatch.setenv("NO_WARM_PROCESS_HAS_THIS", "1")
    runs["forks"] = launch(tiny_run(tmp_path, **{"launch.name": "forks"}), tell=lambda finding: None)
    (tmp_path / "threads").mkdir()
    # A module that Python imports at its start, as some profilers have it.
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    (tmp_path / "threads/sitecustomize.py").write_text(thread)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'threads'}:{os.environ['PYTHONPATH']}")
    runs["pythons"] = launch(tiny_run(tmp_path, **{"launch.name": "pythons"}), tell=lambda finding: None)
    return runs, warm.started_here[path]


@pytest.mark.real
def test_each_way_to_start_ranks_trains_the_same_and_says_whose_its_processes_are(ways):
    runs, warm_process = ways
    parents = {}
    words_of = {
        "warm": "fork of the warm process",
        "forks": "fork of the process that imports",
        "pythons": "rank 0 of 2",
    }
    for way, run in runs.items():
        until(lambda run=run: all(rank_status(run.path, rank) for rank in range(2)))
        ranks = [psutil.Process(rank_status(run.path, rank)["pid"]) for rank in range(2)]
        assert all(belongs_to(rank, run.record, run.path) for rank in ranks), way
        # supervisor, who starts the ranks, the ranks
        assert {run.record.pid, *(rank.pid for rank in ranks)} <= {p.pid for p in processes_of(run.record, run.path)}
        assert os.getsid(ranks[0].pid) == run.record.pid != os.getsid(0)
        parents[way] = [ranks[0].parent().cmdline(), ranks[0].cmdline()]
    assert parents["warm"][0] == parents["warm"][1] == psutil.Process(warm_process.pid).cmdline()
    assert parents["forks"][0] == parents["forks"][1] and parents["forks"][1][-1] == "ranks"
    assert "submitit.core._submit" in parents["pythons"][1]
    losses = {}
    for way, run in runs.items():
        assert str(run.wait(600)) == "COMPLETED, step 6 of 6", way
        assert words_of[way] in run.logs(0), way
        losses[way] = [row["loss"] for row in read_metrics(run.path)]
    assert losses["warm"] == losses["forks"] == losses["pythons"]


@pytest.mark.real
def test_a_run_by_a_warm_process_outlives_it_and_is_cancelled_from_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("ANOTHER_WARM_PROCESS", "1")
    process = warm.start_warm()
    path = warm.socket_path(dict(os.environ))
    assert warm.start_warm() is None, "one for each environment"
    until(path.exists)
    with runs_of(light(tmp_path)) as start:
        run = start("busy")
        until(lambda: run.state().step > 1)
        supervisor = psutil.Process(run.record.pid)
        assert supervisor.ppid() == process.pid
        process.stdin.close()
        process.wait(600)
        assert not path.exists()
        step = run.state().step
        until(lambda: run.state().step > step)
        code = f"from mmfsdp import Run; print(Run.open({str(run.path)!r}).cancel())"
        cancelled = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert cancelled.stdout.startswith("CANCELLED"), cancelled
        until(lambda: not processes_of(run.record, run.path))


@pytest.mark.real
def test_what_a_warm_process_is_asked_wrongly_or_by_nobody_it_survives(tmp_path, monkeypatch):
    monkeypatch.setenv("ANOTHER_WARM_PROCESS", "2")
    process = warm.start_warm()
    path = warm.socket_path(dict(os.environ))
    until(path.exists)
    with open(tmp_path / "log", "wb") as log:
        for content, files in ((b"", []), (b"\0\0\0\1", []), (b"\0\0\0\2{]", [log.fileno()]), (b"\xff" * 4, [0])):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                socket.send_fds(connection, [content or b"x"], files)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):  # it has not read all of it
                    assert connection.recv(100) == b""
        environment = os.environ | {"MMFSDP_RUN": "none", "MMFSDP_FOLDER": str(tmp_path)}
        pid = warm.start_in_warm([str(tmp_path), "start"], log=log.fileno(), environment=environment)
    start = process_start(pid)
    assert start and psutil.Process(pid).environ()["MMFSDP_FOLDER"] == str(tmp_path)
    until(lambda: process_start(pid) is None)
    assert (tmp_path / "log").read_text() == f"{tmp_path} has no run.json for process {pid}\n"
    process.kill()  # its socket stays
    process.wait()
    assert path.exists()
    assert warm.start_in_warm([str(tmp_path), "start"], log=1, environment=dict(os.environ)) is None
    assert not path.exists(), "the next one can be started"


@pytest.mark.real
def test_a_warm_process_ends_when_nobody_has_asked_it_for_long(tmp_path):
    path = Path(tempfile.mkdtemp()) / "warm.sock"
    code = f"from mmfsdp.kit.run.ranks import warm; warm.IDLE_S = 3; warm.serve(warm.Path({str(path)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    until(path.exists)
    assert process.poll() is None
    assert process.wait(600) == 0 and not path.exists()
    path.parent.rmdir()


@pytest.mark.real
def test_a_port_for_ranks_is_given_once_and_rank_0_can_have_it():
    with reserved_port() as port:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        code = f"import socket; socket.create_server(('127.0.0.1', {port})); print('listens')"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "listens\n"
        code = (
            f"import torch.distributed as d; d.TCPStore('127.0.0.1', {port}, 1, True).set('a', '1'); print('listens')"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "listens\n"


def test_a_warm_process_serves_only_what_is_as_it_was_at_its_start(tmp_path, monkeypatch):
    before = warm.key_of(dict(os.environ))
    for same in ("SHLVL", "PYTEST_CURRENT_TEST", "MMFSDP_CACHE", "TOKENIZERS_PARALLELISM"):
        assert warm.key_of(os.environ | {same: "other"}) == before, same
    for other in ("OMP_NUM_THREADS", "HF_HOME", "PYTORCH_ALLOC_CONF", "PATH", "MY_OWN"):
        assert warm.key_of(os.environ | {other: "other"}) != before, other
    package = tmp_path / "mmfsdp"
    shutil.copytree(Path(warm.__file__).parents[3], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(warm, "__file__", str(package / "kit/run/ranks/warm.py"))
    copied = warm.key_of(dict(os.environ))
    with open(package / "core/wrap.py", "a") as file:
        file.write("# edited\n")
    assert warm.key_of(dict(os.environ)) != copied
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        path = warm.socket_path(dict(os.environ))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        path.parent.chmod(0o777)  # somebody else could put a socket there
        assert warm.socket_path(dict(os.environ)) is None
    monkeypatch.undo()
    code = f"import os; os.nice(1)\nfrom mmfsdp.kit.run.ranks import warm\nprint(warm.key_of({dict(os.environ)!r}))"
    assert in_fresh_python(code.replace("os.nice(1)", "os.nice(0)")).strip() == warm.key_of(dict(os.environ))
    assert in_fresh_python(code).strip() != warm.key_of(dict(os.environ))


def test_a_notebook_warms_up_for_local_runs_on_the_cpu_alone(monkeypatch):
    started = []
    monkeypatch.setattr(warm, "start_warm", lambda: started.append(True))
    monkeypatch.setattr("mmfsdp.kit.run.rank_count.DRIVER_FILES", ("/dev/null",))
    local, slurm = RunParams(), RunParams(launch=LaunchParams(executor="slurm"))
    monkeypatch.setenv(warm.SWITCH, "1")
    for params, wanted in ((local, 0), (local.change(**{"train.device": "cpu"}), 1), (slurm, 0)):
        started.clear()
        warm.warm_up(params)
        assert len(started) == wanted, params
    monkeypatch.setenv(warm.SWITCH, "0")
    warm.warm_up(local.change(**{"train.device": "cpu"}))
    assert len(started) == 0
