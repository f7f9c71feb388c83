"""A kind of model in one file: the mean color of a picture is added to the embedding of its placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mmfsdp.kit.data.open_sources import Splits
from mmfsdp.kit.data.processor import Processor, SampleProcessor
from mmfsdp.kit.models.kinds import Built, Kind
from mmfsdp.params import ModelParams, RunParams

SIDE = 8


class ToyModel(nn.Module):
    """Pictures (B, T, 1, 3, H, W) and text (B, L) -> the output of the language model, which is frozen."""

    def __init__(self, language: Any, image: int):
        super().__init__()
        self.look, self.language, self.image = nn.Linear(3, language.config.n_embd), language, image
        language.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, media: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        embedded = self.language.get_input_embeddings()(input_ids)
        color = self.look(media["vision"].mean(dim=(1, 2, 4, 5)))  # (B, E)
        embedded = embedded + (input_ids == self.image)[..., None] * color[:, None]
        return self.language(inputs_embeds=embedded, **kwargs)


class ToyKind(Kind):
    """Toy models around a language model in a folder, with its tokenizer."""

    def __init__(self, language: str, layers: int = 4):
        self.folder, self.layers = language, layers

    def build(self, params: ModelParams, *, meta: bool, download: bool, read: bool) -> Built:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        processor = Processor(tokenizer, SIDE, (0.5,) * 3, (0.5,) * 3)
        config = AutoConfig.from_pretrained(self.folder, n_layer=self.layers, vocab_size=len(tokenizer))
        with torch.device("meta" if meta else "cpu"):
            model = ToyModel(AutoModelForCausalLM.from_config(config), processor.image_id)
        return Built(model, processor, None)

    def example(
        self,
        model: nn.Module,
        params: RunParams,
        processor: SampleProcessor | None,
        sources: Mapping[str, Splits] | None = None,
    ) -> dict[str, Any]:
        size, length = params.train.batch_size, params.data.max_length
        with torch.device("meta"):
            ids = torch.zeros(size, length, dtype=torch.long)
            return {"input_ids": ids, "labels": ids, "media": {"vision": torch.zeros(size, 1, 1, 3, SIDE, SIDE)}}

    def few_layers(self, params: ModelParams, folder: Path) -> ModelParams:
        return params.change(build={"call": params.build["call"], "language": self.folder, "layers": 1})
