"""The backbones that ship with the package are whole, those of today's recipe, and know what they are said to know."""

import json

import pytest

from mmfsdp.kit.models.generated import RECIPE_VERSION, SHIPPED, generated_folder, needs_backbones
from mmfsdp.kit.shapes.make_backbones import checksums, knowledge, make
from mmfsdp.kit.shapes.small_llava import backbones_of
from mmfsdp.params import load

TINY = load("tiny").model


def test_a_first_run_pretrains_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path))
    assert generated_folder(TINY).parent == SHIPPED
    assert not needs_backbones(TINY)
    assert generated_folder(backbones_of(load("tiny_llava").model)) == generated_folder(TINY)
    language = TINY.language.config | {"num_hidden_layers": 2}
    other = TINY.change(**{"language.config": language})
    assert generated_folder(other).parent == tmp_path
    assert needs_backbones(other), "another size is pretrained here"


def test_shipped_backbones_are_whole_and_know_what_about_json_says():
    folder = generated_folder(TINY)
    about = json.loads((folder / "about.json").read_text())
    assert about["recipe"] == RECIPE_VERSION
    assert about["sha256"] == checksums(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 6e6
    known = knowledge(TINY, folder)
    assert known["pictures_told_apart"] == pytest.approx(about["pictures_told_apart"], abs=0.01)
    assert known["loss_of_texts"] == pytest.approx(about["loss_of_texts"], abs=0.01)


@pytest.mark.extended
def test_backbones_made_anew_know_as_much(tmp_path):
    shipped = json.loads((generated_folder(TINY) / "about.json").read_text())
    about = make(load("tiny"), tmp_path / "made", progress=lambda label, share: None)
    # Sums in another order, as other numbers of threads give, change the last bits, and so each later step.
    assert about["pictures_told_apart"] >= shipped["pictures_told_apart"] - 0.05
    assert about["loss_of_texts"] <= shipped["loss_of_texts"] + 0.05
