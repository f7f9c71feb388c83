"""Pictures: from a file's bytes to RGB to the tensor that a vision encoder takes."""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

MAX_SHIFT = 0.08
"""Augmentation moves and scales a picture by up to this share of its side."""


class CorruptRecord(ValueError):
    """A record that cannot be used, by name. Loaders skip, count and report it."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name!r} {reason}")
        self.name, self.reason = name, reason


def open_picture(source: Path | bytes, *, name: str) -> Image.Image:
    """Return a picture file decoded, upright and as RGB. Raises CorruptRecord with that name.

    A picture of more pixels than PIL deems safe (`Image.MAX_IMAGE_PIXELS`) is refused before it is decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                return to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise CorruptRecord(name, "is not a usable picture (of no known format)") from None
    except Exception as error:  # PIL's decoders raise a dozen kinds of error on damaged files
        raise CorruptRecord(name, f"is not a usable picture ({type(error).__name__}: {str(error)[:200]})") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Return any picture as 8-bit RGB: 16-bit values are scaled down, transparent parts become white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.float32)
        deep = image.mode.startswith("I;16") or values.max() > 255
        image = Image.fromarray((values / 257 if deep else values).clip(0, 255).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def to_tensor(
    image: Image.Image, *, size: int, mean: Sequence[float], std: Sequence[float], seed: int | None = None
) -> Tensor:
    """Return (3, size, size) float32: short side to `size` (bicubic), center crop, normalized, as CLIP does.

    Resizes only what the crop keeps, so a very wide picture costs no more than another. With a `seed` the picture is
    shifted and scaled a little at random.
    """
    small = to_rgb(image).resize((size, size), Image.Resampling.BICUBIC, box=_crop_box(image.size, size))
    planes = np.array(small).transpose(2, 0, 1)
    tensor = torch.from_numpy(np.ascontiguousarray(planes)).float().div_(255)
    if seed is not None:
        tensor = _augment(tensor, seed)
    return tensor.sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])


def _crop_box(shape: tuple[int, int], size: int) -> tuple[float, float, float, float]:
    """Return the part of a picture that a center crop keeps, rounded as torchvision's Resize and CenterCrop round."""
    short = min(shape)
    starts, ends = [], []
    for side in shape:
        resized = size if side == short else int(size * side / short)
        start = round((resized - size) / 2)
        starts.append(start * side / resized)
        ends.append(min((start + size) * side / resized, side))
    return starts[0], starts[1], ends[0], ends[1]


def _augment(tensor: Tensor, seed: int) -> Tensor:
    """Return (C, H, W) shifted and scaled a little at random; the edge is repeated outside."""
    scale, dx, dy = np.random.default_rng(seed).uniform(-MAX_SHIFT, MAX_SHIFT, 3).tolist()
    theta = torch.tensor([[[1 + scale, 0, 2 * dx], [0, 1 + scale, 2 * dy]]])
    grid = F.affine_grid(theta, [1, *tensor.shape], align_corners=False)
    moved = F.grid_sample(tensor[None], grid, mode="bicubic", padding_mode="border", align_corners=False)
    return moved[0].clamp(0, 1)


def stable_hash(text: str) -> int:
    """Return 32 bits that depend on the text alone, the same in every process."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))
