"""The captioner: answers as `generate` does, with chances, beside the blanked picture; uploads are looked at first."""

import io
from datetime import datetime

import pytest
from PIL import Image

from mmfsdp.kit.data.batch import Sample
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.train.answers import answer
from mmfsdp.kit.train.evaluate import captions
from mmfsdp.params import ModelParams
from mmfsdp.widgets import Captioner
from tests.tiny_vlms import save_vlm
from tests.train.test_train import go  # noqa: F401  # a fixture
from tests.widgets.test_panel import shown


def upload(captioner, name: str, content: bytes) -> None:
    file = {"name": name, "type": "", "size": 1, "content": content, "last_modified": datetime.now()}
    captioner._upload.value = (file,)


def test_a_run_is_asked_about_its_pictures_and_about_ones_own(go):  # noqa: F811
    run = go(**{"train.steps": 2})
    captioner = Captioner(run).wait()
    assert captioner.checkpoint == "step_00000002" and captioner._pick.options[0] == "new 1"
    sample = captioner._samples["new 1"]
    said = answer(captioner.model, captioner.processor, sample)
    assert [said.text] == captions(captioner.model, captioner.processor, [sample])
    assert all(0 < chance <= 1 for _, chance, _ in said.tokens)
    page = shown(captioner)
    assert f"{said.tokens[0][1]:.0%}" in page and "without it (blanked)" in page and f"truth: {sample.text}" in page
    assert page.count("rgba(0,0,0,") == 4 and "data:image/png" in page, "2 x 2 patches"
    before = captioner._seen.value
    captioner._token.index = len(said.tokens) - 1
    captioner.wait()
    assert captioner._seen.value != before

    file = io.BytesIO()
    Image.new("RGBA", (70, 30), "red").save(file, "PNG")
    upload(captioner, "<script>x</script>.png", file.getvalue())
    captioner.wait()
    assert captioner._pick.value == "yours: script>.png" and "truth" not in captioner._said.value
    upload(captioner, "no.png", b"GIF89a no picture")
    assert "is not a usable picture" in captioner._note.value
    captioner._prompt.value = "no picture here <b>"
    with pytest.raises(ValueError, match="prompt: needs one <image>"):
        captioner.wait()
    assert "needs one &lt;image&gt;" in captioner._note.value
    captioner._pick.value = "new 1"
    captioner.wait()
    assert captioner._note.value.count("></div>") == 1


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
