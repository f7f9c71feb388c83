"""`verify` finds each planted mistake of tests/files/own/mistaken.py in a configured model by one line."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmfsdp.kit.verify.from_params import verify_folder, write_trial
from mmfsdp.kit.verify.lines import from_plain
from mmfsdp.kit.verify.outcome import first_result
from mmfsdp.params import ParamError, RunParams, load
from tests.cover import kept, selected
from tests.ranks import on_ranks

OWN = Path(__file__).resolve().parents[1] / "files/own"
sys.path.insert(0, str(OWN))
try:
    from mistaken import MISTAKES, REFUSED, RIGHT
finally:
    sys.path.remove(str(OWN))
CASES = kept({name: [case[0]] for name, case in MISTAKES.items()} | {name: [""] for name in RIGHT})


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """The modules of tests/files/own can be imported."""
    monkeypatch.syspath_prepend(OWN)


def with_mistake(name: str, folder: Path) -> RunParams:
    """Return the parameters of a run of the model with a mistake, on questions and answers in a folder."""
    rows = []
    for number, color in enumerate(("red", "green", "blue", "black", "white", "gray", "pink", "brown")):
        Image.new("RGB", (8, 8), color).save(folder / f"{number}.png")
        answer = " ".join(f"{color} is picture {number} of some colors".split()[: 5 + number % 3])
        turns = [{"from": "human", "value": "<image>\nwhich color"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))
    changes = {"data.source": "json", "data.path": str(folder / "rows.json")}
    return load("tiny").change(**{"model.build": {"call": "mistaken:build", "mistake": name}}, **changes)


def lines_of_all(folders: dict[str, str]) -> dict[str, list[dict]]:
    """Verify each folder's configuration, as one rank."""
    sys.path.insert(0, str(OWN))
    return {name: first_result([verify_folder(folder)]) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def lines(request, tmp_path_factory):
    """The lines of each selected case, by name: one start of two ranks for all."""
    folders = {}
    sys.path.insert(0, str(OWN))
    for name in selected(request, "name"):
        folder = tmp_path_factory.mktemp("mistaken")
        write_trial(with_mistake(name, folder), folder)
        folders[name] = str(folder)
    sys.path.remove(str(OWN))
    results = on_ranks(lines_of_all, 2, folders, timeout_s=60)[0]
    return {name: from_plain(values) for name, values in results.items()}


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_by_a_line_of_its_own(lines, name):
    listed = "\n".join(map(str, lines[name]))
    wrong = [line for line in lines[name] if line.level == "wrong"]
    if name in RIGHT:
        assert not wrong, listed
        return
    check, words = MISTAKES[name]
    assert [line.code for line in wrong] == [check], listed
    assert words in wrong[0].message and wrong[0].fix, listed


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_that_a_plan_shows_is_told_before_ranks_start(name, tmp_path):
    with pytest.raises(ParamError, match=REFUSED[name]):
        write_trial(with_mistake(name, tmp_path), tmp_path)
