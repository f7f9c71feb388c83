"""The commands over runs that are there already, with real processes, and with folders in every state of ruin."""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from mmfsdp import RunParams
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import LOSS_TITLE, MetricsWriter, write_json
from mmfsdp.kit.run.files.run_record import RunRecord, Status
from mmfsdp.kit.run.state import age, find_runs
from tests.processes import in_fresh_python
from tests.run.test_runs import record
from tests.waiting import runs_of, until

RECORD = record(host="elsewhere", steps=8, created=time.time() - 7200)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with runs_of(RunParams().change(**{"train.steps": 60})) as go:
        yield go


def run_folder(folder: Path, status: str = "COMPLETED", **more) -> Path:
    folder.mkdir(parents=True)
    RunRecord(**vars(RECORD) | more).write(folder)
    write_json(folder / "status.json", {"status": status, "reason": more.get("reason", ""), "job": "77"})
    MetricsWriter(folder).write({"step": 8, "loss": 0.25})
    return folder


def test_runs_lists_what_there_is_without_torch(tmp_path):
    run_folder(tmp_path / "good")
    run_folder(tmp_path / "sweep/01", executor="slurm", created=RECORD.created + 60)
    (tmp_path / "sweep/sweep.json").write_text("{}")
    ruin = run_folder(tmp_path / "ruin", created=RECORD.created - 60)
    (ruin / "metrics.jsonl").write_bytes(b'\xff\xfe{"half')
    (ruin / "status.json").write_text('{"status": "FAILED", "reason": "\\u001b[31mred\\nline"}')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/run.json").write_text("{")
    os.utime(tmp_path / "cut", (0, 0))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    code = (
        f"import sys; from mmfsdp.kit.cli import main; main(['runs', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    )
    out = in_fresh_python(code)
    head, *printed, torch = out.splitlines()
    lines = "\n".join(printed).replace("\n  ", "  ").splitlines()
    assert head.split() == f"name state step {LOSS_TITLE} age where".split() and torch == "False"
    words = [line.split() for line in lines]
    assert [line[0] for line in words] == ["cut", "ruin", "good", "sweep/01"], "oldest first"
    assert words[0][1:3] == ["LOST", "0/0"] and "its launch was interrupted" in lines[0]
    assert words[1][1:3] == ["FAILED", "0/8"] and " red line" in lines[1] and "\x1b" not in out
    assert words[2][1:] == ["COMPLETED", "8/8", "0.25", "2", "h", "elsewhere"]
    assert "slurm 77" in lines[3]
    assert not find_runs(tmp_path / "none")
    assert [age(s) for s in (-1, 59, 60, 7199, 90_000)] == ["0 s", "59 s", "1 min", "1 h", "1 d"]


@pytest.mark.real
def test_a_drill_and_a_cancel_by_command(start, capsys, tmp_path):
    run = start("preemptible", **{"launch.name": "drilled"})
    until(lambda: min(len(run.metrics(rank)) for rank in range(2)) >= 2)
    assert cli.main(["drill", "drilled"]) == 0, "a name is enough beside runs/"
    said = [line.partition(" at step ")[0] for line in capsys.readouterr().out.splitlines() if " at step " in line]
    assert said == ["drill", "preempted", "requeued", "resumed"]
    assert run.wait(600).ok
    assert cli.main(["drill", "runs/drilled"]) == 2 and "a drill needs a run whose" in capsys.readouterr().err
    other = start("preemptible", **{"launch.name": "cancelled"})
    assert cli.main(["cancel", "cancelled"]) == 0 and other.state().status is Status.CANCELLED
    assert cli.main(["cancel", "drilled"]) == 0 and run.state().ok, "what is over is left as it is"
    assert cli.main(["runs"]) == 0
    shown = capsys.readouterr().out
    loss = mean(row["loss"] for row in run.metrics()[-6:])  # of the last tenth
    assert "cancelled  CANCELLED" in shown and f"drilled    COMPLETED  60/60  {loss:.4g}" in shown
    assert cli.main(["runs", "void"]) == 0
    assert cli.main(["cancel", "none"]) == 2 and "runs holds cancelled, drilled" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, words",
    [
        ("pln", "did you mean plan?"),
        ("plan --config tinny", "did you mean tiny?"),
        ("plan --config my.yaml", "'my.yaml' is neither a file nor a preset"),
        ("run --config tiny --train.stpes 3", "did you mean --train.steps?"),
        ("launch --config tiny --launch.folder /proc/x", "launch.folder: '/proc/x' cannot hold runs"),
        *(
            (f"{command} nothing", "nothing' is not a run")
            for command in ("watch", "status", "report", "caption", "resume")
        ),
    ],
)
def test_a_slip_is_one_line_that_names_the_fix(line, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split(" ")) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert words in said
    assert before in ([], ["checking the data and the plan ..."])


COMMANDS = pytest.mark.parametrize("command", ["run", "launch", "sweep --grid train.lr=1e-3,2e-3"])


@COMMANDS
def test_data_that_cannot_be_read_is_refused_before_anything_is_made(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path / "cache"))
    words = ["--config", "tiny", "--data.source", "folder", "--data.path", "gone"]
    assert cli.main([*command.split(), *words]) == 2
    assert "data.path: 'gone' is no" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@COMMANDS
def test_without_slurm_its_executor_is_refused_before_anything_is_made(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path / "cache"))
    assert cli.main([*command.split(), "--config", "tiny", "--launch.executor", "slurm"]) == 2
    assert "launch.executor: slurm needs sbatch, which is not on PATH here; set it to local" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.real
def test_as_a_module_into_a_pipe_that_closes_on_a_terminal_without_letters(tmp_path):
    """No script on PATH; `| head -1`; LANG=C. A terminal shows what it can, and nobody sees a traceback."""
    line = f"{sys.executable} -m mmfsdp | head -1; {sys.executable} -m mmfsdp runs été"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    out = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert out.stdout.startswith("usage: mmfsdp") and out.stdout.endswith("no runs in \\xe9t\\xe9\n"), out
    assert (out.returncode, out.stderr) == (0, "")
