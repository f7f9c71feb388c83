"""OpenFlamingo's checkpoints: loading one gives the original's logits, loss and gradients; saving writes it back."""

import json
import zlib
from pathlib import Path

import pytest
import torch

from mmfsdp.kit.compat.openflamingo import load_open_flamingo, save_open_flamingo
from mmfsdp.kit.models import Flamingo, TokenIds, build_language, build_vision
from mmfsdp.params import BackboneParams

REFERENCE = json.loads((Path(__file__).parent.parent / "files" / "open_flamingo_gpt_neox.json").read_text())


def rule(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight by the rule that the reference file states."""
    crc = zlib.crc32(name.encode())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(crc))
    if name.endswith("_gate"):
        return torch.full(shape, 0.5 if crc % 2 else -0.5)
    return 1 + 0.1 * noise if len(shape) == 1 and name.endswith("weight") else 0.2 * noise


def original_weights() -> dict[str, torch.Tensor]:
    return {name: rule(name, tuple(shape)) for name, shape in REFERENCE["parameter_shapes"].items()}


def new_model() -> Flamingo:
    tokens = TokenIds(
        image=REFERENCE["media_token_id"], end_of_chunk=REFERENCE["end_of_chunk_token_id"], pad=120, known=120, new=3
    )
    language = BackboneParams(config={"model_type": REFERENCE["family"], **REFERENCE["language_model"]})
    vision = BackboneParams(source="open_clip", config=REFERENCE["clip"])
    every = REFERENCE["cross_attn_every_n_layers"]
    return Flamingo(build_vision(vision), build_language(language), tokens=tokens, cross_attention_every=every)


def inputs() -> dict:
    generator = torch.Generator().manual_seed(7)
    torch.randint(0, 120, (2, 14), generator=generator)
    vision = torch.randn(2, 2, 1, 3, 32, 32, generator=generator)
    assert torch.equal(vision.flatten()[:8], torch.tensor(REFERENCE["vision_x_first"]))
    return {"input_ids": torch.tensor(REFERENCE["ids"]), "media": {"vision": vision}}


@pytest.mark.parametrize("form", ["plain.pt", "module.pt", "training.pt"])
def test_same_logits_loss_and_gradients_as_the_original(tmp_path, form):
    weights = original_weights()
    named = {f"module.{n}": w for n, w in weights.items()} if form == "module.pt" else weights
    torch.save({"epoch": 1, "model_state_dict": named} if form == "training.pt" else named, tmp_path / form)
    model = new_model().eval()
    load_open_flamingo(model, tmp_path / form)

    batch = inputs()
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == REFERENCE["media_token_id"], -100)
    out = model(**batch, labels=labels)
    out.loss.backward()

    assert (out.logits - torch.tensor(REFERENCE["logits"])).abs().max() < 1e-4
    assert out.loss.item() == pytest.approx(REFERENCE["loss"], abs=1e-5)
    ours = dict(model.named_parameters())
    for name, norm in REFERENCE["grad_norms"].items():
        name = name.replace("lang_encoder", "language_model").replace("gated_cross_attn_layer", "cross_attention")
        assert ours[name].grad.norm().item() == pytest.approx(norm, rel=1e-3), name


def test_what_is_saved_has_the_original_names_and_loads_again(tmp_path):
    torch.save(original_weights(), tmp_path / "original.pt")
    model = new_model()
    load_open_flamingo(model, tmp_path / "original.pt")
    save_open_flamingo(model, tmp_path / "all.pt")
    again = new_model()
    load_open_flamingo(again, tmp_path / "all.pt")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))

    for name, p in model.named_parameters():
        p.requires_grad_("perceiver" in name or "cross_attention" in name or "new_tokens" in name)
    save_open_flamingo(model, tmp_path / "released.pt")
    released = torch.load(tmp_path / "released.pt", weights_only=True)
    original = original_weights()
    wanted = {n for n in original if "perceiver" in n or "gated" in n or "embed_in" in n or "lm_head" in n}
    assert released.keys() == wanted
    assert all(torch.equal(released[name], original[name]) for name in wanted)


@pytest.mark.parametrize("family, layers", {"llama": "model.layers", "opt": "model.decoder.layers"}.items())
def test_other_language_models_have_the_original_names_too(build, text_only, family, layers, tmp_path):
    model = build(family)
    save_open_flamingo(model, tmp_path / "all.pt")
    names = {name.rpartition(f"lang_encoder.{layers}.")[2] for name in torch.load(tmp_path / "all.pt")}
    frozen = {name for name, _ in text_only(family).named_parameters() if name.startswith(f"{layers}.")}
    for name in frozen:
        number, _, leaf = name.removeprefix(f"{layers}.").partition(".")
        assert f"{number}.decoder_layer.{leaf}" in names
    crossed = {name.partition(".")[0] for name in names if ".gated_cross_attn_layer.attn.to_kv.weight" in name}
    assert crossed == {"1", "3"} and frozen
    again = build(family, gate=0.1)
    load_open_flamingo(again, tmp_path / "all.pt")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_second_names_of_layers_are_understood(tmp_path):
    original = original_weights()
    listed = {
        n.replace("gpt_neox.layers.1.gated_cross_attn_layer", "gated_cross_attn_layers.1")
        .replace("gpt_neox.layers.0.decoder_layer", "old_decoder_blocks.0")
        .replace("lm_head", "embed_out"): weight
        for n, weight in original.items()
    }
    torch.save(listed, tmp_path / "listed.pt")
    torch.save(original, tmp_path / "original.pt")
    one, other = new_model(), new_model()
    load_open_flamingo(one, tmp_path / "listed.pt")
    load_open_flamingo(other, tmp_path / "original.pt")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_wrong_checkpoints_are_named(tmp_path):
    def load(weights):
        torch.save(weights, tmp_path / "wrong.pt")
        load_open_flamingo(new_model(), tmp_path / "wrong.pt")

    original = original_weights()
    gate = "lang_encoder.gpt_neox.layers.3.gated_cross_attn_layer.attn_gate"
    with pytest.raises(ValueError, match=f"missing {gate}"):
        load({name: weight for name, weight in original.items() if name != gate})
    with pytest.raises(ValueError, match="not in the model perceiver.extra"):
        load({**original, "perceiver.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"perceiver.latents is \(3, 48\), the model's is \(64, 48\)"):
        load({**original, "perceiver.latents": torch.zeros(3, 48)})
    with pytest.raises(ValueError, match="lm_head.weight has 122 rows; 120 tokens and 3 new ones"):
        load({**original, "lang_encoder.lm_head.weight": torch.zeros(122, 32)})
