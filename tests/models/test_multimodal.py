"""MultimodalModel: encoders, projectors and language models of every kind, and what holds for all of them."""

import pytest
import torch
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.kit.models import ModalEncoder, MultimodalModel, build_language, build_vision
from mmfsdp.kit.models.backbones import add_lora
from mmfsdp.params import BackboneParams, FSDPParams
from mmfsdp.planning import make_plan
from tests.models.conftest import greedy

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
VIT = {"embed_dim": 16, "vision_cfg": {"image_size": 16, "layers": 1, "width": 24, "patch_size": 8, "head_width": 12}}
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
WIDE = {**SMALL, "intermediate_size": 48}
TOWERS = {
    "open_clip ViT": BackboneParams(source="open_clip", config=VIT),
    "CLIP": BackboneParams(config={"model_type": "clip_vision_model", **WIDE}),
    "CLIP, last but one": BackboneParams(config={"model_type": "clip_vision_model", **WIDE}, feature_layer=-2),
    "SigLIP": BackboneParams(config={"model_type": "siglip_vision_model", **WIDE}),
    "DINOv2": BackboneParams(config={"model_type": "dinov2", **SMALL}),
    "ViT": BackboneParams(config={"model_type": "vit", **WIDE}),
}
IMAGE, AUDIO = 60, 61


class Ear(nn.Module):
    """An encoder of somebody's own: (N, 8, 10) features of sounds -> (N, 5, 16) tokens."""

    item_shape, num_tokens, dim = (8, 10), 5, 16

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, kernel_size=2, stride=2)
        self.linear = nn.Linear(16, 16)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(features).transpose(1, 2))


def build(text_only, family: str = "llama", *, projector="mlp", tower: str = "open_clip ViT") -> MultimodalModel:
    torch.manual_seed(0)
    vision = ModalEncoder(build_vision(TOWERS[tower]), projector)
    model = MultimodalModel({"vision": vision, "audio": ModalEncoder(Ear(), "linear")}, text_only(family))
    for name, p in model.named_parameters():
        if name.startswith("projectors") and p.ndim == 2:  # far from the usual tiny start
            p.data.normal_(std=0.2)
    return model.eval()


def batch(model: MultimodalModel) -> dict:
    """A picture and a sound; two pictures; only text, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    picture, sound = [IMAGE] * model.num_tokens["vision"], [AUDIO] * model.num_tokens["audio"]
    rows = [[4, *picture, 5, *sound, 6, 7], [*picture, 8, *picture, 9, 10], [11, 12, 13]]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    shape = model.encoders["vision"].item_shape
    media = {"vision": torch.randn(3, 2, 1, *shape, generator=generator)}
    media["audio"] = torch.randn(3, 1, *model.encoders["audio"].item_shape, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "media": media}


def spliced(model: MultimodalModel, inputs: dict, sample: int) -> torch.Tensor:
    """Logits of one sample by hand: projected tokens put between embeddings, given as embeddings."""
    ids = inputs["input_ids"][sample][inputs["attention_mask"][sample].bool()]
    vectors = model.get_input_embeddings()(ids.clamp(max=59))
    for key, token in (("vision", IMAGE), ("audio", AUDIO)):
        items = inputs["media"][key][sample]
        items = items.flatten(0, 1) if key == "vision" else items
        tokens = model.projectors[key](model.encoders[key](items)).flatten(0, 1)
        places = (ids == token).nonzero()[:, 0]
        vectors = vectors.index_copy(0, places, tokens[: len(places)])
    return model.language_model(inputs_embeds=vectors[None]).logits[0]


@pytest.mark.parametrize("tower", TOWERS)
def test_any_tower(tower, text_only):
    model = build(text_only, tower=tower)
    inputs = batch(model)
    assert model.num_tokens == {"vision": model.encoders["vision"].num_tokens, "audio": 5}
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits[1, :8], spliced(model, inputs, 1)[:8], **CLOSE)


def test_tokens_stand_where_their_placeholders_are(family, text_only):
    model = build(text_only, family)
    inputs = batch(model)
    with torch.no_grad():
        logits = model(**inputs).logits
        for sample in range(3):
            own = spliced(model, inputs, sample)
            torch.testing.assert_close(logits[sample, : len(own)], own, **CLOSE)
        alone = model(inputs["input_ids"][2:, :3]).logits  # text alone needs no media
        torch.testing.assert_close(alone[0], logits[2, :3], **CLOSE)


@pytest.mark.parametrize("projector", ["linear", "mlp", nn.Linear(24, 32)])
def test_any_projector_trains(projector, text_only):
    model = build(text_only, projector=projector)
    freeze(model, ["llava_stage1"])
    inputs = batch(model)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= 60, -100)
    assert model(**inputs).loss is None
    model.train()(**inputs, labels=labels).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.projectors.parameters())
    assert all(p.grad is None for p in [*model.encoders.parameters(), *model.language_model.parameters()])
    model.zero_grad()
    model(
        inputs["input_ids"][2:], media={k: v[2:] for k, v in inputs["media"].items()}, labels=labels[2:]
    ).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.projectors.parameters()), "all are entered"


@pytest.mark.parametrize("tower", [name for name in TOWERS if "," not in name and "open_clip" not in name])
def test_the_configuration_of_a_vision_model_says_all_that_an_encoder_needs(tower, text_only):
    encoder = build_vision(TOWERS[tower])
    language = text_only("llama")
    from_config = MultimodalModel({"vision": encoder.visual}, language)
    made = from_config.encoders["vision"]
    for name in ("item_shape", "num_tokens", "dim", "mean", "std"):
        assert getattr(made, name) == getattr(encoder, name), name
    part = from_config.vision_encoder
    assert part.encoder is made and part.projector is from_config.projectors["vision"]
    with pytest.raises(AttributeError, match="audio_encoder"):
        from_config.audio_encoder  # noqa: B018


def test_pixel_values_belong_to_the_samples_whose_placeholders_announce_them(text_only):
    model = build(text_only)
    inputs = batch(model)
    ids, mask, media = inputs["input_ids"], inputs["attention_mask"], inputs["media"]
    pictures = media["vision"][:, :, 0]  # (B, T, C, H, W): the first sample shows one, the second two, the third none
    flat = torch.cat([pictures[0, :1], pictures[1]])
    sounds = {"audio": media["audio"]}
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(
            model(ids, attention_mask=mask, pixel_values=flat, media=sounds).logits[mask.bool()],
            expected[mask.bool()], **CLOSE
        )  # fmt: skip
        one_each = model(ids[1:2], pixel_values=flat[1:], media={"audio": media["audio"][1:2]}).logits
        torch.testing.assert_close(one_each, model(ids[1:2], media={k: v[1:2] for k, v in media.items()}).logits)
        without = model(ids[2:], pixel_values=flat[:0], media={"audio": media["audio"][2:]}).logits
        torch.testing.assert_close(without[0, :3], expected[2, :3], **CLOSE)
    for wrong, message in {
        flat[:2]: "pixel_values: 2 pictures, but input_ids has the placeholders of 3",
        flat[None]: r"pixel_values: \(1, 3, 3, 16, 16\) must be \(pictures, C, H, W\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            model(ids, pixel_values=wrong, media=sounds)
    with pytest.raises(ValueError, match="pixel_values: input_ids says which sample has which picture"):
        model(pixel_values=flat, media=sounds)


def test_pixel_values_are_enough_for_a_plan_and_labels_may_hold_placeholders(text_only):
    tower = build_vision(TOWERS["CLIP"]).visual
    model = MultimodalModel({"vision": tower}, text_only("llama"))
    ids = torch.tensor([[IMAGE] * 4 + [1, 2, 3], [IMAGE] * 4 + [4, 5, 6]])
    example = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    plan = make_plan(model, world_size=2, example=example)
    assert plan.memory_events and not plan.lint
    by_media = example | {"media": {"vision": example["pixel_values"][:, None, None]}}
    del by_media["pixel_values"]
    assert plan.units == make_plan(model, world_size=2, example=by_media).units
    masked = {**example, "labels": ids.masked_fill(ids == IMAGE, -100)}
    assert model(**example).loss == model(**masked).loss
    assert model.count_label_tokens(example) == model.count_label_tokens(masked) == 6, "what the loss is a mean over"


def test_recipes_freeze_each_part_by_itself(text_only):
    model = build(text_only)
    parts = {"llava_stage1": {"projectors"}, "llava_stage2": {"projectors", "language_model"}}
    for recipe, trained in parts.items():
        model.requires_grad_(True)
        freeze(model, [recipe])
        assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == trained
        model.train()
        assert model.training and model.projectors.training and not model.encoders["vision"].visual.training
        assert model.language_model.training == ("language_model" in trained)
        model.eval()
        assert not any(module.training for module in model.modules())
    freeze(model, ["encoders.vision.*", "projectors.vision.*", "!encoders.audio.*"])
    model.train()
    assert model.encoders["audio"].conv.training and not model.projectors["vision"].training


def test_generation_is_greedy_decoding_with_and_without_cache(family, text_only, left):
    model = build(text_only, family)
    inputs = batch(model)
    ids, mask = left(inputs["input_ids"], inputs["attention_mask"])
    rest = {"attention_mask": mask, "media": inputs["media"], "eos_token_id": None, "max_new_tokens": 4}
    cached = model.generate(ids, **rest)
    assert torch.equal(cached, model.generate(ids, **rest, use_cache=False))
    assert torch.equal(cached, greedy(model, ids, mask, inputs["media"], steps=4))
    beams = model.generate(ids, **rest, num_beams=2)
    assert torch.equal(beams, model.generate(ids, **rest, num_beams=2, use_cache=False))


@pytest.mark.parametrize("whole", [False, True])
def test_lora_adapters_train_beside_a_frozen_base(whole, text_only):
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    plain = build(text_only)
    inputs = batch(plain)
    wanted = plain(**inputs).logits
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    language = text_only("llama")
    language = get_peft_model(language, config) if whole else inject_adapter_in_model(config, language)
    vision = ModalEncoder(plain.encoders["vision"], plain.projectors["vision"])
    model = MultimodalModel(
        {"vision": vision, "audio": ModalEncoder(plain.encoders["audio"], plain.projectors["audio"])}, language
    ).eval()
    torch.testing.assert_close(model(**inputs).logits, wanted, **CLOSE)
    freeze(model, ["llava_lora"])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in n or n.startswith("projectors") for n in trained) and any("lora_" in n for n in trained)
    model.train()
    dropouts = [m for n, m in model.named_modules() if n.endswith("lora_dropout.default")]
    assert dropouts and all(d.training for d in dropouts)
    assert not any(m.training for n, m in model.named_modules() if n.endswith("base_layer"))
    model(**inputs, labels=inputs["input_ids"].clamp(max=59)).loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
    said = model.eval().generate(inputs["input_ids"][1:2, :9], media={k: v[1:2] for k, v in inputs["media"].items()})
    assert said.shape[1] > 9


def test_widths_that_do_not_fit_are_named_with_both_numbers(text_only):
    vision, language = build_vision(TOWERS["CLIP"]), text_only("llama")
    cases = {
        r"mat1 and mat2 shapes cannot be multiplied|must have same reduction dim": nn.Linear(20, 32),
        r"projector Linear must turn \(2, 4, 24\) .* into \(2, tokens, 32\), not \(2, 4, 31\)": nn.Linear(24, 31),
        r"projector Flatten must turn .*, not \(2, 96\)": nn.Flatten(),
        r"projector: 'mpl' is not one of linear, mlp, nor a module": "mpl",
    }
    for message, projector in cases.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            MultimodalModel({"vision": ModalEncoder(vision, projector)}, language)
    with pytest.raises(
        ValueError, match="encoders.vision: Conv2d has no item_shape, num_tokens and dim, and is no vis"
    ):
        MultimodalModel({"vision": nn.Conv2d(3, 24, 8)}, language)
    with pytest.raises(ValueError, match="encoders.vision.image_size: .* LlamaForCausalLM has image_size None"):
        MultimodalModel({"vision": text_only("llama")}, language)
    with pytest.raises(ValueError, match="placeholders: .* must have the keys of encoders, vision"):
        MultimodalModel({"vision": ModalEncoder(vision)}, language, placeholders={"image": 3})


def test_media_that_do_not_fit_the_text_are_named(text_only):
    model = build(text_only)
    inputs = batch(model)
    ids, media = inputs["input_ids"], inputs["media"]
    with pytest.raises(ValueError, match="sample 1 has 8 placeholder tokens of vision .* 1 items of 4 tokens each"):
        model(ids, media={**media, "vision": media["vision"][:, :1]})
    with pytest.raises(ValueError, match="sample 0 has 4 placeholder tokens of vision .* but 0 items"):
        model(ids)
    with pytest.raises(ValueError, match="sample 0 has 3 placeholder tokens of vision"):
        model(ids[:, 2:], media=media)
    with pytest.raises(ValueError, match=r"must have audio of \(batch, items, 8, 10\)"):
        model(ids, media={"vision": media["vision"]})
    with pytest.raises(ValueError, match="no encoder for touch; there are vision, audio"):
        model(ids, media={**media, "touch": media["audio"]})
    with pytest.raises(ValueError, match="vision for 2 samples, but input_ids has 3"):
        model(ids, media={k: v[:2] for k, v in media.items()})


def test_adapters_of_fused_experts_are_planned_with_an_example():
    torch.manual_seed(0)
    config = {"model_type": "mixtral", **WIDE, "vocab_size": 60, "num_key_value_heads": 2, "num_local_experts": 2}
    del config["image_size"], config["patch_size"]
    language = build_language(BackboneParams(config=config))
    add_lora(language, 2)
    freeze(language, ["*", "!*lora_*"])
    example = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    assert make_plan(language, world_size=2, example=example).lint == ()


@pytest.mark.parametrize("place, warns", {"target_modules": True, "modules_to_save": True, "": False}.items())
def test_an_adapter_or_a_trained_copy_of_one_of_two_tied_parameters_is_told(place, warns):
    """Merged into the head, it would change the table of the input, too; a copy would drift apart from it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    changes = {"target_modules": ["q_proj"]}
    if place:
        changes[place] = ["lm_head"]
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, **changes))
    plan = make_plan(model, FSDPParams(), world_size=2)
    told = [finding.message for finding in plan.lint if finding.code == "tied-adapter"]
    assert len(told) == warns
    assert all("lm_head: has " in message and "embed_tokens.weight" in message for message in told)
