"""The captioner: answers as `generate` does, with chances, beside the blanked picture; uploads are looked at first."""

import io
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from mmfsdp.kit.data.batch import Sample
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.train.answers import Answer, answer, losses_by_covering
from mmfsdp.kit.train.evaluate import captions
from mmfsdp.kit.widgets.captioner import COVERING, MIN_LOSS
from mmfsdp.params import ModelParams
from mmfsdp.widgets import Captioner
from tests.tiny_vlms import save_vlm
from tests.train.test_train import go  # noqa: F401  # a fixture
from tests.widgets.test_panel import shown


def upload(captioner, name: str, content: bytes) -> None:
    file = {"name": name, "type": "", "size": 1, "content": content, "last_modified": datetime.now()}
    captioner.upload.value = (file,)


def test_a_run_is_asked_about_its_pictures_and_about_ones_own(go):  # noqa: F811
    run = go(**{"train.steps": 2})
    captioner = Captioner(run).wait()
    assert captioner.checkpoint == "step_00000002" and captioner.pick.options[0] == "new 1"
    sample = captioner.samples["new 1"]
    said = answer(captioner.model, captioner.processor, sample)
    assert [said.text] == captions(captioner.model, captioner.processor, [sample])
    assert all(0 < chance <= 1 for _, chance, _ in said.tokens)
    page = shown(captioner)
    assert "without it (blanked)" in page and f"truth: {sample.text}" in page and "data:image/png" in page
    assert captioner.token.options[0] == (f"{said.tokens[0][0]} {said.tokens[0][1]:.0%}", 0)
    most = float(losses_by_covering(captioner.model, said)[0].max())
    words = f"at most {most:.1%} of probability" if most < MIN_LOSS else f"up to {most:.0%} less likely"
    assert captioner.layer.value == COVERING and words in captioner.seen.value
    captioner.layer.index = len(captioner.layer.options) - 1
    captioner.wait()
    before = captioner.seen.value
    assert before.count("rgba(0,0,0,") == 4 and captioner.layer.label in before, "2 x 2 patches"
    captioner.token.index = len(said.tokens) - 1
    captioner.wait()
    assert captioner.seen.value != before

    file = io.BytesIO()
    Image.new("RGBA", (70, 30), "red").save(file, "PNG")
    upload(captioner, "<script>x</script>.png", file.getvalue())
    captioner.wait()
    assert captioner.pick.value == "yours: script>.png" and "truth" not in captioner.said.value
    upload(captioner, "no.png", b"GIF89a no picture")
    assert "is not a usable picture" in captioner.note.value
    captioner.prompt.value = "no picture here <b>"
    with pytest.raises(ValueError, match="prompt: needs one <image>"):
        captioner.wait()
    assert "needs one &lt;image&gt;" in captioner.note.value
    captioner.pick.value = "new 1"
    captioner.wait()
    assert captioner.note.value.count("></div>") == 1


def counts_shapes(ids, media):
    """A model that says how many bright squares of 8 pixels a picture has, and is sure of its second word."""
    bright = (media["vision"][:, 0, 0].mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((-2, -1)) > 0.5).sum((1, 2))
    logits = torch.zeros(len(ids), ids.shape[1], 6)
    logits[:, -3] = 20.0 * nn.functional.one_hot(bright, 6)
    logits[:, -2, 5] = 20.0
    return SimpleNamespace(logits=logits)


def test_a_word_is_light_where_the_picture_is_needed_for_it_and_nowhere_else():
    places = [(0, 16), (16, 32), (40, 8), (32, 40)]
    picture = torch.zeros(1, 1, 1, 3, 48, 48)
    for y, x in places:
        picture[..., y : y + 8, x : x + 8] = 1.0
    tokens = (("four", 1.0, ""), ("shapes", 1.0, ""))
    said = Answer("four shapes", tokens, torch.tensor([[0, 4, 5]]), {"vision": picture})
    losses = losses_by_covering(counts_shapes, said)
    shapes = picture[0, 0, 0, 0].unfold(0, 4, 4).unfold(1, 4, 4).amax((-2, -1)).bool()  # tiles of 4 pixels
    far = nn.functional.max_pool2d(shapes[None].float(), 5, stride=1, padding=2)[0] == 0
    assert losses.shape == (2, 12, 12) and far.sum() > 20
    assert losses[0][shapes].min() > 0.3 and losses[0][far].abs().max() < 1e-4, (
        "the number, at each of the shapes alone"
    )
    assert losses[1].abs().max() < 1e-4, "the second word does not depend on the picture"


def test_what_cannot_be_loaded_is_said(tmp_path):
    captioner = Captioner(tmp_path)
    with pytest.raises(FileNotFoundError):
        captioner.wait()
    assert "params.yaml" in shown(captioner)


def test_of_a_model_of_transformers_the_answer_is_its_text_alone(tmp_path):
    save_vlm("qwen2_5_vl", tmp_path)
    model, processor = build_model(ModelParams(kind="transformers", name=str(tmp_path)))
    sample = Sample.of("<image>how many ?", "there are 1", (Image.new("RGB", (56, 56)),))
    said = answer(model.eval(), processor, sample)
    assert [said.text] == captions(model, processor, [sample])
    assert said.tokens == () and not said.media
