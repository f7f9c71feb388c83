"""Weights in other projects' layouts: OpenFlamingo's checkpoints, loaded and saved; transformers' LLaVA, loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..params import ProjectorKind
from .flamingo import Flamingo
from .language import pretrained
from .multimodal import ModalEncoder, MultimodalModel
from .vision import VisionEncoder, normalization

_TABLE, _NEW = ".table.weight", ".new_tokens.weight"


def load_open_flamingo(model: Flamingo, path: str | Path) -> None:
    """Load a checkpoint in OpenFlamingo's layout (github.com/mlfoundations/open_flamingo) in place, before wrapping.

    Takes .pt and .safetensors; names with or without `module.`; all weights or, as released, only the perceiver, the
    gated cross-attention and the embeddings, whose last rows are the new tokens'. Raises ValueError naming the weights
    that are missing for these parts, that the model has no place for, or whose shapes differ.
    """
    given = _canonical(_read(Path(path)), model)
    state = model.state_dict()
    names = {ours: _their_name(ours) for ours in state}
    trained = [n for n in names if n.startswith("perceiver.") or ".cross_attention." in n or n.endswith(_NEW)]
    tied = {names[n] for n in trained if n not in dict(model.named_parameters())}
    missing = sorted({names[n] for n in trained} - given.keys() - tied)
    unknown = sorted(given.keys() - set(names.values()))
    if missing or unknown:
        raise ValueError(f"{path}: missing {_some(missing)}; without a place in the model {_some(unknown)}")
    fitting = {ours: _fit(ours, state[ours], given[theirs], model) for ours, theirs in names.items() if theirs in given}
    for ours, value in fitting.items():  # all fit: only now is anything changed
        state[ours][: len(value)].copy_(value) if value.ndim else state[ours].copy_(value)


def save_open_flamingo(model: Flamingo, path: str | Path) -> None:
    """Save an unwrapped model in OpenFlamingo's layout (.pt or .safetensors): what is trainable, and the embeddings."""
    state = model.state_dict()
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    tensors: dict[str, Tensor] = {}
    for ours, value in state.items():
        if ours.endswith(_TABLE):
            new = state[ours.removesuffix(_TABLE) + _NEW]
            tensors[_their_name(ours)] = torch.cat((value[: model.tokens.known], new.to(value.dtype)))
        elif ours in trainable and not ours.endswith(_NEW):
            tensors[_their_name(ours)] = value.contiguous()
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(tensors, path)
    else:
        torch.save(tensors, path)


_UNSUPPORTED = {
    "qwen2_vl": "positions in three dimensions, and pictures of any size whose patches are merged by four",
    "qwen2_5_vl": "positions in three dimensions, and pictures of any size whose patches are merged by four",
    "paligemma": "a prompt whose tokens all attend to each other, later ones too, and scaled picture tokens",
    "idefics2": "pictures of any size, split and packed",
    "idefics3": "pictures of any size, split and packed",
    "llava_next": "pictures cut into tiles whose number depends on their shape",
}
"""Other families of transformers, and what they have that MultimodalModel lacks."""


def load_llava(model_or_folder: Any) -> MultimodalModel:
    """transformers' LlavaForConditionalGeneration as a MultimodalModel: the model itself, whose parts are taken over
    rather than copied, or a folder or hub name of one (loaded in fp32). Raises ValueError for what is not supported.
    """
    model = model_or_folder
    if isinstance(model, (str, Path)):
        from transformers import AutoConfig, AutoModelForImageTextToText

        source = str(model)
        _refuse(pretrained(AutoConfig, source, "load_llava"))  # before its weights are read
        model = pretrained(AutoModelForImageTextToText, source, "load_llava", dtype=torch.float32)
    config = model.config
    _refuse(config)
    inner = model.model
    language = _with_head(config.text_config, inner.language_model, model.lm_head)
    language.generation_config = model.generation_config
    mean, std = normalization(config.vision_config.model_type)
    size = config.vision_config.image_size
    layer = config.vision_feature_layer
    vision = VisionEncoder(inner.vision_tower, image_size=size, mean=mean, std=std, feature_layer=layer)
    whole = MultimodalModel(
        {"vision": ModalEncoder(vision, ProjectorKind.MLP)}, language, placeholders={"vision": config.image_token_id}
    )
    projector: Any = whole.projectors["vision"]
    if not config.multimodal_projector_bias:
        projector.linear_1.bias = projector.linear_2.bias = None
    projector.act = inner.multi_modal_projector.act
    projector.load_state_dict(inner.multi_modal_projector.state_dict())
    whole.train(model.training)
    return whole


def _refuse(config: Any) -> None:
    """Raise ValueError for what is not a LLaVA, or one of a kind that MultimodalModel is not."""
    if config.model_type != "llava":
        lacks = _UNSUPPORTED.get(config.model_type, "an architecture of its own")
        raise ValueError(
            f"load_llava: {config.model_type!r} is not supported: it has {lacks}; only transformers' "
            "LlavaForConditionalGeneration (model_type 'llava') loads"
        )
    if config.vision_feature_select_strategy != "default" or not isinstance(config.vision_feature_layer, int):
        raise ValueError(
            f"load_llava: vision_feature_select_strategy {config.vision_feature_select_strategy!r} with "
            f"vision_feature_layer {config.vision_feature_layer!r} is not supported; "
            "only 'default' (no class token) of one layer is"
        )
    if config.vision_config.model_type == "pixtral":
        raise ValueError("load_llava: a pixtral vision encoder is not supported: it takes pictures of any size")


def _with_head(config: Any, decoder: torch.nn.Module, head: torch.nn.Module) -> Any:
    """A causal language model of a decoder and an output matrix that are there already."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        language = AutoModelForCausalLM.from_config(config)
    setattr(language, language.base_model_prefix, decoder)
    language.set_output_embeddings(head)
    return language


def _fit(name: str, place: Tensor, value: Tensor, model: Flamingo) -> Tensor:
    """The part of a checkpoint's tensor that belongs in `place`: an embedding's rows are split in known and new."""
    known, new = model.tokens.known, model.tokens.new
    if new and name.endswith((_TABLE, _NEW)):
        if len(value) < known + new:
            raise ValueError(f"{_their_name(name)} has {len(value)} rows; {known} tokens and {new} new ones need more")
        value = value[known : known + new] if name.endswith(_NEW) else value[:known]
        place = place[: len(value)]
    if value.shape != place.shape:
        raise ValueError(f"{_their_name(name)} is {tuple(value.shape)}, the model's is {tuple(place.shape)}")
    return value


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    values = torch.load(path, map_location="cpu", weights_only=True)
    return values.get("model_state_dict", values)  # training checkpoints hold the optimizer too


def _canonical(given: Mapping[str, Tensor], model: Flamingo) -> dict[str, Tensor]:
    """One name per weight: without `module.`, and without the second names that OpenFlamingo's lists give layers."""
    layers = f"lang_encoder.{model.layers_name}"
    renamed = {}
    for name, value in given.items():
        name = name.removeprefix("module.")
        name = re.sub(r"^lang_encoder\.gated_cross_attn_layers\.(\d+)", rf"{layers}.\1.gated_cross_attn_layer", name)
        name = re.sub(r"^lang_encoder\.old_decoder_blocks\.(\d+)", rf"{layers}.\1.decoder_layer", name)
        renamed[name.replace("lang_encoder.embed_out.", "lang_encoder.lm_head.")] = value  # GPT-NeoX of old
    return renamed


def _their_name(ours: str) -> str:
    name = re.sub(r"^vision_encoder\.visual\.", "vision_encoder.", ours)
    name = re.sub(r"^language_model\.", "lang_encoder.", name).replace(".cross_attention.", ".gated_cross_attn_layer.")
    return name.replace(_TABLE, ".weight").replace(_NEW, ".weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
