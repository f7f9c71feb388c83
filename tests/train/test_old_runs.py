"""Run folders that an older version wrote (tests/files/old_runs) still open, report, resume and export."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from mmfsdp import Flamingo, MultimodalModel, Run, Sweep, cli, load_pretrained
from mmfsdp.run.trust import UntrustedRun
from tests.ranks import in_processes
from tests.tiny_run import as_rank, free_port

OLD = Path(__file__).resolve().parent.parent / "files/old_runs"
RUNS = {
    "finished": ("COMPLETED", 6, 6),
    "preempted": ("CANCELLED", 8, 20),
    "fsdp1_local": ("CANCELLED", 6, 20),
    "lora": ("COMPLETED", 3, 3),
    "sweep/000": ("COMPLETED", 2, 2),
    "sweep/001": ("COMPLETED", 2, 2),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Copies of them, and the current directory: they name their backbones by relative paths."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def find(run: Path):
    """The function that each of a run's ranks calls."""
    module, _, name = json.loads((run / "run.json").read_text())["entry"].partition(":")
    module = {"mmfsdp.evaluate": "mmfsdp.train.evaluate"}.get(module, module)  # it has moved
    return getattr(import_module(module), name)


def losses(run: Run, rank: int) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.metrics(rank)}


@pytest.mark.parametrize("name", RUNS)
def test_it_opens_and_is_reported(folder, name, capsys):
    run = Run.open(folder / name)
    state = run.state()
    assert (str(state.status), state.step, state.steps) == RUNS[name]
    assert run.params.launch.name == run.name and run.params.train.steps == state.steps
    assert run.record.ranks == 2 and "rank 1 of 2: cpu" in run.logs(1)
    assert all([*losses(run, rank)] == [*range(1, state.step + 1)] for rank in range(2))
    assert [event["kind"] for event in run.events() if event["kind"] != "saved"] == (
        ["drill", "preempted", "requeued", "resumed"] if name == "preempted" else []
    )
    assert callable(find(run.path))
    if state.ok:
        result = run.result()
        assert result["wire_bytes_measured"] == result["wire_bytes_predicted"] > 0 and result["captions"]
    assert cli.main(["report", str(run.path)]) == 0
    page = (run.path / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(run.path / "report.html")
    assert run.name in page and "<svg" in page and "cannot be shown" not in page
    assert ("exposed: communication" in page) == (name == "lora")  # the one run that was profiled


def test_they_are_listed_and_compared_and_a_sweep_has_its_table(folder, capsys):
    assert cli.main(["runs", "."]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RUNS)
    assert cli.main(["report", "finished", "preempted", "lora"]) == 0 and Path("comparison.html").stat().st_size
    capsys.readouterr()
    found = Sweep.open("sweep")
    rows = found.rows()
    assert found.done() and sorted((row["name"], row["train.lr"]) for row in rows) == [("000", 1e-2), ("001", 1e-3)]
    assert all(row["loss"] > 0 and 0 <= row["new right"] <= 1 and row["seconds"] > 0 for row in rows)
    assert found.params("001").train.lr == found.run("001").params.train.lr == 1e-3
    assert cli.main(["sweep", "sweep"]) == 0 and capsys.readouterr().out.strip() == str(found)


def go_on(rank: int, _: str, run: str, port: int) -> None:
    """What a rank of a run does when it is taken up."""
    os.chdir(Path(run).parent)
    as_rank(rank, 2, port)
    find(Path(run))(Path(run))


@pytest.mark.real
def test_what_was_broken_off_goes_on_to_its_end_as_it_would_have(folder):
    preempted, local = (Run.open(folder / name) for name in ("preempted", "fsdp1_local"))
    old = {run.name: [losses(run, rank) for rank in range(2)] for run in (preempted, local)}
    with pytest.raises(UntrustedRun, match="it has no digest of its parameters; it would run .*train.steps: "):
        preempted.resume()
    preempted.resume(trust=True)
    in_processes(go_on, 2, str(local.path), free_port())
    state = preempted.wait(300)
    assert state.ok and state.step == 20, state
    for run, came_from in ((preempted, [6, 6]), (local, [4])):
        assert [event["step"] for event in run.events() if event["kind"] == "resumed"] == came_from
        assert run.result()["frozen_parameters_changed"] == 0
        for rank in range(2):
            new = losses(run, rank)
            assert [*new] == [*range(1, 21)]
            for step, loss in old[run.name][rank].items():  # some after the checkpoint: done once more
                assert new[step] == pytest.approx(loss, rel=1e-3)
    assert cli.main(["report", str(local.path)]) == 0


@pytest.mark.parametrize("name, kind", {"finished": Flamingo, "lora": MultimodalModel}.items())
def test_it_is_exported(folder, name, kind):
    assert cli.main(["export", name, "out"]) == 0
    model, _ = load_pretrained(folder / "out")
    assert isinstance(model, kind)
    if kind is Flamingo:
        assert cli.main(["export", name, "theirs", "open_flamingo"]) == 0
        assert Path("theirs/checkpoint.pt").stat().st_size
