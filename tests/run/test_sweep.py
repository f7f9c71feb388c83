"""Sweeps with real processes: checked before any starts, a few at once, one table; they outlive who started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmfsdp import ParamError, Run, RunParams, Sweep, sweep
from mmfsdp.kit import cli
from mmfsdp.kit.cli.running import grid_values
from mmfsdp.kit.run.files.folder import LOSS_TITLE, MetricsWriter, write_json
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.local import processes_of
from mmfsdp.kit.run.state import runs_table
from mmfsdp.kit.widgets.compare import compared_runs
from tests.run.test_runs import GONE, record
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = "tests.launch_entries:member"
GRID = {"train.lr": [1, 2, 3], "fsdp.frozen_policy": ["SHARD", "KEEP"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where sweeps are; whatever is left of them after the test is stopped."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "runs"
    for path in (tmp_path / "runs").glob("*/sweep.json"):
        Sweep.open(path.parent).cancel()


def base(**changes) -> RunParams:
    return RunParams().change(**{"launch.name": "sweep", "train.steps": 4, "train.warmup_steps": 0, **changes})


STARTER = f"""
import sys
from mmfsdp import RunParams, sweep
params = RunParams.from_yaml(sys.argv[1])
print(sweep(params, grid={GRID}, at_once=2, entry={ENTRY!r}).path, flush=True)
sys.stdin.read()
"""


@pytest.mark.real
def test_a_sweep_outlives_its_starter_and_a_failed_member_is_resumed_alone(folder, capsys):
    base().to_yaml("base.yaml")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, "base.yaml"], stdin=-1, stdout=-1, text=True, start_new_session=True
    )
    found = Sweep.open(starter.stdout.readline().strip())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    most = 0
    while not found.done():
        waiting = [state for state in found.states().values() if state.status is Status.QUEUED and not state.steps]
        most = max(most, sum(run.state().done is False for run in map(Run, found.path.glob("0*/"))))
        assert {state.reason for state in waiting} <= {"waits for its turn", "being launched"}
        time.sleep(0.1)
    assert most == 2, "at a time"
    rows = sorted(found.rows(), key=lambda row: row["name"])  # the best stands first
    assert [(row["train.lr"], row["fsdp.frozen_policy"]) for row in rows] == [
        (lr, policy) for lr in GRID["train.lr"] for policy in GRID["fsdp.frozen_policy"]
    ]
    assert [row["state"] for row in rows] == ["COMPLETED"] * 2 + ["FAILED"] * 2 + ["COMPLETED"] * 2
    assert [(row["step"], row["loss"], row["new right"]) for row in rows if row["train.lr"] == 3] == [
        (4, 0.75, 0.3)
    ] * 2
    assert all(row["seconds"] > 0 for row in rows) and "rank 1: RuntimeError: a bad member" in rows[2]["why"]
    last = {
        "launch.ranks": 2,
        "train.lr": 3,
        "fsdp.frozen_policy": "KEEP",
        "launch.folder": str(found.path),
        "launch.name": "005",
    }
    assert found.run("005").params == found.params("005") == base(**last)
    assert found.run("003").resume().wait(600).ok
    assert cli.main(["sweep", "sweep"]) == 1, "002 is left as it was"
    assert "train.lr  fsdp.frozen_policy  state" in capsys.readouterr().out
    assert [state.ok for state in found.states().values()] == [True, True, False, True, True, True]
    assert found.run("003").state().step == 4
    assert cli.main(["runs"]) == 0
    assert "sweep/005" in capsys.readouterr().out
    again = sweep(base(**{"launch.replace": True}), grid={"train.lr": [1]}, entry=ENTRY)
    assert len(again.members) == 1 and len(Sweep.open("runs/sweep-1").members) == 6
    assert again.wait(600)["000"].ok


@pytest.mark.real
def test_a_cancelled_sweep_stops_all_of_it(folder):
    found = sweep(base(), grid={"train.lr": [9, 8, 1]}, at_once=2, entry=ENTRY)
    until(lambda: all(found.states()[name].step for name in ("000", "001")))
    runs = [found.run("000"), found.run("001")]
    assert cli.main(["cancel", str(found.path)]) == 0
    assert {state.status for state in found.states().values()} == {Status.CANCELLED} and found.done()
    assert not any(processes_of(run.record, run.path) for run in runs) and not (found.path / "002").exists()


def test_all_tables_of_runs_show_the_loss_of_the_last_tenth_of_the_steps(folder):
    path = Path("sweep")
    member = path / "000"
    member.mkdir(parents=True)
    write_json(path / "sweep.json", {"members": [{"train.lr": 1}], "at_once": 1, "entry": ENTRY})
    record(**GONE, steps=30).write(member)
    write_json(member / "status.json", {"status": "COMPLETED"})
    writer = MetricsWriter(member)
    for step in range(1, 31):
        writer.write({"step": step, "loss": float(2**step)})
    loss = (2**28 + 2**29 + 2**30) / 3
    assert [row["loss"] for row in Sweep(path).rows()] == [loss]
    (compared,) = compared_runs([member])
    assert compared.figures["loss"] == loss
    for table in (str(Sweep(path)), runs_table({"one": member})):
        assert LOSS_TITLE in table and f"{loss:.4g}" in table


def test_the_best_member_stands_first_and_one_whose_loss_is_not_finite_last(folder):
    path = Path("sweep")
    path.mkdir()
    write_json(path / "sweep.json", {"members": [{"train.lr": lr} for lr in (9, 1, 2)], "at_once": 1, "entry": ENTRY})
    for number, loss in enumerate((float("nan"), 0.5, 0.25)):
        member = path / f"{number:03d}"
        member.mkdir()
        record(**GONE, steps=8).write(member)
        write_json(member / "status.json", {"status": "COMPLETED"})
        MetricsWriter(member).write({"step": 8, "loss": loss})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [2, 1, 9], "by loss"
    write_json(path / "001" / "result.json", {"heldout_exact_match": 0.1})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [1, 2, 9], "new pictures right count first"
    write_json(path / "002" / "result.json", {"heldout_exact_match": 0.3})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [2, 1, 9], "the most right first"
    write_json(path / "001" / "result.json", {"heldout_exact_match": 0.4})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [1, 2, 9], "whatever their loss"
    write_json(path / "002" / "result.json", {"heldout_exact_match": 0.4})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [2, 1, 9], "the least loss of those that are as good"
    write_json(path / "000" / "result.json", {"heldout_exact_match": 0.9})
    assert [row["train.lr"] for row in Sweep(path).rows()] == [2, 1, 9], (
        "not finite stands last, however many are right"
    )
    assert Sweep(path).rows()[-1]["why"] == "loss not finite in step 8"
    assert cli.main(["sweep", "./sweep"]) == 1


def test_no_member_starts_before_all_are_sound(folder, capsys):
    for words, match in [
        ({"grid": {"train.lr": [1, -1]}}, r"train.lr: -1 should be .* \(in the member train.lr=-1\)"),
        ({"grid": {"train.rate": [1]}}, "train.rate: no such field"),
        ({"grid": {"train.lr": []}}, "makes 0 runs"),
        ({"grid": {"launch.name": ["a", "b"]}}, "launch.name: is the same for all of a sweep"),
        ({"grid": GRID, "at_once": 0}, "at_once: 0 is too few"),
    ]:
        with pytest.raises(ParamError, match=match):
            sweep(base(), **words, entry=ENTRY)
    flags = ["sweep", "--config", "tiny", "--grid", "fsdp.transformer_layer_cls=[[No],[Such]]"]
    flags += ["--fsdp.auto-wrap-policy", "TRANSFORMER_BASED_WRAP", "--fsdp.transformer-layer-cls", "GPT2Block"]
    assert cli.main(flags) == 2, "what only the plan knows, too"
    assert "transformer_layer_cls" in capsys.readouterr().err
    assert not folder.exists()
    assert grid_values("train.lr=1e-3,3e-4") == ("train.lr", ["1e-3", "3e-4"])
    assert grid_values("model.freeze=[[a, b], []]") == ("model.freeze", [["a", "b"], []])
    wrong = {"--grid train.lr": "FIELD=VALUE", "--at-once ²": "number", "--grid": "expected at least one argument"}
    for words, said in wrong.items():
        assert cli.main(["sweep", *words.split()]) == 2 and said in capsys.readouterr().err
