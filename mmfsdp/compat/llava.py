"""load_llava: transformers' LLaVA as a MultimodalModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..models.backbones import load_from_transformers
from ..models.encoders import VisionEncoder, normalization
from ..models.multimodal import ModalEncoder, MultimodalModel
from ..params import ProjectorKind


def load_llava(model_or_folder: Any) -> MultimodalModel:
    """Return transformers' LlavaForConditionalGeneration as a MultimodalModel.

    Takes the model itself, whose parts are used and not copied, or a folder or hub name of one, loaded in fp32. Raises
    ValueError for a model that is not supported.
    """
    model = model_or_folder
    if isinstance(model, (str, Path)):
        from transformers import AutoConfig, AutoModelForImageTextToText

        source = str(model)
        _check_supported(load_from_transformers(AutoConfig, source, "load_llava"))  # before its weights are read
        model = load_from_transformers(AutoModelForImageTextToText, source, "load_llava", dtype=torch.float32)
    config = model.config
    _check_supported(config)
    mean, std = normalization(config.vision_config.model_type)
    vision = VisionEncoder(
        model.model.vision_tower,
        image_size=config.vision_config.image_size,
        mean=mean,
        std=std,
        feature_layer=config.vision_feature_layer,
    )
    encoders = {"vision": ModalEncoder(vision, ProjectorKind.MLP)}
    llava = MultimodalModel(encoders, _language_model(model), placeholders={"vision": config.image_token_id})
    projector: Any = llava.projectors["vision"]
    if not config.multimodal_projector_bias:
        projector.linear_1.bias = projector.linear_2.bias = None
    projector.act = model.model.multi_modal_projector.act
    projector.load_state_dict(model.model.multi_modal_projector.state_dict())
    return llava.train(model.training)  # type: ignore[return-value]


def _check_supported(config: Any) -> None:
    """Raise ValueError for a model that is no LLaVA, or a LLaVA with features that MultimodalModel does not have."""
    if config.model_type != "llava":
        raise ValueError(
            f"load_llava: {config.model_type!r} is not supported; only transformers' LlavaForConditionalGeneration "
            "(model_type 'llava') loads"
        )
    if config.vision_feature_select_strategy != "default" or not isinstance(config.vision_feature_layer, int):
        raise ValueError(
            f"load_llava: vision_feature_select_strategy {config.vision_feature_select_strategy!r} with "
            f"vision_feature_layer {config.vision_feature_layer!r} is not supported; "
            "only 'default' (no class token) of one layer is"
        )
    if config.vision_config.model_type == "pixtral":
        raise ValueError("load_llava: a pixtral vision encoder is not supported: it takes pictures of any size")


def _language_model(model: Any) -> Any:
    """Return a causal language model made of the decoder and the output matrix of a LLaVA."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        language = AutoModelForCausalLM.from_config(model.config.text_config)
    setattr(language, language.base_model_prefix, model.model.language_model)
    language.set_output_embeddings(model.lm_head)
    language.generation_config = model.generation_config
    return language
