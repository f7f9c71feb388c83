"""AudioEncoder: tokens from the encoder of transformers' Whisper.

N sounds, M mel bands, S frames of 10 ms, P tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..params import BackboneParams, ParamError
from .language import load_config, pretrained
from .shapes import output_shape


class AudioEncoder(nn.Module):
    """Whisper's encoder: a sound of fixed length, as log-mel features, to tokens of 20 ms."""

    def __init__(self, audio: Any):
        super().__init__()
        self.audio = audio
        self.item_shape: tuple[int, ...] = (audio.config.num_mel_bins, 2 * audio.config.max_source_positions)
        _, self.num_tokens, self.dim = output_shape(self, torch.empty(2, *self.item_shape, device="meta"))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, M, S) -> (N, P, D)."""
        weight = next(self.audio.parameters(), None)  # none to see within a unit of FSDP1, which casts by itself
        return self.audio(features if weight is None else features.to(weight.dtype)).last_hidden_state


def build_audio(params: BackboneParams, *, meta: bool = False) -> AudioEncoder:
    """The encoder of a Whisper; on the meta device, without weights or download, with `meta`. Raises ParamError."""
    from transformers import AutoModel

    config = load_config(params, "audio")
    if config.model_type != "whisper":
        raise ParamError("audio.config", f"model_type {config.model_type} is not supported; audio takes whisper")
    if params.weights and not meta:
        whole = pretrained(AutoModel, params.weights, "audio.weights", config=config, dtype=torch.float32)
        return AudioEncoder(whole.encoder)
    with torch.device("meta" if meta else "cpu"):
        return AudioEncoder(AutoModel.from_config(config, dtype=torch.float32).encoder)
