"""load_llava: transformers' LLaVA as a MultimodalModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..models.backbones import load_from_transformers
from ..models.encoders import VisionEncoder, as_weights, normalization, with_pooled
from ..models.multimodal import ModalEncoder, MultimodalModel


def load_llava(model_or_folder: Any) -> MultimodalModel:
    """Return transformers' LlavaForConditionalGeneration as a MultimodalModel.

    Takes the model itself, whose parts are used and not copied, or a folder or hub name of one, loaded in fp32. Raises
    ValueError for a model that is not supported.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model = model_or_folder
    if isinstance(model, (str, Path)):
        source = str(model)
        _check_supported(load_from_transformers(AutoConfig, source, "load_llava"))  # before its weights are read
        model = load_from_transformers(AutoModelForImageTextToText, source, "load_llava", dtype=torch.float32)
    config = model.config
    _check_supported(config)
    mean, std = normalization(config.vision_config.model_type)
    layers = config.vision_feature_layer
    vision = LlavaVision(
        model.model.vision_tower,
        image_size=config.vision_config.image_size,
        mean=mean,
        std=std,
        layers=[layers] if isinstance(layers, int) else list(layers),
        first=config.vision_feature_select_strategy == "default",
    )
    with torch.device("meta"):
        language = AutoModelForCausalLM.from_config(config.text_config)
    setattr(language, language.base_model_prefix, model.model.language_model)
    language.set_output_embeddings(model.lm_head)
    language.generation_config = model.generation_config
    encoders = {"vision": ModalEncoder(vision, model.model.multi_modal_projector)}
    llava = MultimodalModel(encoders, language, placeholders={"vision": config.image_token_id})
    return llava.train(model.training)  # type: ignore[return-value]


class LlavaVision(VisionEncoder):
    """The tokens that LLaVA takes: hidden states of one or several layers, side by side, from the first or second on.

    Its strategy `default` leaves out the first token, whether that is a class token (CLIP) or a patch (SigLIP).
    """

    def __init__(self, visual: Any, *, layers: list[int], first: int, **preprocessing: Any):
        self.layers, self.first = layers, first
        super().__init__(visual, **preprocessing)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W), normalized -> (N, P, D)."""
        out = self.visual(pixel_values=as_weights(pixels, self.visual), output_hidden_states=True)
        states = [out.hidden_states[layer][:, self.first :] for layer in self.layers]
        return with_pooled(torch.cat(states, dim=-1), getattr(out, "pooler_output", None))


def _check_supported(config: Any) -> None:
    """Raise ValueError for a model that is no LLaVA, or one of pictures of any size."""
    if config.model_type != "llava":
        raise ValueError(
            f"load_llava: {config.model_type!r} is not supported; only transformers' LlavaForConditionalGeneration "
            "(model_type 'llava') loads. Others are trained as they are: by kind transformers, or in your own loop by "
            "wrap_fsdp(model, FSDPParams(), example=batch)"
        )
    if config.vision_config.model_type == "pixtral":
        raise ValueError("load_llava: a pixtral vision encoder is not supported: it takes pictures of any size")
