"""MultimodalKind: pictures as tokens among those of the text, through a projector (LLaVA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...params import ModelParams, RunParams
from ..data.processor import MultimodalProcessor, Processor, SampleProcessor, add_placeholder
from .backbones import add_lora, is_causal
from .backbones_kind import BackbonesKind
from .encoders import VisionEncoder
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import check_tokens


class MultimodalKind(BackbonesKind):
    """A MultimodalModel with pictures: see multimodal.py."""

    vision_encoder = "encoders.vision"

    def picture_ids(self, model: nn.Module) -> list[int]:
        """Return a placeholder for each of a picture's tokens."""
        assert isinstance(model, MultimodalModel)
        return [model.placeholders["vision"]] * model.num_tokens["vision"]

    def picture_tokens(self, model: nn.Module, params: RunParams, processor: SampleProcessor | None) -> int:
        """Return the placeholders of a picture."""
        return len(self.picture_ids(model))

    def assemble(
        self, params: ModelParams, vision: VisionEncoder, language: PreTrainedModel, tokenizer: Any, *, meta: bool
    ) -> tuple[MultimodalModel, Processor | None]:
        """Return the model with a new projector, and LoRA adapters where they are asked for."""
        encoders = {"vision": ModalEncoder(vision, params.projector)}
        if params.lora_rank:
            add_lora(language, params.lora_rank, targets=params.lora_targets, meta=meta)
        if tokenizer is None:
            return MultimodalModel(encoders, language), None
        placeholder = add_placeholder(tokenizer)
        check_tokens(language, len(tokenizer) - 1)  # the placeholder needs no row
        model = MultimodalModel(encoders, language, placeholders={"vision": placeholder})
        model.tokens = replace(model.tokens, end_of_chunk=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
        processor = MultimodalProcessor(
            tokenizer,
            vision.image_size,
            vision.mean,
            vision.std,
            picture_tokens=model.num_tokens["vision"],
            mask_padding=not is_causal(language),
        )
        return model, processor
