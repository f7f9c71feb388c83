"""Find a decoder's layers by structure, and pass arguments to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..params import ParamError
from ..params.base import did_you_mean
from .backbones import run_on_meta


def decoder_layers(model: PreTrainedModel, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the dotted name of the list of decoder layers, and the list.

    It is the list of that name, else the only outermost ModuleList of as many modules as the configuration has layers.
    Raises ParamError naming the lists that the model has.
    """
    lists = {key: module for key, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    if name is not None:
        if name not in lists:
            raise ParamError("decoder_layers", f"{name!r} is not a list of layers{did_you_mean(name, lists)}")
        return name, lists[name]
    outermost = dict(lists)
    for key in lists:
        if any(key.startswith(f"{other}.") for other in lists):
            del outermost[key]
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    matching = [(key, layers) for key, layers in outermost.items() if len(layers) == count]
    if len(matching) != 1:
        raise ParamError(
            "decoder_layers",
            f"looked in {type(model).__name__} for one list of {count} layers (num_hidden_layers), found "
            f"{len(matching)}; its lists are {_with_lengths(outermost)}; set decoder_layers to the right name",
        )
    return matching[0]


def _with_lengths(lists: dict[str, nn.ModuleList]) -> str:
    return ", ".join(f"{name} ({len(layers)})" for name, layers in lists.items()) or "none"


def passes_to_layers(model: PreTrainedModel, layer: nn.Module, **extra: Any) -> bool:
    """Return whether keyword arguments of the model's forward reach `layer`, by one forward on the meta device."""
    received: dict[str, Any] = {}
    handle = layer.register_forward_pre_hook(lambda _, __, kwargs: received.update(kwargs), with_kwargs=True)
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        # With a cache, because without one transformers looks into position_ids, which meta tensors forbid.
        run_on_meta(model, input_ids=ids, use_cache=True, **extra)
    except (TypeError, KeyError):  # refused by the model's forward, or missed by the layer
        return False
    finally:
        handle.remove()
    return received.keys() >= extra.keys()


@contextmanager
def extra_arguments(layers: nn.ModuleList, **extra: Any) -> Iterator[None]:
    """Add keyword arguments to each layer's, for decoders that do not pass theirs on (MPT, Bloom).

    They enter the outermost module in the list, so that activation checkpointing recomputes with them.
    """

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **extra}

    handles = [layer.register_forward_pre_hook(add, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
