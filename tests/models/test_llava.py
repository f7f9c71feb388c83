"""load_llava: transformers' LLaVA gives the same logits as a MultimodalModel; others are refused."""

import copy

import pytest
import torch
import transformers

from mmfsdp.kit.compat.llava import load_llava

IMAGE = 63
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
VISION = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
CASES = {
    "as released": {},
    "last layer": {"vision_feature_layer": -1},
    "tied Mistral, no bias": {
        "text_config": transformers.MistralConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True),
        "tie_word_embeddings": True,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "relu",
    },
    "class token": {"vision_feature_select_strategy": "full"},
    "SigLIP": {"vision_config": transformers.SiglipVisionConfig(**VISION), "vision_feature_select_strategy": "full"},
    "SigLIP without its first patch": {"vision_config": transformers.SiglipVisionConfig(**VISION)},
    "two layers": {"vision_feature_layer": [-2, -1]},
}
TOKENS = {"class token": 5, "SigLIP without its first patch": 3}
"""Of a picture, where they are not 4."""


def theirs(**changes) -> transformers.LlavaForConditionalGeneration:
    torch.manual_seed(0)
    parts = {"vision_config": transformers.CLIPVisionConfig(**VISION), "text_config": transformers.LlamaConfig(**TEXT)}
    config = transformers.LlavaConfig(**{**parts, "image_token_index": IMAGE, **changes})
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for p in model.parameters():
        if p.ndim > 1:  # far from the usual tiny start, so that a mistake shows in the logits
            p.data.normal_(std=0.2)
    return model


def inputs(tokens: int = 4) -> dict[str, torch.Tensor]:
    """Two pictures; one, padded on the right; pictures in their order."""
    picture = [IMAGE] * tokens
    rows = [[1, *picture, 5, *picture, 6, 7], [8, 9, *picture, 10]]
    length = len(rows[0])
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(3, 3, 16, 16)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["model", "folder"])
def test_same_logits_as_the_original(case, form, tmp_path):
    original = theirs(**CASES[case])
    given = inputs(TOKENS.get(case, 4))
    with torch.no_grad():
        wanted = original(**given).logits
    if form == "folder":
        original.save_pretrained(tmp_path)
        ours = load_llava(tmp_path).eval()
    else:
        ours = load_llava(copy.deepcopy(original))
    pixels = given["pixel_values"]
    media = {"vision": torch.stack((pixels[:2], torch.stack((pixels[2], torch.zeros_like(pixels[0])))))[:, :, None]}
    with torch.no_grad():
        logits = ours(given["input_ids"], attention_mask=given["attention_mask"], media=media).logits
        blank = ours(given["input_ids"], attention_mask=given["attention_mask"], media={"vision": 0 * media["vision"]})
    seen = given["attention_mask"].bool()
    assert (logits - wanted)[seen].abs().max() < 1e-5
    assert (blank.logits - wanted)[seen].abs().max() > 0.1, "pictures matter"
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in original.parameters())


def test_same_text_and_gradients_as_the_original():
    original = theirs()
    ours = load_llava(copy.deepcopy(original))
    given = inputs()
    one = {name: value[:1] for name, value in given.items()} | {"pixel_values": given["pixel_values"][:2]}
    media = {"vision": one["pixel_values"][None, :, None]}
    said = original.generate(**one, max_new_tokens=5, do_sample=False, suppress_tokens=[IMAGE])
    assert torch.equal(ours.generate(one["input_ids"], media=media, max_new_tokens=5), said)
    labels = one["input_ids"].masked_fill(one["input_ids"] == IMAGE, -100)
    original(**one, labels=labels).loss.backward()
    ours(one["input_ids"], media=media, labels=labels).loss.backward()
    for name, p in original.model.multi_modal_projector.named_parameters():
        torch.testing.assert_close(ours.projectors["vision"].get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6)


def test_what_is_not_supported_is_said(tmp_path):
    for family, message in {
        "qwen2_vl": "'qwen2_vl' is not supported; only",
        "gpt2": "'gpt2' is not supported; only",
    }.items():
        transformers.AutoConfig.for_model(family).save_pretrained(tmp_path / family)
        with pytest.raises(ValueError, match=message):
            load_llava(tmp_path / family)
