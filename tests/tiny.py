"""A Flamingo small enough for tests, frozen as by default, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmfsdp.core.freeze import freeze
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.models import Flamingo, TokenIds, build_language, build_vision
from mmfsdp.params import BackboneParams, ModelParams

KNOWN = 50
VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 24, "layers": 2, "head_width": 12},
    "quick_gelu": False,
}
LANGUAGE = {
    "model_type": "llama",
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": KNOWN,
}
MODEL = ModelParams(vision=BackboneParams(source="open_clip", config=VISION), language=BackboneParams(config=LANGUAGE))


def tiny_flamingo(*, tied: bool = False, seed: int = 0) -> Flamingo:
    """Weights by seed; gates opened, since at 0 nothing behind them would learn."""
    torch.manual_seed(seed)
    vision = build_vision(BackboneParams(source="open_clip", config=VISION))
    language = build_language(BackboneParams(config={**LANGUAGE, "tie_word_embeddings": tied}))
    model = Flamingo(
        vision,
        language,
        tokens=TokenIds.after(KNOWN),
        cross_attention_every=2,
        num_latents=3,
        perceiver_depth=2,
        attention_heads=2,
        attention_head_dim=8,
    )
    for name, p in model.named_parameters():
        if name.endswith("_gate"):
            p.data.fill_(0.5)
    freeze(model, ModelParams(language=BackboneParams(name="x")).frozen_patterns)
    return model


def tiny_batch(size: int = 2, *, seed: int = 0) -> Batch:
    """Samples of one picture each; labels of unequal number."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, KNOWN, (size, 9), generator=g)
    ids[:, 0] = KNOWN + 1
    labels = ids.clone()
    labels[:, :2] = -100
    for row in range(size):
        labels[row, 9 - (seed + row) % 5 :] = -100
    vision = torch.randn(size, 1, 1, 3, 16, 16, generator=g)
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, media={"vision": vision})


def last_layer_trains() -> Any:
    """Return a language model of six layers, frozen but for the last layer and what follows it."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, **size))
    freeze(model, ["*", "!model.layers.5.*", "!model.norm.*", "!lm_head.*"])
    return model


class Mapping:
    """A batch as `train_step` takes it, of the keyword arguments of a forward."""

    source, weight = "data", 1.0

    def __init__(self, mapping: dict[str, torch.Tensor]):
        self.mapping, self.size = mapping, len(mapping["labels"])
        self.label_tokens = int((mapping["labels"][:, 1:] != -100).sum())

    def to(self, device: torch.device) -> Mapping:
        """Return it on a device."""
        return Mapping({key: tensor.to(device) for key, tensor in self.mapping.items()})

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments."""
        return dict(self.mapping)
