"""Exports hold what was trained and what was not, and load where they are meant to."""

import json

import open_clip
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import mmfsdp
from mmfsdp import Flamingo, ParamError, build_model, checkpoint
from mmfsdp.kit.compat.export import export, load_pretrained, save_pretrained
from mmfsdp.kit.compat.openflamingo import load_open_flamingo
from mmfsdp.kit.run.files.folder import read_metrics
from mmfsdp.kit.train.evaluate import load_run
from mmfsdp.params import RunParams
from tests.models.test_multimodal_run import MULTIMODAL
from tests.tiny_run import tiny_run
from tests.train.test_train import go  # noqa: F401  # a fixture

SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "image_size": 16}
SIGLIP |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}


def logits(model, processor, text: str = "a red circle") -> torch.Tensor:
    """What a model says to a picture and a text."""
    ids = torch.tensor([[processor.image_id] * getattr(model, "num_tokens", {"vision": 1})["vision"]])
    ids = torch.cat((ids, processor.tokenizer(text, return_tensors="pt").input_ids), dim=1)
    g = torch.Generator().manual_seed(1)
    shape = (1, 1, processor.image_size, processor.image_size)
    media = {"vision": torch.randn(1, 1, 1, 3, *shape[2:], generator=g)}
    with torch.no_grad():
        return model(ids, media=media).logits


def test_every_part_of_a_flamingo_loads_by_its_own_library(go, tmp_path):  # noqa: F811
    run = go(**{"train.steps": 2})
    _, trained, processor = load_run(run)
    folder = export(run, tmp_path / "whole")
    again, its = mmfsdp.load_pretrained(folder)
    frozen = [n for n in dict(trained.named_parameters()) if not n.endswith(".table.weight")]
    assert all(torch.equal(again.get_parameter(n), trained.get_parameter(n)) for n in frozen)
    torch.testing.assert_close(logits(again, its), logits(trained, processor), rtol=0, atol=0)
    assert isinstance(again, Flamingo) and again.tokens == trained.tokens

    words = AutoTokenizer.from_pretrained(folder / "language")
    language = AutoModelForCausalLM.from_pretrained(folder / "language")
    assert len(words) == len(language.get_input_embeddings().weight) == language.config.vocab_size == 13
    ids = words("a red <|endofchunk|> circle", return_tensors="pt").input_ids
    assert words.convert_tokens_to_ids("<|endofchunk|>") in ids
    for p in (p for n, p in trained.named_parameters() if n.endswith("_gate")):
        p.data.zero_()  # closed gates leave the language model
    with torch.no_grad():
        torch.testing.assert_close(language(ids).logits, trained(ids).logits, rtol=1e-6, atol=1e-6)

    vision = open_clip.create_model(f"local-dir:{folder / 'vision'}").visual
    theirs = trained.vision_encoder.visual.state_dict()
    assert vision.state_dict().keys() == theirs.keys()
    assert all(torch.equal(t, theirs[n]) for n, t in vision.state_dict().items())
    with pytest.raises(FileExistsError):
        export(run, folder)
    with pytest.raises(ParamError, match="holds no config.json of ours; give one that `mmfsdp export` wrote"):
        load_pretrained(tmp_path)

    more = json.loads((folder / "config.json").read_text())["freeze"]
    assert RunParams.from_dict({"model": {"freeze": more}}).model.frozen_patterns == trained_freeze(run), (
        "trains on as before"
    )


def trained_freeze(run):
    return RunParams.from_yaml(run / "params.yaml").model.frozen_patterns


@pytest.mark.parametrize("lora", [None, 2])
def test_every_part_of_a_multimodal_model_loads_by_its_own_library(tmp_path, lora):
    vision = {"source": "transformers", "config": SIGLIP}
    params = tiny_run(tmp_path).change(**{**MULTIMODAL, "model.vision": vision, "model.lora_rank": lora})
    model, processor = build_model(params.model)
    for name, p in model.named_parameters():
        if "lora_B" in name or "projectors" in name:
            torch.nn.init.normal_(p, std=0.1)
    said, words = logits(model.eval(), processor), processor.tokenizer("a blue square", return_tensors="pt").input_ids
    with torch.no_grad():
        text = model(words).logits
    visual = model.encoders["vision"].state_dict()
    save_pretrained(model, processor, params.model, tmp_path / "out")
    again, its = load_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again, its), said, rtol=1e-5, atol=1e-5)
    language = AutoModelForCausalLM.from_pretrained(tmp_path / "out/language")
    with torch.no_grad():
        torch.testing.assert_close(language(words).logits, text, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/language")) == language.config.vocab_size
    seen = AutoModel.from_pretrained(tmp_path / "out/vision")
    assert all(torch.equal(t, visual[f"visual.{n}"]) for n, t in seen.state_dict().items())


def test_a_quantized_run_resumes_and_exports_original_weights_and_lora_merged_into_rounded_ones(go, tmp_path):  # noqa: F811
    fields = {**MULTIMODAL, "model.lora_rank": 2, "fsdp.frozen_dtype": "nf4", "train.lr": 0.1}
    go(**{**fields, "train.steps": 2})
    run = go(**{**fields, "train.steps": 3})
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    _, trained, processor = load_run(run)
    _, original, _ = load_run(run, quantized=False)
    codes = {name for name, _ in trained.named_parameters() if name.endswith("_codes")}
    newest = checkpoint.latest(run / "checkpoints")
    marker = checkpoint.marker_of(newest)
    assert codes and codes < marker["frozen"].keys() and not codes & {*marker["names"]}
    next(p for name, p in trained.named_parameters() if name in codes)[0, 0] ^= 1
    with pytest.raises(ParamError, match="model: 1 frozen parameters, such as .*_codes, are not those"):
        checkpoint.check_frozen(checkpoint.frozen_checksums(trained), marker)

    _, trained, _ = load_run(run)
    words = processor.tokenizer("a blue square", return_tensors="pt").input_ids
    with torch.no_grad():
        text, unrounded = trained(words).logits, original(words).logits
    again, _ = load_pretrained(export(run, tmp_path / "out"))
    with torch.no_grad():
        torch.testing.assert_close(again(words).logits, text, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(text, unrounded, atol=1e-3), "rounding is seen here"
    theirs = original.encoders["vision"].state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in again.encoders["vision"].state_dict().items())


def test_openflamingos_layout_holds_what_was_trained(go, tmp_path):  # noqa: F811
    run = go(**{"train.steps": 2})
    _, trained, _ = load_run(run)
    _, other, _ = load_run(run)
    for p in other.parameters():
        p.data.zero_() if p.requires_grad else None
    load_open_flamingo(other, export(run, tmp_path / "theirs", layout="open_flamingo") / "checkpoint.pt")
    assert all(torch.equal(p, trained.get_parameter(n)) for n, p in other.named_parameters())
    with pytest.raises(ParamError, match="layout: 'onnx' is not one of from_pretrained, adapter, open_flamingo"):
        export(run, tmp_path / "wrong", layout="onnx")
