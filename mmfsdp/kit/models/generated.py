"""Generated weights: of backbones that are pretrained on generated pictures; shipped with the package, or cached."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ...params import GENERATED, ModelParams, ParamError
from ...params.variables import backbone_cache
from .kinds import kind_of

RECIPE_VERSION = 1
"""Raise it when the generated pictures or their pretraining change: backbones of older versions are then not used."""
SHIPPED = Path(__file__).parent.parent / "shapes/backbones"
"""Backbones that come with the package, in folders named as in the cache; `kit/shapes/make_backbones.py` makes them."""


def generated_folder(params: ModelParams) -> Path:
    """Return the folder of the backbones that are pretrained on generated pictures, one per configuration.

    It is one that the package ships, else it is under $MMFSDP_CACHE or the user's cache folder. It holds `vision/` in
    open_clip's layout and `language/` in transformers', or a whole model of transformers. Raises RuntimeError for a
    user without a home.
    """
    text = json.dumps([RECIPE_VERSION, kind_of(params).generated_from(params)], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    if (SHIPPED / name).is_dir():
        return SHIPPED / name
    return backbone_cache() / name


def needs_backbones(params: ModelParams) -> bool:
    """Return whether generated weights are wanted and not there yet."""
    for part in kind_of(params).generated:
        backbone, folder = _place(params, part)
        if backbone.weights == GENERATED and not folder.is_dir():
            return True
    return False


def resolve_generated(params: ModelParams, part: str, meta: bool = False) -> Any:
    """Return a backbone's parameters, or the model's, with the folder of the weights instead of `generated`.

    With `meta`, weights that are not there yet become None; otherwise they raise ParamError.
    """
    backbone, folder = _place(params, part)
    if backbone.weights != GENERATED:
        return backbone
    if not folder.is_dir() and not meta:
        words = f"generated weights are not in {folder} yet; run `mmfsdp run`, which pretrains them first, or call "
        raise ParamError(f"{part}.weights", words + "mmfsdp.kit.shapes.pretrain.ensure_backbones(params)")
    return backbone.change(weights=str(folder) if folder.is_dir() else None)


def _place(params: ModelParams, part: str) -> tuple[Any, Path]:
    """Return the parameters of a part that may have generated weights, and their folder."""
    if part == "model":
        return params, generated_folder(params)
    return getattr(params, part), generated_folder(params) / part
