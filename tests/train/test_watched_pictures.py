"""Watched pictures: which runs have them, and what a model that cannot generate does to a run: nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from mmfsdp.kit.data.open_sources import open_for
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.run.files.watched_file import pictures_path, read_watched, rows_path
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.watched_pictures import SIDE, training_pictures
from tests.ranks import fake_group
from tests.train.test_own_model import OWN, own_run

VLM = {"model.build": "small_vlm:build", "train.eval_every": 2, "train.eval_samples": 5}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.syspath_prepend(OWN)


def training(folder: Path, **changes) -> SimpleNamespace:
    """What the callback reads of a training that is at step 0."""
    params = own_run(folder, **{**VLM, "launch.ranks": 2, **changes})
    model, processor = build_model(params.model)
    setup = SimpleNamespace(params=params, model=model, folder=folder)
    state, sources = SimpleNamespace(step=0), open_for(processor, params)
    return SimpleNamespace(setup=setup, state=state, sources=sources, processor=processor, beat=str, collectives=None)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model.build": "two_towers:build"}, "captions need a model with generate"),
        ({"model.build": "wrong_models:not_synced"}, "generate takes no synced_gpus"),
        ({"train.eval_pictures": 0}, ""),
        ({"train.eval_every": None}, ""),
    ],
)
def test_a_model_that_cannot_generate_shows_nothing_and_says_so_once(tmp_path, capsys, changes, words):
    with fake_group(2):
        assert training_pictures(training(tmp_path, **changes)) is None
    said = capsys.readouterr().out
    assert not pictures_path(tmp_path).exists()
    assert said.count("no pictures are captioned at evaluations: ") == bool(words) and words in said


def test_pictures_are_small_the_same_ones_each_time_and_fit_their_texts(tmp_path):
    run = training(tmp_path, **{"train.eval_pictures": 3})
    with fake_group(2):
        assert training_pictures(run) is not None
        listed = read_watched(tmp_path).pictures
        files = {row["image"]: (tmp_path / row["image"]).read_bytes() for row in listed}
        assert training_pictures(run) is not None
    assert listed == read_watched(tmp_path).pictures and len(files) == 3
    for row in listed:
        assert (tmp_path / row["image"]).read_bytes() == files[row["image"]]
        picture = Image.open(tmp_path / row["image"])
        red, _, blue = picture.getpixel((5, 5))
        assert ("red" in row["truth"]) == (red > blue) and max(picture.size) <= SIDE


def evaluate(run: SimpleNamespace, *steps: int) -> None:
    """Evaluate after these steps, as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Collectives() as run.collectives:
            pictures = training_pictures(run)
            for step in steps:
                assert pictures.evaluate({"step": step}) == {}
    finally:
        dist.destroy_process_group()


def test_an_own_generate_that_raises_ends_no_training(tmp_path, capsys):
    run = training(tmp_path, **{"model.build": "wrong_models:mute", "launch.ranks": 1})
    evaluate(run, 2, 4)
    said = capsys.readouterr().out
    assert said.count("model.build: generate of the model raised ValueError: has no words") == 1
    assert "set train.eval_pictures to 0" in said
    assert rows_path(tmp_path).read_text() == "" and run.setup.model.training


def test_nothing_is_compiled_for_the_lengths_of_texts(tmp_path):
    run = training(tmp_path, **{"launch.ranks": 1, "fsdp.compile_units": True})
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    for layer in run.setup.model.language.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    evaluate(run, 2)
    assert len(read_watched(tmp_path).rows) == 1 and compiled == []
