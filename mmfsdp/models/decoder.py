"""Finding a decoder's layers by structure, and handing arguments down to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..params import ParamError
from .shapes import on_meta


def decoder_layers(model: PreTrainedModel, override: str | None = None) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its dotted name: the only outermost ModuleList that is as long as the
    configuration says there are layers, or the one named by `override`. Raises ParamError naming what was there.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if override is not None:
        return override, _named(lists, override)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    found = [(name, layers) for name, layers in outer.items() if len(layers) == count]
    if len(found) != 1:
        raise ParamError(
            "decoder_layers",
            f"looked in {type(model).__name__} for one list of {count} layers (num_hidden_layers), found "
            f"{len(found)}; its lists are {_describe(outer)}; set decoder_layers to the right name",
        )
    return found[0]


def _named(lists: dict[str, nn.ModuleList], name: str) -> nn.ModuleList:
    if name not in lists or not len(lists[name]):
        near = difflib.get_close_matches(name, lists, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ParamError(
            "decoder_layers", f"{name!r} is not a list of layers here; the lists are {_describe(lists)}{hint}"
        )
    return lists[name]


def _describe(lists: dict[str, nn.ModuleList]) -> str:
    return ", ".join(f"{name} ({len(layers)})" for name, layers in lists.items()) or "none"


def hands_down(model: PreTrainedModel, layer: nn.Module, **extra: Any) -> bool:
    """Whether keyword arguments of the model's forward reach `layer`: seen by one forward on the meta device."""
    seen: dict[str, Any] = {}
    handle = layer.register_forward_pre_hook(lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True)
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        # With a cache, because without one transformers looks into position_ids, which meta tensors forbid.
        on_meta(model, input_ids=ids, use_cache=True, **extra)
    except (TypeError, KeyError):  # refused by forward itself, or missed by the layer
        return False
    finally:
        handle.remove()
    return seen.keys() >= extra.keys()


@contextmanager
def handing_down(layers: nn.ModuleList, **extra: Any) -> Iterator[None]:
    """For decoders that keep keyword arguments to themselves (MPT, Bloom): within, every layer gets `extra` too.

    The arguments enter the outermost module in the list, so activation checkpointing recomputes with them.
    """

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **extra}

    handles = [layer.register_forward_pre_hook(add, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
