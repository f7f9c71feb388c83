"""The sizes of a micro-batch that `fit` solves for: batch, length, pictures of a sample, and the size of a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...params import ParamError, RunParams
from ..data.processor import SampleProcessor
from ..models.kinds import kind_of

SIDE_STEP = 28
"""Pixels by which a picture's side grows: two patches of 14, the unit of most processors with pictures of any size."""
MAX_LENGTH_STEP = 64
"""Tokens by which a length grows, of long ones."""


@dataclass(frozen=True)
class Size:
    """A size of the micro-batch as a function of a whole number of steps."""

    name: str
    unit: str
    field: str
    """The parameter that sets it; empty where the data do."""
    step: int
    """Units of one step."""
    now: int
    """Steps of the run as it is set."""
    inputs: Callable[[int], dict[str, Any] | None]
    """Returns the keyword arguments of a forward at so many steps. Raises ParamError where there are none."""
    is_linear: bool = True
    """Samples and pictures are computed one beside the other, so that bytes grow on straight lines. Attention may grow
    with the square of a length."""
    tokens: Callable[[int], int] = lambda n: 0
    """Visual tokens of the micro-batch at so many steps."""
    check: Callable[[int], Any] = lambda n: None
    """Raises ParamError where there are no inputs, without the memory of all of them."""

    @property
    def first(self) -> int:
        """Return the steps of the first trace: few samples or pictures are quick; a length may be too short for one.

        Two, since one sample is not on the lines of more: an axis of one element needs no copy to be contiguous.
        """
        return 2 if self.is_linear else self.now


def sizes_of(model: nn.Module, params: RunParams, processor: SampleProcessor | None) -> dict[str, Callable[[], Size]]:
    """Return what makes each size of a run, by name. Making one raises ParamError where the model has no such size."""
    kind, train, length = kind_of(params.model), params.train, params.data.max_length
    each = kind.picture_tokens(model, params, processor)

    def batch() -> Size:
        def inputs(n: int) -> dict[str, Any] | None:
            return kind.example(model, params.change(**{"train.batch_size": n}), processor)

        unit = "samples per rank and micro-step"
        return Size("batch", unit, "train.batch_size", 1, train.batch_size, inputs, tokens=lambda n: n * each)

    def pictures() -> Size:
        def inputs(n: int) -> dict[str, Any] | None:
            return kind.example_of_pictures(model, params, processor, n)

        def check(n: int) -> None:
            kind.example_of_pictures(model, params.change(**{"train.batch_size": 1}), processor, n)

        tokens = train.batch_size * each
        unit = "pictures of each sample"
        return Size("pictures", unit, "", 1, 1, inputs, tokens=lambda n: n * tokens, check=check)

    def length_of_text() -> Size:
        step = min(MAX_LENGTH_STEP, 1 << max(0, length.bit_length() - 5))

        def inputs(n: int) -> dict[str, Any] | None:
            return kind.example(model, params.change(**{"data.max_length": n * step}), processor)

        now = max(1, length // step)
        return Size("length", "tokens", "data.max_length", step, now, inputs, is_linear=False)

    def picture() -> Size:
        return _picture(model, params, processor)

    return {"batch": batch, "length": length_of_text, "pictures": pictures, "picture": picture}


def _picture(model: Any, params: RunParams, processor: SampleProcessor | None) -> Size:
    """Return the size of a picture. Raises ParamError where the model takes pictures of one size only."""
    kind, described = kind_of(params.model), params.model.picture
    if processor is not None and processor.resizes_pictures:
        return _side_of_chat(model, params, processor)
    shape, tokens = described.get("pixel_values"), described.get("tokens", 0)
    make: Callable[[int], dict[str, Any]]
    if shape and "image_grid_thw" in described:
        # A grid of patches; `merge` x `merge` of them are one token.
        [[_, height, _]] = described["image_grid_thw"]
        merge = round((shape[0] / tokens) ** 0.5)
        side = merge * model.config.vision_config.patch_size

        def make(n: int) -> dict[str, Any]:
            grid = n * merge
            return {"tokens": n * n, "pixel_values": [grid * grid, *shape[1:]], "image_grid_thw": [[1, grid, grid]]}

        now, unit = height // merge, "pixels of a square picture's side"
    elif shape and (tiles := shape[-4]) > 1 and tokens % tiles == 0:

        def make(n: int) -> dict[str, Any]:
            return {"tokens": n * tokens // tiles, "pixel_values": [*shape[:-4], n, *shape[-3:]]}

        now, side, unit = tiles, 1, f"tiles of {shape[-2]} x {shape[-1]} pixels"
    else:
        raise _one_size(model)

    def inputs(n: int) -> dict[str, Any] | None:
        larger = params.change(**{"model.picture": described | make(n)})
        return kind.example(model, larger, processor)

    batch = params.train.batch_size
    return Size("picture", unit, "", side, now, inputs, is_linear=False, tokens=lambda n: batch * make(n)["tokens"])


def _side_of_chat(model: nn.Module, params: RunParams, processor: SampleProcessor) -> Size:
    """Return the side of a picture that the model's own processor resizes, cuts into tiles, or takes as it is."""
    kind = kind_of(params.model)

    def resized(n: int) -> SampleProcessor:
        return replace(processor, image_size=n * SIDE_STEP)

    def inputs(n: int) -> dict[str, Any] | None:
        return kind.example(model, params, resized(n))

    def tokens(n: int) -> int:
        return params.train.batch_size * kind.picture_tokens(model, params, resized(n))

    now = max(1, processor.image_size // SIDE_STEP)
    if tokens(now) == tokens(4 * now):
        raise _one_size(model)
    return Size("picture", "pixels of a square picture's side", "", SIDE_STEP, now, inputs, False, tokens)


def _one_size(model: nn.Module) -> ParamError:
    words = f"{type(model).__name__} takes pictures of one size; ask for batch, length or pictures"
    return ParamError("fit", words)
