"""Weights in other projects' layouts: OpenFlamingo's checkpoints, loaded and saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .flamingo import Flamingo

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
