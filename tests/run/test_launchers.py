"""The registry of launchers: nothing outside of their folder asks which one a run has, and anybody may add one."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import mmfsdp
from mmfsdp import ParamError, Run, RunParams, launch
from mmfsdp.kit.cli import build_parser
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import TRAIN, RunRecord, Status, rank_status
from mmfsdp.kit.run.own_code import write_code
from mmfsdp.kit.run.rank_count import with_ranks
from mmfsdp.kit.run.start import make_folder, make_record
from mmfsdp.kit.run.state import find_runs, runs_table
from mmfsdp.kit.run.trust import UntrustedRun
from mmfsdp.kit.widgets.report import write_report
from mmfsdp.own.modules import OwnSources
from mmfsdp.params import Executor
from mmfsdp.widgets import RunForm
from tests.processes import in_fresh_python
from tests.run.test_runs import GONE
from tests.waiting import TESTS, light, until

PACKAGE = Path(mmfsdp.__path__[0])
TOY = {"call": "toy_scheduler:FolderQueue", "queue": "queue"}
EVIL = """
from pathlib import Path
from mmfsdp.kit.run.launchers.launcher import Launcher
from mmfsdp.kit.run.files.run_record import Status, because

Path("it-ran").touch()

class Queue(Launcher):
    def start(self, folder, record, *, port): ...
    def state(self, look, record):
        return because(Status.RUNNING, "as evil says")
"""


def names_executor(node: ast.AST) -> bool:
    """True for an expression that holds `x.executor`, the variable `executor`, or a member of the enum."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in ("executor", "REPLAY"):
            return True
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "Executor":
            return True
        if isinstance(part, ast.Name) and part.id == "executor":
            return True
    return False


def comparisons(source: str) -> list[int]:
    """The lines at which an executor is compared, looked up in a table, or matched."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            classes = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            if classes & {"Local", "Srun", "Slurm", "Replay", "InJob"}:
                lines.append(node.lineno)
        if any(names_executor(part) for part in parts):
            lines.append(node.lineno)
    return lines


def test_an_executor_is_compared_by_launchers_alone():
    for words in (
        "a.executor == 'x'",
        "launch.executor is not Executor.LOCAL",
        "f[r.executor]",
        "isinstance(a, Slurm)",
    ):
        assert comparisons(words) == [1], words
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if "launchers" not in path.parts and (lines := comparisons(path.read_text())):
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert not found


def test_a_launcher_is_imported_when_a_run_first_needs_it():
    code = "import sys, mmfsdp.kit.run.handle\nfrom mmfsdp.kit.run.launchers.registry import launcher_named\n"
    code += "found = lambda: sorted(name for name in sys.modules if name.endswith('_launcher'))\n"
    code += "print(found()); launcher_named('replay'); print(found())"
    assert in_fresh_python(code).split("\n")[:2] == ["[]", "['mmfsdp.kit.run.launchers.replay_launcher']"]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy scheduler at work, and parameters of runs that it starts; its queue is in the folder `queue`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TESTS.parent))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent), prepend=os.pathsep)  # for the ranks' entry
    shutil.copy(TESTS / "toy_scheduler.py", tmp_path)
    scheduler = subprocess.Popen([sys.executable, "toy_scheduler.py", "queue"])
    until((tmp_path / "queue/scheduler.pid").exists)
    yield light(tmp_path / "runs", **{"launch.executor": TOY, "launch.ranks": 2, "train.steps": 100})
    scheduler.terminate()
    scheduler.wait(600)


@pytest.mark.real
def test_a_scheduler_of_ones_own_launches_cancels_and_names_a_hang(toy, tmp_path):
    """Its path is given in Python, in YAML and on the command line."""
    changes = {"launch.name": "hangs", "launch.silence_s": 10.0}
    hangs = launch(toy.change(**changes), entry="tests.launch_entries:hangs_on_a_skewed_file_server")
    until(lambda: hangs.state().status is not Status.QUEUED)
    toy.change(**{"launch.name": "busy"}).to_yaml(tmp_path / "busy.yaml")
    busy = launch(RunParams.from_yaml(tmp_path / "busy.yaml"), entry="tests.launch_entries:busy")
    waits = until(lambda: state if "waits" in (state := busy.state()).reason else None)
    assert waits.status is Status.QUEUED and waits.reason.endswith("waits for its turn")
    state = hangs.wait(600)
    assert state.status is Status.FAILED and state.rank == 1, f"{state}\n{hangs.logs(1)}"
    assert "rank 1 does not answer (in step 3 compute)" in state.reason
    assert "in hangs_on_a_skewed_file_server" in state.traceback, "the stack of the rank that hangs"

    until(lambda: all(rank_status(busy.path, rank) for rank in range(2)))  # it is RUNNING with the first of them
    others = RunRecord.read(busy.path).executor
    assert others == "toy_scheduler:FolderQueue" in runs_table(find_runs(tmp_path / "runs"))
    ranks = [rank_status(busy.path, rank)["pid"] for rank in range(2)]
    assert busy.cancel(timeout=600).status is Status.CANCELLED
    assert not any(map(psutil.pid_exists, ranks))

    words = ["launch", "--launch.executor", json.dumps(TOY), "--launch.folder", str(tmp_path / "runs")]
    words += ["--launch.ranks", "2", "--train.device", "cpu", "--train.steps", "5", "--train.warmup-steps", "0"]
    talks = launch(params_of(read_words(build_parser(), words)), entry="tests.launch_entries:talk")
    assert talks.wait(600).ok, talks.logs(0)
    assert "env RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 " in talks.logs(1)
    assert [row["step"] for row in talks.metrics(1)] == [1, 2, 3, 4, 5]


def test_a_mistake_in_a_launcher_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_launchers.py").write_text("import nowhere\n")
    Path("no_launcher.py").write_text("class Queue:\n    pass\n")
    shutil.copy(TESTS / "toy_scheduler.py", tmp_path)
    mistakes: dict[Any, str] = {
        "slrum": "launch.executor: 'slrum' is not allowed; did you mean slurm\\? Choose local, .* your own launcher",
        "gone:Queue": "launch.executor: 'gone:Queue' cannot be imported: there is no module 'gone'",
        "my_launchers:Queue": "launch.executor: 'my_launchers:Queue' cannot be imported: ModuleNotFoundError",
        "toy_scheduler:Queue": "launch.executor: 'toy_scheduler:Queue': Queue is not there .* did you mean",
        "no_launcher:Queue": "launch.executor: 'no_launcher:Queue' gives a Queue, and not a launcher; derive its class",
        "toy_scheduler:FolderQueue": "launch.executor: .* FolderQueue.queue. is called wrongly",
    }
    for executor, words in mistakes.items():
        with pytest.raises(ParamError, match=words):
            launch(light(tmp_path / "runs", **{"launch.executor": executor}), entry="tests.launch_entries:talk")
    with pytest.raises(ParamError, match="launch.executor: no scheduler serves '.*queue'; start toy_scheduler.py"):
        launch(light(tmp_path / "runs", **{"launch.executor": TOY}), entry="tests.launch_entries:talk")
    params = light(tmp_path / "runs", **{"launch.executor": TOY, "launch.mem": "8G"})
    with pytest.raises(ParamError, match="launch.mem: '8G' has no effect: toy_scheduler:FolderQueue uses gpus_per_no"):
        launch(params, entry="tests.launch_entries:talk")
    assert not (tmp_path / "runs").exists()


def test_ranks_of_an_own_launcher_are_known_without_running_it():
    params = RunParams().change(**{"launch.executor": "gone:Queue", "launch.nodes": 2, "launch.gpus_per_node": 4})
    assert with_ranks(params).launch.ranks == 8
    assert with_ranks(params.change(**{"launch.gpus_per_node": None})).launch.ranks == 2


def test_a_folder_whose_launcher_is_somebodys_code_is_shown_by_its_files(tmp_path, monkeypatch):
    """Nothing of it runs: not to open, list, cancel or drill it, and not to write its report; once trusted, it does."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    params = light(tmp_path / "runs", **{"launch.executor": "evil:Queue", "launch.ranks": 2})
    folder = make_folder(params.launch)
    params.to_yaml(folder / "params.yaml")
    write_code(folder, OwnSources({"evil.py": EVIL.encode()}))
    record = replace(make_record(params, TRAIN, identity="", pid=int(GONE["pid"]), folder=folder), digest="")
    record.write(folder)
    write_json(folder / "status.json", {"status": "STARTING", "job": "7", "alive": time.time()})
    for rank in range(2):
        write_json(folder / f"logs/rank{rank}.json", {"state": "running", "rank": rank, "host": socket.gethostname()})
    run = Run.open(folder)
    state = run.state()
    assert state.status is Status.STARTING
    assert "its launcher, evil:Queue, is own code that somebody else" in state.reason
    assert "evil:Queue 7" in runs_table(find_runs(tmp_path / "runs"))
    assert "STARTING" in Path(write_report(folder)).read_text()
    with pytest.raises(ParamError, match=r"evil:Queue, is own code .* not run; read that code; Run.trust\(\) lets"):
        run.drill()
    with pytest.raises(TimeoutError, match="is still running after its cancel"):
        run.cancel(timeout=0.1)
    with pytest.raises(UntrustedRun, match="evil:Queue"):
        run.resume()
    (folder / "cancel").unlink()
    assert not Path("it-ran").exists()
    assert run.trust().state().reason == "as evil says" and Path("it-ran").exists(), "this test can fail"


def test_the_form_offers_the_registry_and_takes_a_path(tmp_path):
    params = RunParams().change(**{"launch.executor": "evil:Queue"})
    params.to_yaml(tmp_path / "theirs.yaml")
    theirs = RunForm(str(tmp_path / "theirs.yaml"))
    with pytest.raises(ParamError, match="launch.executor: 'evil:Queue' comes from a file; it is not run before"):
        theirs.check_launcher_allowed(theirs.params)
    theirs.close()
    form = RunForm()
    row = form.row("launch.executor")
    assert tuple(row.input.options) == ("local", "slurm", "srun") and row.button.disabled
    assert "Processes on this machine" in row.words.value
    form.choose("launch.executor", TOY)
    assert form.error is None and form.params.launch.executor == TOY and not row.button.disabled
    form.check_launcher_allowed(form.params)  # who types it wants it
    form.choose("launch.executor", "slurm")
    assert form.params.launch.executor is Executor.SLURM and form.row("launch.mem").value is None
    form.choose("launch.executor", "moon")
    assert form.error and form.error.field == "launch.executor"
    form.close()
