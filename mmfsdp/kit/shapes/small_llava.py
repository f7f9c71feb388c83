"""A small LLaVA of transformers from the pretrained backbones: its vision encoder is open_clip's, under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CLIPImageProcessor, LlavaForConditionalGeneration, LlavaProcessor

from ...params import GENERATED, BackboneParams, BackboneSource, ModelParams, ParamError
from ..data.processor import IMAGE
from ..models import build_language, build_vision
from ..models.backbones import load_config, load_tokenizer
from ..models.generated import resolve_generated

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
    "{% else %}{{ message.content[0].text }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""The texts of the pretraining: a question or nothing, then the answer and the end token, and no names of speakers."""


def backbones_of(params: ModelParams) -> ModelParams:
    """Return the parameters of the two generated backbones that a LLaVA is made of. Raises ParamError."""
    config: dict[str, Any] = params.config
    vision, text = config.get("vision_config", {}), config.get("text_config", {})
    if config.get("model_type") != "llava" or vision.get("model_type") != "clip_vision_model" or not text:
        message = "generated needs a config of model_type llava, with a vision_config of clip_vision_model and a "
        raise ParamError("model.weights", message + "text_config; see the preset tiny_llava")
    width = vision["hidden_size"]
    tower = {"image_size": vision["image_size"], "patch_size": vision["patch_size"], "width": width}
    tower |= {"head_width": width // vision["num_attention_heads"], "layers": vision["num_hidden_layers"]}
    clip = {
        "embed_dim": vision["projection_dim"],
        "vision_cfg": {**tower, "pool_type": "avg"},
        "text_cfg": {"context_length": 16, "vocab_size": text["vocab_size"], "width": 64, "heads": 2, "layers": 2},
    }
    return ModelParams(
        vision=BackboneParams(source=BackboneSource.OPEN_CLIP, weights=GENERATED, config=clip),
        language=BackboneParams(weights=GENERATED, config=text),
    )


def write_llava(params: ModelParams, folder: Path) -> None:
    """Write a LLaVA of the pretrained backbones and its processor into a folder that transformers loads.

    Its projector is drawn from torch's random state.
    """
    backbones = backbones_of(params)
    vision, language = resolve_generated(backbones, "vision"), resolve_generated(backbones, "language")
    config = load_config(BackboneParams(config=params.config), "model")
    encoder = build_vision(vision)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(clip_names(encoder.visual.state_dict()))
    language_model = build_language(language)
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    model.generation_config = language_model.generation_config
    tokenizer = load_tokenizer(language)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    if tokenizer.convert_tokens_to_ids(IMAGE) != config.image_token_id:
        raise ParamError("model.config.image_token_id", f"is not the id of {IMAGE}; take it from the preset tiny_llava")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    side = {"height": encoder.image_size, "width": encoder.image_size}
    pictures = CLIPImageProcessor(size=side, do_center_crop=False, image_mean=encoder.mean, image_std=encoder.std)
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def clip_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of open_clip's ViT under the names that transformers' CLIPVisionModel has for them."""
    names = {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.": "pre_layrnorm.",
        "ln_post.": "post_layernorm.",
        "transformer.resblocks.": "encoder.layers.",
        ".ln_1.": ".layer_norm1.",
        ".ln_2.": ".layer_norm2.",
        ".attn.out_proj.": ".self_attn.out_proj.",
        ".mlp.c_fc.": ".mlp.fc1.",
        ".mlp.c_proj.": ".mlp.fc2.",
    }
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key == "proj":  # to the space that pictures and captions share: no patch token goes there
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        if ".attn.in_proj_" in key:
            layer, _, kind = key.partition(".attn.in_proj_")
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{letter}_proj.{kind}"] = part
        else:
            renamed[key] = tensor
    return renamed
