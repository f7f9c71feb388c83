"""Parts of a model, saved so that their own libraries load them again: transformers' `from_pretrained`, open_clip's
`local-dir:`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..params import BackboneParams
from .audio import AudioEncoder
from .flamingo import Flamingo
from .tokens import merge_vocabulary
from .vision import NO_TEXT, VisionEncoder, open_clip_config


def share(folder: Path) -> None:
    """Let whoever may read the JSON files below a folder read the weights, too, which safetensors closes to others."""
    like = next(folder.rglob("*.json"))
    for path in folder.rglob("*.safetensors"):
        shutil.copymode(like, path)


def save_language(model: Any, tokenizer: Any, folder: Path) -> None:
    """A model's language model as transformers knows it. Takes `model` to pieces: it is of no use afterwards.

    New tokens become the last rows of its tables, the tokenizer's own; LoRA adapters are merged into the matrices that
    they stand beside; a Flamingo's cross-attention is left out.
    """
    language = model.language_model
    if isinstance(model, Flamingo):
        layers: Any = model.layers
        for i, layer in enumerate(layers):
            layers[i] = layer.decoder_layer
        merge_vocabulary(language, model.tokens)
    for name, module in list(language.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge()
            parent, _, key = name.rpartition(".")
            setattr(language.get_submodule(parent), key, module.base_layer)
    language.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_encoder(encoder: nn.Module, params: BackboneParams, folder: Path) -> None:
    """An encoder as its library knows it. What that has besides (a CLIP's text tower, Whisper's decoder) is not part
    of the model: a tiny untrained one stands in. params: what it was built from."""
    if isinstance(encoder, AudioEncoder):
        _save_whisper(encoder.audio, folder)
    elif hasattr(encoder.visual, "save_pretrained"):
        encoder.visual.save_pretrained(folder)  # type: ignore[operator]
    else:
        assert isinstance(encoder, VisionEncoder)
        _save_open_clip(encoder, params, folder)


def _save_open_clip(encoder: VisionEncoder, params: BackboneParams, folder: Path) -> None:
    import open_clip

    config = open_clip_config(params)
    quick = any(type(module).__name__ == "QuickGELU" for module in encoder.visual.modules())
    vision = config["vision_cfg"] | {key: False for key in config["vision_cfg"] if key == "timm_model_pretrained"}
    config = {"embed_dim": config["embed_dim"], "vision_cfg": vision, "text_cfg": NO_TEXT, "quick_gelu": quick}
    whole = open_clip.CLIP(**config)
    whole.visual.load_state_dict(encoder.visual.state_dict(), strict=False)  # a head that is not used is not there
    folder.mkdir()
    looks = {"mean": list(encoder.mean), "std": list(encoder.std)}
    written = {"model_cfg": config, "preprocess_cfg": looks}
    (folder / "open_clip_config.json").write_text(json.dumps(written, indent=1) + "\n")
    save_file(whole.state_dict(), folder / "open_clip_model.safetensors")


def _save_whisper(encoder: Any, folder: Path) -> None:
    from transformers import WhisperConfig, WhisperModel

    tiny = {"decoder_layers": 0, "vocab_size": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    tiny |= {"decoder_start_token_id": 0, "max_target_positions": 1}
    with torch.device("cpu"):
        whole = WhisperModel(WhisperConfig(**encoder.config.to_dict() | tiny))
    whole.encoder.load_state_dict(encoder.state_dict())
    whole.save_pretrained(folder)
