"""build_model: from ModelParams to a model and the processor of its samples."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.freeze import FreezeReport, freeze
from ...params import ModelParams
from ..data.processor import SampleProcessor
from .kinds import kind_of
from .weight_files import Weights


def build_model(params: ModelParams, *, meta: bool = False) -> tuple[Any, SampleProcessor | None]:
    """Return the model of `params` and its processor. All parameters are trainable until `freeze`.

    New parts are initialized from torch's random state.

    Args:
        params: The kind of model, its parts and their weights.
        meta: Put parameters on the meta device, and download nothing.

    Returns:
        The model on the CPU or the meta device, and the processor of its samples. The processor is None if there is no
        tokenizer: for a language model without name and weights or, with `meta`, one that is not in a folder.

    Raises:
        ParamError: Naming the field that is wrong.
    """
    built = kind_of(params).build(params, meta=meta, download=not meta, read=False)
    return built.model, built.processor


def open_model(params: ModelParams, *, read: bool = True) -> tuple[Any, SampleProcessor | None, Weights | None]:
    """Return the model of `params` on the meta device, its processor, and its weights to be read one by one.

    Weights are None without `read`, and if a backbone has no safetensors files with the names of its tensors: then only
    `build_model` can load them. Raises ParamError as it does, and for a damaged file or a wrong shape.
    """
    model, processor, sources = kind_of(params).build(params, meta=True, download=True, read=read)
    try:
        return model, processor, Weights(model, sources) if sources else None
    except LookupError:
        return model, processor, None


def freeze_model(model: nn.Module, params: ModelParams) -> FreezeReport:
    """Freeze a model that was built from `params` as its `frozen_patterns` say. Raises ParamError as `freeze` does."""
    return freeze(model, kind_of(params).freeze_patterns(model, params.frozen_patterns))
