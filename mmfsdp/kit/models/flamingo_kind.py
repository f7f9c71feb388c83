"""FlamingoKind: pictures by gated cross-attention between the layers of the language model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...params import ModelParams, RunParams
from ..data.processor import Processor, SampleProcessor
from .backbones import is_causal
from .backbones_kind import BackbonesKind
from .encoders import VisionEncoder
from .flamingo import Flamingo
from .tokens import TokenIds, saved_new_tokens


class FlamingoKind(BackbonesKind):
    """A Flamingo: see flamingo.py."""

    vision_encoder = "vision_encoder"
    layouts = {**BackbonesKind.layouts, "open_flamingo": "mmfsdp.kit.compat.openflamingo:OPEN_FLAMINGO"}

    def picture_ids(self, model: nn.Module) -> list[int]:
        """Return the image token: a picture is not among the text."""
        assert isinstance(model, Flamingo)
        return [model.tokens.image]

    def picture_tokens(self, model: nn.Module, params: RunParams, processor: SampleProcessor | None) -> int:
        """Return the vectors that the perceiver makes of a picture."""
        return params.model.num_latents

    def assemble(
        self, params: ModelParams, vision: VisionEncoder, language: PreTrainedModel, tokenizer: Any, *, meta: bool
    ) -> tuple[Flamingo, Processor | None]:
        """Return the model with new cross-attention and perceiver, and two new tokens."""
        processor = None
        if tokenizer is None:
            table = language.get_input_embeddings()
            assert isinstance(table, nn.Embedding)
            tokens = TokenIds.after(table.num_embeddings)
        else:
            known = len(tokenizer) - saved_new_tokens(language)
            mask_padding = not is_causal(language)
            processor = Processor(tokenizer, vision.image_size, vision.mean, vision.std, mask_padding=mask_padding)
            tokens = TokenIds(
                image=processor.image_id,
                end_of_chunk=processor.end_id,
                pad=processor.pad_id,
                known=known,
                new=len(tokenizer) - known,
            )
        model = Flamingo(
            vision,
            language,
            tokens=tokens,
            cross_attention_every=params.cross_attention_every,
            cross_attend_all=params.cross_attend_all,
            num_latents=params.num_latents,
            perceiver_depth=params.perceiver_depth,
            attention_heads=params.attention_heads,
            attention_head_dim=params.attention_head_dim,
            decoder_layers_name=params.decoder_layers,
        )
        return model, processor
