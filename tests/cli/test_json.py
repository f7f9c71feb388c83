"""`--json`: what each command prints on stdout keeps to its schema, errors too, and the exit code is as without it."""

import json
import math
import time

import pytest
from jsonschema import Draft202012Validator, ValidationError, validate
from PIL import Image

from mmfsdp.kit import cli
from mmfsdp.kit.cli import parser
from mmfsdp.kit.run.files.folder import MetricsWriter
from mmfsdp.kit.run.files.reasons import MEMORY
from mmfsdp.kit.run.files.run_record import RunRecord, RunState, Status, because, write_status
from mmfsdp.kit.run.watch import follow
from mmfsdp.params.findings import UNKNOWN_WORDS
from tests.run.test_runs import record

WITH_JSON = ["plan", "fit", "verify", "check", "new", "runs", "status", "watch"]


def schema(command: str, capsys) -> dict:
    """The schema that a command prints of its answers."""
    assert cli.main([command, "--json-schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    return printed


def answers(line: list[str], capsys, *, status: int = 0) -> list[dict]:
    """The objects that a command prints with --json, a line each, checked by its schema. It ends with `status`."""
    allowed = schema(line[0], capsys)
    assert cli.main([*line, "--json"]) == status
    objects = [json.loads(printed) for printed in capsys.readouterr().out.splitlines()]
    for printed in objects:
        validate(printed, allowed)
    assert objects[-1]["ok"] == (status == 0)
    return objects


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended_run(folder, name: str, state: RunState, losses: list[float]) -> None:
    """Write a run of two ranks that has ended."""
    path = folder / "runs" / name
    path.mkdir(parents=True)
    RunRecord(**vars(record(host="elsewhere", steps=len(losses), created=time.time()))).write(path)
    writer = MetricsWriter(path)
    for step, loss in enumerate(losses, 1):
        writer.write({"step": step, "loss": loss, "time": float(step)})
    write_status(path, state)


def test_every_command_that_a_program_needs_has_a_schema_that_refuses_other_objects(capsys):
    for command in WITH_JSON:
        allowed = schema(command, capsys)
        for wrong in ({}, {"ok": True}, {"ok": False, "error": {"field": "", "message": ""}}, {"lines": []}):
            with pytest.raises(ValidationError):
                validate(wrong, allowed)


def test_a_plan(folder, capsys):
    line = ["plan", "--config", "tiny", "--machine", "a100-infiniband", "--launch.ranks", "16"]
    (plan,) = answers(line, capsys)
    assert plan["ranks"] == 16 and plan["parameters"] == sum(unit["parameters"] for unit in plan["units"])
    assert plan["cost"]["at_rest_bytes"] == sum(unit["at_rest_bytes"] for unit in plan["units"])
    assert plan["step"]["machine"] == "a100-infiniband"
    (chosen,) = [way for way in plan["ways"] if way["is_chosen"]]
    assert chosen["name"] == "FSDP2 SHARD" and chosen["seconds"] == plan["step"]["seconds"]
    for figure in ("sent_bytes", "at_rest_bytes", "peak_bytes"):
        assert chosen[figure] == plan["cost"][figure]
    assert [way["name"] for way in plan["ways"]] == [
        "DDP",
        "FSDP1",
        *(f"FSDP2 {p}" for p in ("SHARD", "KEEP", "REPLICATE")),
    ]
    assert {(mesh["dp_replicate"], mesh["dp_shard"]) for mesh in plan["meshes"]} == {(8, 2), (4, 4), (2, 8), (1, 16)}


def test_what_fits(folder, capsys):
    (solved,) = answers(["fit", "--config", "tiny", "--memory", "1.6", "--for", "batch", "policy"], capsys)
    batch, policy = solved["answers"]
    assert batch["change"] == {"train.batch_size": batch["value"]} and policy["value"] == "REPLICATE, recomputing none"
    assert batch["needed_bytes"] <= solved["capacity_bytes"] < batch["further_needed_bytes"]
    (nothing,) = answers(["fit", "--config", "tiny", "--memory", "1.4"], capsys, status=1)
    assert nothing["answers"][0]["value"] is None


def test_ways_that_a_run_cannot_go_say_why(folder, capsys):
    line = (
        "plan --config tiny --fsdp.cpu-offload --fsdp.frozen-policy AUTO --fsdp.memory-budget-gib 1 --train.device cpu"
    )
    (plan,) = answers(line.split(), capsys)
    ways = {way["name"]: way for way in plan["ways"]}
    assert "cannot be honored by DDP" in ways["DDP"]["refused"] and ways["DDP"]["sent_bytes"] is None
    assert ways["FSDP2 AUTO"]["is_chosen"] and ways["FSDP2 AUTO"]["seconds"] is None
    assert cli.main(line.split()) == 0
    table = capsys.readouterr().out.partition("all ways to shard it")[2]
    assert all(f"\n{name}" in table for name in ways)


def test_a_configuration_for_own_pictures(folder, capsys):
    (folder / "data").mkdir()
    for number in range(8):
        Image.new("RGB", (40, 30), "red").save(folder / "data" / f"{number}.png")
        (folder / "data" / f"{number}.txt").write_text("a réd circle")
    (new,) = answers(["new", "my.yaml", "--pictures", "data"], capsys)
    assert new["train_records"] + new["heldout_records"] == 8 and new["samples"][0]["pictures"] == [[40, 30]]
    assert [notice["code"] for notice in new["notices"]] == [UNKNOWN_WORDS]
    assert new["params"]["data"]["path"] == str(folder / "data") and new["next"][0] == "mmfsdp plan my.yaml"
    (failure,) = answers(["new", "my.yaml", "--pictures", "data"], capsys, status=2)
    assert failure["error"]["field"] == "file" and "exists already" in failure["error"]["message"]


def test_runs_and_their_states(folder, capsys):
    killed = because(Status.FAILED, "rank 1: killed", kind=MEMORY, rank=1, traceback="last \x1b[31mwords")
    ended_run(folder, "a", RunState(Status.COMPLETED), [3.0, 2.0])
    ended_run(folder, "b", killed, [3.0])
    ended_run(folder, "c", RunState(Status.COMPLETED), [3.0, math.nan])
    (listed,) = answers(["runs"], capsys)
    assert [(run["name"], run["succeeded"], run["loss"]) for run in listed["runs"]] == [
        ("a", True, 2.0),
        ("b", False, 3.0),
        ("c", False, None),
    ]
    (status,) = answers(["status", "a"], capsys)
    assert status["done"] and status["metrics"]["loss"] == 2.0 and status["why"] is None
    (status,) = answers(["status", "b"], capsys, status=1)
    assert (status["why"]["kind"], status["why"]["rank"]) == (MEMORY, 1)
    assert status["troubles"][0]["fix"] and [rank["status"] for rank in status["ranks"]] == ["stopped", "failed"]
    (status,) = answers(["status", "c"], capsys, status=1)
    assert status["status"] == "COMPLETED" and not status["succeeded"] and status["metrics"]["loss"] is None
    *lines, last = answers(["watch", "b"], capsys, status=1)
    assert [line["kind"] for line in lines] == [line.kind for line in follow(folder / "runs/b")]
    assert {line["kind"] for line in lines} >= {"progress", "traceback", "trouble"}
    assert last["name"] == "b" and "\x1b" not in str(lines)


MISTAKES = {
    "pln": "command",
    "plan --config tinny": "config",
    "plan --train.lr abc": "train.lr",
    "plan --trian.lr 1": "command line",
    "fit --config tiny": "--machine",
    "verify --config tiny --train.steps 0": "train.steps",
    "check --cluster none": "launch.cluster",
    "new my.yaml --pictures gone": "pictures",
    "status none": "run",
    "watch none": "run",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_object_and_the_exit_code_is_kept(folder, capsys, line):
    words = line.split()
    code = cli.main(words)
    told = capsys.readouterr()
    assert cli.main([*words, "--json"]) == code == 2
    printed = capsys.readouterr()
    (failure,) = map(json.loads, printed.out.splitlines())
    validate(failure, schema("plan", capsys))
    assert failure["error"]["field"] == MISTAKES[line] and failure["error"]["exit_code"] == code
    assert printed.err == told.err, "people read the same as without --json"


def test_a_bug_and_ctrl_c_are_objects_too(folder, capsys, monkeypatch):
    for error, code, kind in ((ZeroDivisionError("by zero"), 1, "bug"), (KeyboardInterrupt(), 130, "interrupted")):

        def runs(values, error=error):
            print("said before")
            raise error

        monkeypatch.setattr(parser, "runs", runs)
        (failure,) = answers(["runs"], capsys, status=code)
        assert failure["error"]["kind"] == kind and failure["error"]["exit_code"] == code


@pytest.mark.real
def test_checks_of_real_ranks_print_nothing_else_on_stdout(folder, capfd):
    """Ranks print on the file descriptor that they inherit."""
    (check,) = answers(["check", "--launch.ranks", "1"], capfd)
    assert {"level": "ok"}.items() <= next(line for line in check["lines"] if line["code"] == "ranks").items()
    (verify,) = answers(["verify", "--config", "tiny"], capfd)
    assert verify["lines"] and all(line["level"] in ("ok", "note") for line in verify["lines"])
