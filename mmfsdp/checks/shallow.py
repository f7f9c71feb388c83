"""A run's parameters for a trial on the CPU: few layers, random weights, two ranks, fp32."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..models.backbones import load_config
from ..models.build import build_model
from ..models.from_transformers import vlm_config
from ..models.open_clip_towers import open_clip_config
from ..params import GENERATED, BackboneParams, BackboneSource, ModelKind, ModelParams, RunParams
from .outcome import RANKS

LAYERS = 2
ROWS = 2
"""Rows of a rank's batch."""
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers", "num_global_layers",
    "encoder_layers", "decoder_layers", "max_window_layers",
)  # fmt: skip
"""Keys of a configuration that count layers, in transformers and open_clip."""
LAYER_INDICES = ("cross_attention_layers", "intermediate_layers_indices", "deepstack_visual_indexes",
                 "fullatt_block_indexes", "global_attn_indexes")  # fmt: skip
"""Keys of a configuration that list the numbers of some layers."""


def as_rank(rank: int) -> None:
    """Set the environment variables by which a person's code may know its rank, as torchrun does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))


def trial_params(params: RunParams, folder: Path) -> RunParams:
    """Return the parameters of a short run of a shallow model on two ranks of this machine's CPU, in a folder."""
    fsdp = params.fsdp
    quantizes = fsdp.frozen_dtype is not None and fsdp.frozen_dtype.quantizes
    changes: dict[str, Any] = {
        "fsdp.mixed_precision": None,
        "fsdp.buffer_dtype": None,
        "fsdp.compile_units": False,
        "fsdp.use_orig_params": None,
        "train.device": "cpu",
        "train.batch_size": min(params.train.batch_size, ROWS),
        "train.lr": max(params.train.lr, 1e-3),  # so that a step shows in the next one
        "train.warmup_steps": 0,
        "train.schedule": "constant",
        "train.profile": 0,
        "train.eval_every": None,
        "train.keep_best": None,
        "train.metrics": [],
        "train.callbacks": [],
        "train.trackers": [],
        "train.async_save": False,
        "launch": {"name": "verify", "folder": str(folder), "ranks": RANKS, "threads": 1},
    }
    if not quantizes:
        changes["fsdp.frozen_dtype"] = None
    if fsdp.dp_replicate or fsdp.dp_shard:
        changes |= {"fsdp.dp_replicate": None, "fsdp.dp_shard": None}
    changed = params.change(**changes)
    return changed.model_copy(update={"model": shallow_model(changed.model, folder)})


def shallow_model(params: ModelParams, folder: Path) -> ModelParams:
    """Return the parameters of the model with few layers and random weights.

    A builder of one's own, and generated weights, which are small, stay as they are. folder: gets a shallow model of
    transformers that has a processor, which is loaded from a folder.
    """
    if params.kind is ModelKind.OWN or GENERATED in (params.weights, params.vision.weights, params.language.weights):
        return params
    if params.kind is ModelKind.TRANSFORMERS:
        return _shallow_vlm(params, folder)
    _, processor = build_model(params, meta=True)
    shallow = params.change(
        vision=_shallow_backbone(params.vision, "vision"),
        language=_shallow_backbone(params.language, "language"),
        cross_attention_every=min(params.cross_attention_every, LAYERS),
        perceiver_depth=min(params.perceiver_depth, LAYERS),
    )
    return shallow.change(**{"language.name": ""}) if processor is None else shallow


def _shallow_vlm(params: ModelParams, folder: Path) -> ModelParams:
    config = json_values(vlm_config(params).to_dict())
    shallow = params.change(config=shallow_config(config), weights=None)
    _, processor = build_model(params, meta=True)
    if processor is None:
        return shallow.change(name="")  # which would be looked for on the hub
    source = folder / "model"
    whole, _ = build_model(shallow.change(name="", lora_rank=None, lora_targets=()))
    whole.save_pretrained(source)
    processor.processor.save_pretrained(source)  # type: ignore[attr-defined]
    return params.change(name=str(source), weights=None, config={})


def _shallow_backbone(params: BackboneParams, field: str) -> BackboneParams:
    """Return a backbone with few layers and random weights; its name stays, for the tokenizer."""
    if params.source is BackboneSource.OPEN_CLIP:
        return params.change(config=shallow_config(json_values(open_clip_config(params))), weights=None)
    config = json_values(load_config(params, field).to_dict())
    name = params.name or params.weights or ""
    return params.change(config=shallow_config(config), weights=None, name=name)


def json_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON holds it."""
    values = json.loads(json.dumps(config, default=str))
    for key in ("architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path"):
        values.pop(key, None)
    return values


def shallow_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of transformers or open_clip with at most so many layers in each part."""
    shallow: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            shallow[key] = shallow_config(value)
        elif key in LAYER_COUNTS and isinstance(value, int):
            shallow[key] = min(value, LAYERS)
        elif key in LAYER_INDICES and isinstance(value, list):
            inside = [index for index in value if index < LAYERS]
            # As many as before, since the widths of some parts depend on their number.
            shallow[key] = inside + [LAYERS - 1] * (len(value) - len(inside)) if value else value
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            shallow[key] = value[:LAYERS]
        else:
            shallow[key] = value
    return shallow
