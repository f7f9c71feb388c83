"""build_model: from parameters, a generated folder or a preset to a model and its processor."""

import json
import socket

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmfsdp.core.freeze import freeze
from mmfsdp.kit.data import Sample
from mmfsdp.kit.models import TokenIds, build_language
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.models.generated import generated_folder
from mmfsdp.kit.train.evaluate import captions
from mmfsdp.params import GENERATED, RECIPES, BackboneParams, ModelParams, ParamError, load
from mmfsdp.planning import make_plan
from tests import tiny_run

TEXT = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
WORDS = tiny_run.WORDS
VISION = tiny_run.VISION | {"text_cfg": TEXT}
LANGUAGE = {"model_type": "llama", "vocab_size": 12, "hidden_size": 16, "intermediate_size": 32}
LANGUAGE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": True}


@pytest.fixture
def params(monkeypatch, tmp_path) -> ModelParams:
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path))
    vision = BackboneParams(source="open_clip", weights=GENERATED, config=VISION)
    language = BackboneParams(weights=GENERATED, config=LANGUAGE)
    return ModelParams(vision=vision, language=language, num_latents=2, perceiver_depth=1)


def pretrained(params: ModelParams) -> None:
    """What pretraining leaves in the generated folder, with random weights."""
    folder = generated_folder(params)
    (folder / "vision").mkdir(parents=True)
    save_file(open_clip.CLIP(**VISION).state_dict(), folder / "vision" / "open_clip_model.safetensors")
    looks = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    config = json.dumps({"model_cfg": VISION, "preprocess_cfg": looks})
    (folder / "vision" / "open_clip_config.json").write_text(config)
    tiny_run.write_language(folder / "language", LANGUAGE)


def test_generated_weights_that_are_missing_are_an_error_but_not_on_meta(params):
    with pytest.raises(
        ParamError, match="vision.weights: generated weights are not in .* `mmfsdp run`, which pretrains"
    ):
        build_model(params)
    model, processor = build_model(params, meta=True)
    assert processor is None and {p.device.type for p in model.parameters()} == {"meta"}


def test_a_plan_made_before_pretraining_fits_the_model_after_it(params):
    before, _ = build_model(params, meta=True)
    pretrained(params)
    model, _ = build_model(params)
    meta, processor = build_model(params, meta=True)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert shapes == {n: p.shape for n, p in before.named_parameters()}
    assert shapes == {n: p.shape for n, p in meta.named_parameters()}
    assert processor is not None


def test_model_and_processor_fit_each_other(params):
    pretrained(params)
    model, processor = build_model(params)
    assert model.tokens == TokenIds.after(len(WORDS)), "released OpenFlamingo rows: end of chunk, image, padding"
    assert (processor.image_size, tuple(processor.mean)) == (16, (0.5, 0.5, 0.5))
    saved = open_clip.create_model(f"local-dir:{generated_folder(params) / 'vision'}").visual.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.vision_encoder.visual.state_dict().items())
    folder = str(generated_folder(params) / "language")
    table = build_language(BackboneParams(name=folder, weights=folder)).get_input_embeddings()
    assert torch.equal(model.get_input_embeddings().table.weight, table.weight)

    picture = Image.new("RGB", (20, 10), "red")
    samples = [
        Sample.of("<image>", "a small red circle", (picture,)),
        Sample.of("<image> a", "blue square", (picture,)),
    ]
    check_fit(model, processor, samples)


def check_fit(model, processor, samples: list[Sample]) -> None:
    """The model takes the processor's batches, and what it says is decoded."""
    assert model(**processor(samples).inputs()).loss > 0
    texts = captions(model, processor, samples)
    assert len(texts) == 2 and all(word in WORDS for text in texts for word in text.split())


def test_the_generated_folder_follows_the_backbones_only(params, tmp_path):
    folder = generated_folder(params)
    assert folder.parent == tmp_path
    assert folder == generated_folder(params.change(num_latents=7))
    assert folder != generated_folder(params.change(**{"language.config": {**LANGUAGE, "vocab_size": 13}}))


def test_a_configuration_that_the_weights_do_not_have_is_an_error(params):
    pretrained(params)
    folder = str(generated_folder(params) / "language")
    other = BackboneParams(weights=folder, config={**LANGUAGE, "intermediate_size": 48})
    with pytest.raises(ParamError, match="language.config: "):
        build_language(other)
    with pytest.raises(ParamError, match="language.weights: '.*absent' gives no ModelForCausalLM"):
        build_language(BackboneParams(name="x", weights=folder + "/absent"))
    meta = build_language(BackboneParams(name=folder, weights=folder), meta=True)
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_without_a_tokenizer_there_is_no_processor():
    vision = BackboneParams(source="open_clip", config=VISION)
    model, processor = build_model(ModelParams(vision=vision, language=BackboneParams(config=LANGUAGE)))
    assert processor is None and model.tokens.known == 12


PUBLISHED = {  # vision encoder and language model: open_clip's profile, model cards and papers
    "openflamingo_3b": (303_966_208, 1_311_344_640),
    "openflamingo_9b": (303_966_208, 6_649_286_656),
    "clip_llama_1b": (87_456_000, 1_235_814_400),
    "siglip_qwen": (428_225_600, 1_543_714_304),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes_and_need_no_network(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("this needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    params = load(name).model
    model, processor = build_model(params, meta=True)
    added = sum(p.numel() for n, p in model.language_model.named_parameters() if "cross_att" in n or "new_tokens" in n)
    vision = sum(p.numel() for p in model.vision_encoder.parameters())
    language = sum(p.numel() for p in model.language_model.parameters()) - added
    assert (vision, language) == PUBLISHED[name] and processor is None
    crossed = [i for i, layer in enumerate(model.layers) if layer.cross_attention is not None]
    assert crossed[0] + 1 == params.cross_attention_every


def test_llava_7b_has_the_published_size_and_a_plan_of_its_stage():
    """Parts as transformers' llava-1.5-7b-hf has them, but for the 64 rows that it adds to Vicuna's vocabulary."""
    params = load("llava_7b")
    model, _ = build_model(params.model, meta=True)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert sizes == {"encoders": 303_507_456, "projectors": 20_979_712, "language_model": 6_738_415_616}
    assert sum(sizes.values()) + 2 * 64 * 4096 == 7_063_427_072 and model.num_tokens == {"vision": 576}
    freeze(model, params.model.frozen_patterns)
    plan = make_plan(model, params.fsdp, world_size=8)
    assert {u.kind for u in plan.units if u.name.startswith("encoders")} == {"frozen"}
    assert (
        sum(u.name.endswith("decoder_layer") or ".layers." in u.name for u in plan.units if u.kind == "trainable") == 32
    )


def test_a_multimodal_model_and_its_processor_fit_each_other(params):
    pretrained(params)
    params = params.change(kind="multimodal", projector="linear", lora_rank=2)
    meta, _ = build_model(params, meta=True)
    model, processor = build_model(params)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}
    assert {p.device.type for p in [*meta.parameters(), *meta.buffers()]} == {"meta"}
    assert model.num_tokens == {"vision": processor.picture_tokens}
    assert model.placeholders == {"vision": processor.image_id}

    samples = [
        Sample.of("<image> a", "red circle", (Image.new("RGB", (20, 10), "red"),)),
        Sample.of("a", "blue square"),
    ]
    check_fit(model, processor, samples)


def test_what_a_kind_of_model_does_not_have_is_named():
    def refused(message: str, **fields):
        with pytest.raises(ParamError, match=message):
            ModelParams(**fields)

    refused("lora_rank: 4 has no effect unless kind is multimodal", lora_rank=4)
    refused("projector: linear has no effect unless kind is multimodal", projector="linear")
    refused("language.feature_layer: 8 is for vision encoders only", language={"name": "gpt2", "feature_layer": 8})
    refused("freeze: 'encoders.*' .*llava_lora.* needs kind multimodal", freeze=("llava_lora",))
    refused("freeze: 'lora' needs LoRA; set lora_rank, and kind to multimodal", freeze=("lora",))
    refused("freeze: .* needs LoRA; set lora_rank", kind="multimodal", freeze=("llava_lora",))


@pytest.mark.parametrize("kind", ["flamingo", "multimodal"])
def test_a_backbone_that_does_not_fit_is_refused_by_name(params, kind):
    for config, message in {
        "mamba": "language: MambaForCausalLM has no KV cache; choose",
        "recurrent_gemma": "language: RecurrentGemmaForCausalLM has no KV cache",
        "t5": "language: t5 is no causal language model; choose one",
    }.items():
        small = {"model_type": config, "num_hidden_layers": 2, "vocab_size": 12}
        with pytest.raises(ParamError, match=message):
            build_model(params.change(kind=kind, language={"config": small}), meta=True)
    with pytest.raises(ParamError, match=r"vision: siglip2_vision_model .* has no image_size; choose"):
        vision = {"config": {"model_type": "siglip2_vision_model"}}
        build_model(params.change(kind=kind, vision=vision), meta=True)
    pretrained(params)
    language = {"name": str(generated_folder(params) / "language"), "config": {**LANGUAGE, "vocab_size": 8}}
    with pytest.raises(ParamError, match="language: the tokenizer has 10 tokens but the embedding table only 8 rows"):
        build_model(params.change(kind=kind, language=language), meta=True)


def test_recipes_stand_for_their_patterns_and_each_kind_has_its_own():
    assert ModelParams().frozen_patterns == ModelParams(freeze=("flamingo",)).freeze == RECIPES["flamingo"]
    assert ModelParams(kind="multimodal").frozen_patterns == RECIPES["llava_stage1"]
    assert ModelParams(kind="multimodal", lora_rank=2).frozen_patterns == RECIPES["llava_lora"]
    mixed = ModelParams(kind="multimodal", freeze=("llava_stage1", "!language_model.*norm*"))
    assert mixed.freeze == (*RECIPES["llava_stage1"], "!language_model.*norm*")
