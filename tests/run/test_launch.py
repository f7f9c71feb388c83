"""Launching with real processes: lines seen live, failures named, a run that outlives its caller but not a cancel."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from PIL import Image

from mmfsdp import ParamError, Run, launch
from mmfsdp.kit.data import Sample
from mmfsdp.kit.run.files.folder import MetricsWriter, add_event, read_json
from mmfsdp.kit.run.files.reasons import ADVICE
from mmfsdp.kit.run.files.run_record import RunRecord, RunState, Status
from mmfsdp.kit.run.local import process_start, processes_of, stop_processes
from mmfsdp.kit.run.ranks.address import address_of, check_answers, set_address
from mmfsdp.kit.run.start import make_folder
from mmfsdp.kit.run.watch import LogReader
from mmfsdp.kit.train.evaluate import keep_pictures
from tests.waiting import TESTS, light, runs_of, until


@pytest.fixture
def start(tmp_path):
    with runs_of(light(tmp_path)) as go:
        yield go


def stepping(run: Run) -> RunState | None:
    state = run.state()
    return state if state.step > 1 else None


@pytest.mark.real
def test_two_ranks_stream_their_lines_and_complete(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    run = start("talk", **{"launch.threads": 3, "train.device": "auto"})
    returned, first_seen = time.time(), float("inf")
    reader, lines = LogReader(run), []
    while not run.state().done:
        if new := reader.poll():
            lines += new
            if any(line.text.startswith("step") for line in new):
                first_seen = min(first_seen, time.time())
        time.sleep(0.02)
    lines += reader.poll(last=True)
    written = [float(line.text.split()[-1]) for line in lines if line.text.startswith("step")]
    assert returned < min(written), "the launch does not wait for its ranks"
    assert first_seen < max(written), "lines are seen while others are written"
    assert run.wait() == RunState(Status.COMPLETED, step=5, steps=5) and run.state().ok
    for rank in range(2):
        environment, warning, *steps, last = [line.text for line in lines if line.rank == rank]
        assert environment == (
            f"env RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
            "OMP_NUM_THREADS=3 CUDA_VISIBLE_DEVICES=5,6 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME==lo"
        )
        assert warning == "a warning" and last == "no newline at the end"
        assert [step.split()[1] for step in steps] == list("12345")
        assert [row["step"] for row in run.metrics(rank)] == [1, 2, 3, 4, 5]
        assert run.logs(rank).splitlines() == [environment, warning, *steps, last]
    until(lambda: not processes_of(run.record, run.path))
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in run.path.rglob("*.pkl")] == [0o600] * 3, "call and results"
    assert run.params.train.steps == 5 and run.result() is None
    assert "COMPLETED" in repr(run)
    with pytest.raises(ValueError, match="rank: 2 is not a rank of first; they are 0 to 1"):
        run.logs(2)


@pytest.mark.real
def test_nothing_in_a_run_folder_is_writable_by_others_whatever_the_umask(start, tmp_path):
    before = os.umask(0)
    try:
        run = start("talk", **{"launch.folder": str(tmp_path / "work/runs")})
        run.cancel()
        add_event(run.path, "saved", step=1, text="")
        MetricsWriter(run.path, 7).write({"step": 1})
        keep_pictures(run.path, "heldout", [Sample.of("", "a star", (Image.new("RGB", (8, 8)),))], ["a star"])
    finally:
        os.umask(before)
    loose = [path for path in (tmp_path / "work", *tmp_path.glob("work/**/*")) if path.stat().st_mode & 0o022]
    assert not loose and {"cancel", "logs", "supervisor.log"} <= {path.name for path in run.path.rglob("*")}


@pytest.mark.real
def test_a_killed_rank_is_the_cause_though_another_complains_first(start):
    run = start("die")
    state = run.wait(600)
    died = next((run.path / "logs").glob("*_1_log.out")).stat().st_mtime
    assert state.status is Status.FAILED and state.rank == 1
    noticed = read_json(run.path / "status.json")["finished"] - died
    assert noticed < run.params.launch.silence_s, "nobody waits for it to answer"
    assert "died without a traceback" in state.reason and "connection closed by peer" in state.reason
    assert state.traceback == "last words of rank 1\n"


@pytest.mark.real
def test_a_rank_that_a_library_has_ended_gives_the_words_of_the_library(start):
    state = start("differ").wait(600)
    assert state.status is Status.FAILED and state.rank == 0
    assert "rank 0 was ended by a library (in step 2 callback gathers): " in state.reason, "after who waits for whom"
    assert "op.preamble.length <= op.nbytes" in state.reason and "out of memory" not in state.reason
    assert ADVICE[state.why.kind].words in state.reason


@pytest.mark.real
def test_no_other_machine_reaches_the_ranks_of_a_local_run_and_nothing_they_send_is_unpickled(start):
    run = start("listen")
    assert run.wait(600).ok, run.state()
    for rank in range(2):
        lines = run.logs(rank)
        assert "listens at ['127.0.0.1']" in lines
        assert "told [{'rank': 0, 'name': ''}, {'rank': 1, 'name': 'é'}]" in lines
    sources = [path.read_text() for path in (TESTS.parent / "mmfsdp").rglob("*.py")]
    assert not any(
        "gather_object" in text or "object_list" in text for text in sources if "def gather_json" not in text
    )


def test_an_address_that_nobody_answers_is_named_and_a_refused_connection_is_an_answer():
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.9", 0))
        port = deaf.getsockname()[1]
        check_answers("127.0.0.9", port, timeout_s=5)  # refused: nobody listens yet
        deaf.listen(0)
        check_answers("127.0.0.9", port, timeout_s=5)
        for client in (first, second):  # they fill the queue of connections: further packets are dropped
            client.setblocking(False)
            client.connect_ex(("127.0.0.9", port))
        with pytest.raises(OSError, match=rf"no rank reaches 127.0.0.9 \(127.0.0.9\):{port} from .*: timed out; "):
            check_answers("127.0.0.9", port, timeout_s=1)
    with pytest.raises(OSError, match=r"no rank reaches 0nowhere: '0nowhere' has no address on .*launch.host, such as"):
        address_of("0nowhere")


def test_the_first_node_takes_the_interface_to_the_others_where_its_own_name_is_loopback(monkeypatch):
    """Debian writes the name of a machine into its /etc/hosts, as 127.0.1.1."""
    outside = {}
    for name, addresses in psutil.net_if_addrs().items():
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127."):
                outside[item.address] = name
    assert outside, "a machine with a network"
    address, interface = next(iter(outside.items()))
    hosts = {"node1": "127.0.1.1", "node2": address}
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *words, **more: resolve(hosts.get(host, host), *words, **more)
    )
    for nodes, expected in ((["node1", "node2"], interface), (["node1", "127.0.0.2"], "lo"), (["node1"], "lo")):
        for variable in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MMFSDP_HOST"):
            monkeypatch.setenv(variable, "")  # so that it is as before when the test is over
            monkeypatch.delenv(variable)
        host = set_address(nodes)
        assert host == os.environ["MASTER_ADDR"] == ("node1" if len(nodes) > 1 else "127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == expected
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={expected}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    set_address(["node1", "node2"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "the person has named it"


@pytest.mark.real
def test_a_rank_that_hangs_is_found_whatever_the_clock_of_the_file_server(start):
    runs = []
    for name in ("behind", "ahead"):
        changes = {"launch.name": name, "launch.silence_s": 10.0}
        runs.append(start("hangs_on_a_skewed_file_server", **changes))
    for run in runs:
        state = run.wait(600)
        assert state.status is Status.FAILED and state.rank == 1, state
        assert "rank 1 does not answer (in step 3 compute): it hangs" in state.reason


@pytest.mark.real
def test_a_machine_that_sleeps_ends_no_run(start):
    run = start("busy", **{"launch.silence_s": 6.0, "train.steps": 3000})
    until(lambda: stepping(run))
    processes = processes_of(run.record, run.path)
    assert len(processes) > 2, "the supervisor and the ranks"
    for process in processes:
        process.suspend()
    words = f"its supervisor, process {run.record.pid}, is stopped, and nobody watches the ranks: `kill -CONT "
    until(lambda: run.state().reason.startswith(words), words=lambda: f"{run.state()}")
    time.sleep(20)
    for process in processes:
        process.resume()
    step = run.state().step
    until(lambda: run.state().step > step + 20 or run.state().done)
    assert run.state().status is Status.RUNNING, run.state()
    run.cancel()


LAUNCHER = """
import signal, sys, time
from mmfsdp import RunParams, launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
run = launch(RunParams.from_yaml(sys.argv[1]), entry="tests.launch_entries:sturdy")
print(run.path, flush=True)
while True:
    try: time.sleep(60)
    except KeyboardInterrupt: print("interrupted", flush=True)
"""


@pytest.mark.real
def test_ranks_outlive_their_launcher_and_a_cancel_from_another_process_ends_them_all(tmp_path):
    light(tmp_path).to_yaml(tmp_path / "run.yaml")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Run.open(launcher.stdout.readline().strip())
    try:
        until(lambda: stepping(run))
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.stdout.readline() == "interrupted\n"
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        step = run.state().step
        assert until(lambda: (s := run.state()).step > step + 2 and s).status is Status.RUNNING
        with pytest.raises(ParamError, match="RUNNING.*once it has ended"):
            make_folder(light(tmp_path, **{"launch.replace": True}).launch)
        # supervisor, submitit's controller, two ranks with a child each, of which one may start late
        members = until(lambda: len(found := processes_of(run.record, run.path)) >= 6 and found)
        state = run.cancel()
        assert state.status is Status.CANCELLED and run.wait() == state == run.cancel()
        assert not any(process_start(p.pid) for p in members)
    finally:
        launcher.kill()
        stop_processes(run.record, run.path, grace_s=0)


@pytest.mark.real
def test_a_run_without_its_supervisor_is_told_truly_and_can_be_cancelled(start):
    runs = [start("sleep", **{"launch.name": name}) for name in ("cancelled", "lost")]
    for run in runs:
        until(lambda run=run: stepping(run))
        os.kill(run.record.pid, signal.SIGKILL)
        state = until(lambda run=run: (s := run.state()).reason and s)
        assert state.status is Status.RUNNING and "its supervisor was killed" in state.reason
    assert runs[0].cancel().status is Status.CANCELLED
    for process in processes_of(runs[1].record, runs[1].path):
        process.kill()
    assert until(lambda: runs[1].state().done)
    assert runs[1].state().status is Status.LOST
    assert all(processes_of(run.record, run.path) == [] for run in runs)


@pytest.mark.real
def test_a_supervisor_that_dies_at_once_is_quoted(start, tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 'python: no such module'\nexit 1\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    run = start("sleep")
    state = until(lambda: run.state().done and run.state())
    assert state.status is Status.LOST and state.reason.endswith("last words are: python: no such module")


def test_what_cannot_start_leaves_no_folder(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {
        "~no.such.user/x": "launch.folder: '.*/x': no such user; write it in full",
        "$NO_SUCH/x": "launch.folder: '.NO_SUCH/x': the variable NO_SUCH is not set; set it, or write the path in full",
    }
    for folder, words in wrong.items():
        with pytest.raises(ParamError, match=words):
            start("sleep", **{"launch.folder": folder})
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    with pytest.raises(ParamError, match="data.path: '.*pictures'"):
        start("sleep", **{"data.source": "folder", "data.path": str(pictures)})
    pictures.rmdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_a_name_is_used_once_and_a_finished_run_is_renamed(start, tmp_path):
    run = start("sleep")
    with pytest.raises(ParamError, match=r"launch.name: the run '.*first' exists already \((QUEUED|STARTING|RUNNING)"):
        start("sleep")
    assert run.cancel().status is Status.CANCELLED, "at once, be it before it has begun"
    with pytest.raises(ParamError, match="exists already .*set launch.replace to true.*first-1"):
        start("sleep")
    for _ in range(2):
        again = start("sleep", **{"launch.replace": True})
        assert again.cancel().status is Status.CANCELLED
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "first-1", "first-2"]
    old = Run.open(tmp_path / "first-1")
    assert (old.name, old.state().status) == ("first-1", Status.CANCELLED)
    with pytest.raises(ValueError, match="third' is not a run that you may read; .* holds first, first-1, first-2"):
        Run.open(tmp_path / "third")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ParamError, match="is not a run; choose another name"):
        start("sleep", **{"launch.name": "mine", "launch.replace": True})
    (tmp_path / "file").touch()
    with pytest.raises(ParamError, match="launch.folder: .*cannot hold runs.*choose another"):
        start("sleep", **{"launch.folder": str(tmp_path / "file")})


@pytest.mark.real
def test_a_run_is_stopped_when_its_time_is_up(start, tmp_path):
    donor = start("sleep", **{"launch.name": "donor"})
    donor.cancel()
    folder = make_folder(light(tmp_path).launch)
    supervisor = subprocess.Popen([sys.executable, "-m", "mmfsdp.kit.run", str(folder)], start_new_session=True)
    record = vars(donor.record) | {"pid": supervisor.pid, "start": process_start(supervisor.pid), "timeout_min": 0}
    RunRecord(**record).write(folder)
    assert supervisor.wait(600) == 0
    state = Run.open(folder).state()
    assert state.status is Status.FAILED and state.reason == "stopped after 0 min; raise launch.timeout_min"


@pytest.mark.real
def test_an_entry_that_is_not_known_is_neither_launched_nor_resumed(start, tmp_path):
    with pytest.raises(ParamError, match="entry: 'os:abort' is not an entry of mmfsdp; it must be train"):
        launch(light(tmp_path), entry="os:abort")
    assert list(tmp_path.iterdir()) == []
    run = start("sleep")
    run.cancel()
    replace(run.record, entry="os:abort").write(run.path)
    with pytest.raises(ParamError, match="entry: 'os:abort' is not an entry"):
        run.resume()
