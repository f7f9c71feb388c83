"""Values that Qwen-VL's forward would read from the GPU: computed from the batch on the CPU, and handed over.

In its forward transformers reads the grid of each picture to number the tokens of text and pictures, and the lengths of
the pictures in each layer of the vision encoder: three times a layer, and each time the host waits for the GPU. It
takes all of them as arguments, by these names. The functions are transformers' own, so the values are the same.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import generic

from ..data.chat import AsIs

try:
    from transformers import vision_utils
except ImportError:  # an older transformers
    vision_utils = None  # type: ignore[assignment]

NUMBERED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe", "ernie4_5_vl_moe")
"""Model types that take `position_ids` of tokens in time, height and width. A test compares each with its own."""
WITH_LENGTHS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "ernie4_5_vl_moe")
"""Model types whose vision encoder takes the lengths of pictures on the CPU."""
READS_NO_GRID = ("qwen2_vl", "qwen2_5_vl")
"""Model types in which nothing on the GPU needs the grid then. Qwen3-VL interpolates its positions by it."""


def unwrap(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace each AsIs by its tensor. A forward pre-hook of the model, inside of its wrapper."""
    return args, {name: value.tensor if isinstance(value, AsIs) else value for name, value in kwargs.items()}


class GivenValues:
    """Compute what a model takes instead of reading it. Holds no weights; can be pickled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model_type = model.config.model_type
        self.base: Any = None
        """The part of the model that numbers tokens, with its configuration only."""
        for module in model.modules():
            if self.model_type in NUMBERED and hasattr(module, "compute_3d_position_ids"):
                self.base = type(module).__new__(type(module))
                nn.Module.__init__(self.base)
                self.base.config, self.base.rope_deltas = module.config, None
        self.vision: Any = None
        """The configuration of the vision encoder, if that takes the lengths of pictures from the CPU."""
        self.on_host: frozenset[str] = frozenset()
        """Names of the tensors that stay on the CPU."""
        takes_lengths = vision_utils is not None and hasattr(generic, "accepts_precomputed_kwargs")
        if takes_lengths and self.model_type in WITH_LENGTHS:
            vision = model.config.vision_config
            # The kernel of flash attention takes lengths on the GPU. Others split the pictures by them, on the host.
            if "flash" not in str(vision._attn_implementation):
                self.vision = vision
                self.on_host = frozenset({"image_cu_seqlens", "image_cu_window_seqlens"})
        if self.vision is not None and self.model_type in READS_NO_GRID:
            self.on_host |= {"image_grid_thw"}

    def __call__(self, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the values for the arguments of a forward, by name."""
        values: dict[str, Tensor] = {}
        grid = inputs.get("image_grid_thw")
        if grid is None:
            return values
        if self.base is not None:
            names = inspect.signature(self.base.compute_3d_position_ids).parameters
            positions = self.base.compute_3d_position_ids(**{name: inputs.get(name) for name in names})
            if positions is not None:
                values["position_ids"] = positions  # (3, B, L)
        if self.vision is not None:
            merged = self.vision.spatial_merge_size
            values["image_position_ids"] = vision_utils.get_vision_position_ids(grid, merged)
            values["image_cu_seqlens"] = vision_utils.get_vision_cu_seqlens(grid)
            if self.model_type == "qwen2_5_vl":
                sizes = merged, self.vision.window_size, self.vision.patch_size
                index, lengths = vision_utils.get_vision_window_index(grid, *sizes)
                values |= {"image_window_index": index, "image_cu_window_seqlens": lengths}
        return values
