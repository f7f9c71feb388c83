"""The ten tasks of the page for agents: each command, as it stands there, gives the answer that is known otherwise."""

import json
import math
import re
import shlex
from collections.abc import Callable

import pytest
from PIL import Image

from mmfsdp.kit import cli
from mmfsdp.kit.data.sources.detect import detect
from mmfsdp.kit.run.files.reasons import ADVICE, MEMORY
from mmfsdp.kit.run.files.run_record import RunState, Status, because
from mmfsdp.kit.train.prepare import frozen_model, preview
from mmfsdp.params import load
from mmfsdp.predict import MACHINES
from tests.cli.test_json import ended_run
from tests.pages import PAGES

LINES = (PAGES / "agents.md").read_text().partition("## Ten tasks")[2].partition("\n## ")[0].splitlines()
TASKS = [re.findall("`mmfsdp (.+? --json)`", line)[0] for line in LINES if line.startswith("| ") and "--json" in line]


def trainable(answer: dict) -> None:
    model, _ = frozen_model(load("tiny").model)
    assert answer["trainable_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def sends_least(answer: dict) -> None:
    ways = [way for way in answer["ways"] if way["name"].startswith("FSDP2")]
    assert min(ways, key=lambda way: way["sent_bytes"])["name"] == "FSDP2 REPLICATE"


def does_not_fit(answer: dict) -> None:
    machine = MACHINES["rtx4090-pcie"]
    _, cost = preview(load("llava_7b").change(**{"launch.ranks": 8}))
    assert answer["meshes"] and not any(mesh["fits"] for mesh in answer["meshes"])
    assert machine.needed_bytes(cost.peak_bytes or cost.memory_bytes) > machine.capacity


def refused(answer: dict) -> None:
    assert answer["error"]["field"] == "fsdp.memory_budget_gib" and "AUTO" in answer["error"]["message"]


def least_loss(answer: dict) -> None:
    assert min((run["loss"], run["name"]) for run in answer["runs"] if run["succeeded"]) == (2.0, "a")


def out_of_memory(answer: dict) -> None:
    assert (answer["why"]["kind"], answer["why"]["rank"]) == (MEMORY, 1)
    assert ADVICE[MEMORY].fix in answer["troubles"][0]["fix"]


def diverged(answer: dict) -> None:
    assert answer["status"] == Status.COMPLETED and not answer["succeeded"]


def ended(answer: dict) -> None:
    assert answer["done"] and answer["step"] == answer["steps"] == 2


def held_out(answer: dict) -> None:
    assert answer["heldout_records"] == detect("data").splits["heldout"].length


def ready(answer: dict) -> None:
    assert answer["ok"] and {"ranks", "gloo"} <= {line["code"] for line in answer["lines"] if line["level"] == "ok"}


KNOWN: list[tuple[Callable[[dict], None], int]] = [
    *((trainable, 0), (sends_least, 0), (does_not_fit, 0), (refused, 2), (least_loss, 0)),
    *((out_of_memory, 1), (diverged, 1), (ended, 0), (held_out, 0), (ready, 0)),
]
"""The check of each answer, and the exit code, in the order of the page."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out_of_memory = because(Status.FAILED, "rank 1: out of memory", kind=MEMORY, rank=1)
    ended_run(tmp_path, "a", RunState(Status.COMPLETED), [3.0, 2.0])
    ended_run(tmp_path, "b", out_of_memory, [1.0])
    ended_run(tmp_path, "c", RunState(Status.COMPLETED), [3.0, math.nan])
    (tmp_path / "data").mkdir()
    for number in range(8):
        Image.new("RGB", (40, 30), "red").save(tmp_path / "data" / f"{number}.png")
        (tmp_path / "data" / f"{number}.txt").write_text("a red circle")


NUMBERS = [*range(9), pytest.param(9, marks=pytest.mark.real)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_task_of_the_page_has_its_known_answer(folder, capfd, number):
    assert len(TASKS) == len(KNOWN) == len(NUMBERS)
    check, status = KNOWN[number]
    assert cli.main(shlex.split(TASKS[number])) == status
    *_, last = capfd.readouterr().out.splitlines()
    check(json.loads(last))
