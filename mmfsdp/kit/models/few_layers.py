"""Configurations with few layers, so that a model of many can be tried on a CPU."""

from __future__ import annotations

import json
from typing import Any

LAYERS = 2
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers", "num_global_layers",
    "encoder_layers", "decoder_layers", "max_window_layers",
)  # fmt: skip
"""Keys of a configuration that count layers, in transformers and open_clip."""
LAYER_INDICES = ("cross_attention_layers", "intermediate_layers_indices", "deepstack_visual_indexes",
                 "fullatt_block_indexes", "global_attn_indexes")  # fmt: skip
"""Keys of a configuration that list the numbers of some layers."""


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
