"""Tiny random Flamingos of every language model family."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmfsdp.kit.models import Flamingo, TokenIds, build_language, build_vision
from mmfsdp.params import BackboneParams

KNOWN = 60
VISION = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 24, "patch_size": 8, "head_width": 12},
}
COMMON = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": KNOWN}
GROUPED = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES: dict[str, dict] = {
    "llama": GROUPED,
    "gpt_neox": {**COMMON, "intermediate_size": 48},
    "opt": {**COMMON, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "gpt2": {**COMMON, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "vocab_size": KNOWN},
}
SMALL = {
    "cross_attention_every": 2,
    "num_latents": 3,
    "perceiver_depth": 2,
    "attention_heads": 2,
    "attention_head_dim": 8,
}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def build() -> Callable[..., Flamingo]:
    """build(family, gate=0.5, meta=False, config={...}, **Flamingo's keywords), weights seeded."""

    def make(family: str, *, gate: float = 0.5, meta: bool = False, config: dict | None = None, **kwargs) -> Flamingo:
        torch.manual_seed(0)
        vision = build_vision(BackboneParams(source="open_clip", config=VISION), meta=meta)
        language = build_text_only(family, meta=meta, config=config)
        model = Flamingo(vision, language, **{"tokens": TokenIds.after(KNOWN), **SMALL, **kwargs}).eval()
        for name, p in model.named_parameters():
            if name.endswith("_gate"):
                p.data.fill_(gate)
            elif p.ndim == 2 and not meta:  # far from the usual tiny start, so that a mistake shows in the logits
                p.data.normal_(std=0.2)
        return model

    return make


def build_text_only(family: str, *, meta: bool = False, config: dict | None = None):
    torch.manual_seed(1)
    values = {"model_type": family, **FAMILIES[family], **(config or {})}
    return build_language(BackboneParams(config=values), meta=meta).eval()


@pytest.fixture
def text_only() -> Callable:
    return build_text_only


@pytest.fixture
def batch() -> Callable[[Flamingo], dict]:
    """Two samples of two pictures each; the second sample is padded on the right by two tokens."""

    def make(model: Flamingo) -> dict:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(4, KNOWN, (2, 10), generator=generator)
        ids[0, 2] = ids[0, 6] = ids[1, 0] = ids[1, 4] = model.tokens.image
        ids[0, 5] = model.tokens.end_of_chunk
        ids[1, 8:] = model.tokens.pad
        media = {"vision": torch.randn(2, 2, 1, 3, 16, 16, generator=generator)}
        return {"input_ids": ids, "attention_mask": (ids != model.tokens.pad).long(), "media": media}

    return make


def to_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows with their padding moved to the left."""
    order = mask.argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


@pytest.fixture
def left() -> Callable:
    return to_left


def greedy(model, ids: Tensor, mask: Tensor, media: dict, *, steps: int, never: int | None = None) -> Tensor:
    """Greedy decoding by hand, without a cache; one token may be barred."""
    for _ in range(steps):
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, media=media).logits[:, -1]
        if never is not None:
            logits[:, never] = -torch.inf
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return ids
