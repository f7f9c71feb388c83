"""Pictures: from a file's bytes to RGB to the tensor that a vision encoder takes."""

from __future__ import annotations

import io
import re
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from ...params.data import MAX_MEGAPIXELS
from .corrupt import CorruptRecord
from .sources.first_bytes import START_BYTES, what_it_is
from .value_range import is_deep, is_deep_color, note_color, to_8_bits

MAX_SHIFT = 0.08
"""Augmentation moves and scales a picture by up to this share of its side."""
PNG_TEXT = (b"tEXt", b"zTXt", b"iTXt")
"""Types of the chunks of a PNG that hold text."""
_pixel_limit = threading.Lock()
"""PIL's limit of pixels is a variable of the whole process."""
FIRST_TURNED = 5
"""From this EXIF orientation on, width and height change places when a picture is turned upright."""
_headers_only: ContextVar[bool] = ContextVar("_headers_only", default=False)


class PictureHeader(Image.Image):
    """The size of a picture, upright, whose pixels are not read."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self._size, self._mode = size, "RGB"  # as PIL's documentation says for images that are not loaded


@contextmanager
def headers_only() -> Iterator[None]:
    """Make `open_picture` return a `PictureHeader` in this block and thread: decoding takes most of a record's time."""
    token = _headers_only.set(True)
    try:
        yield
    finally:
        _headers_only.reset(token)


def open_picture(
    source: Path | bytes | Image.Image,
    *,
    name: str,
    max_megapixels: float = MAX_MEGAPIXELS,
    value_range: Sequence[float] = (),
) -> Image.Image:
    """Return a picture decoded, upright and as RGB, from a file, its bytes or PIL. Raises CorruptRecord with that name.

    A picture of more pixels than `max_megapixels` is refused before it is decoded: a file of some KB may unpack to GBs.
    value_range: see `to_rgb`. In a block of `headers_only` only the size is read.
    """
    content = b""
    try:
        if isinstance(source, Image.Image):
            _check_size(source, max_megapixels)
            if _headers_only.get():
                return _header(source)
            return to_rgb(ImageOps.exif_transpose(source), value_range)
        if _headers_only.get() and isinstance(source, Path):
            with source.open("rb") as file:  # not the whole file
                return _decode(file, max_megapixels, value_range)
        content = source if isinstance(source, bytes) else source.read_bytes()
        return _decode(io.BytesIO(content), max_megapixels, value_range)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        pixels = re.search(r"(\d+) pixels", str(error))
        size = f"{int(pixels[1]) / 1e6:.4g} megapixels" if pixels else "too many pixels"
        words = f"it has {size}, more than max_megapixels {max_megapixels:g}; raise data.max_megapixels, or shrink it"
        raise CorruptRecord(name, f"is not a usable picture: {words}") from None
    except Exception as error:  # PIL's decoders raise a dozen kinds of error on damaged files
        words = f"({type(error).__name__}: {str(error)[:200]})"
        if isinstance(error, UnidentifiedImageError):
            words = "(of no known format)"
        known = "" if isinstance(error, OSError) and error.errno else what_it_is(content[:START_BYTES])
        raise CorruptRecord(name, f"is not a usable picture{': it ' + known if known else ' ' + words}") from None


def _check_size(image: Image.Image, max_megapixels: float) -> None:
    """Raise PIL's error for a picture of too many pixels, in its words."""
    pixels = image.width * image.height
    if pixels > max_megapixels * 1e6:
        raise Image.DecompressionBombError(f"Image size ({pixels} pixels) exceeds limit")


def _decode(file: BinaryIO, max_megapixels: float, value_range: Sequence[float]) -> Image.Image:
    """Return a picture upright and as RGB. Raises whatever PIL raises."""
    with _pixel_limit, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        # PIL has no other way to set its limit than this variable of the whole process.
        pil_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, round(max_megapixels * 1e6)
        try:
            try:
                return _upright(file, value_range)
            except ValueError as error:
                if "MAX_TEXT" not in str(error):
                    raise
                # PIL refuses more than 1 MB of text in a PNG, such as the workflow of a generator of pictures.
                file.seek(0)
                return _upright(io.BytesIO(without_text(file.read())), value_range)
        finally:
            Image.MAX_IMAGE_PIXELS = pil_limit


def _header(image: Image.Image) -> PictureHeader:
    """Return the size of an opened picture, upright, without reading its pixels."""
    # The method of PNG, `image.getexif()`, decodes the picture to look behind it.
    orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    width, height = image.size
    is_turned = orientation >= FIRST_TURNED and image.format != "TIFF"  # whose size PIL gives upright
    return PictureHeader((height, width) if is_turned else (width, height))


def _upright(file: BinaryIO, value_range: Sequence[float]) -> Image.Image:
    with Image.open(file) as image:
        if _headers_only.get():
            return _header(image)
        is_color = is_deep_color(image)
        if is_color and value_range:
            words = (
                "it has 16 bits for each color, of which only the upper 8 are read, so picture_range cannot be applied"
            )
            raise ValueError(f"{words}; write it with 8 bits")
        rgb = to_rgb(ImageOps.exif_transpose(image), value_range)
    if is_color:
        note_color(rgb)
    return rgb


def without_text(png: bytes) -> bytes:
    """Return the bytes of a PNG without its text chunks. What follows a damaged chunk is left as it is."""
    kept, position = [png[:8]], 8
    while position + 12 <= len(png):
        length = int.from_bytes(png[position : position + 4], "big")
        end = position + 12 + length  # length, type and checksum have four bytes each
        if png[position + 4 : position + 8] not in PNG_TEXT:
            kept.append(png[position:end])
        position = end
    return b"".join([*kept, png[position:]])


def to_rgb(image: Image.Image, value_range: Sequence[float] = ()) -> Image.Image:
    """Return any picture as 8-bit RGB: more bits are scaled (`to_8_bits`), and transparent parts become white.

    value_range: the values of a picture of more than 8 bits that become black and white; empty for the default.
    """
    if isinstance(image, PictureHeader):
        return image
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if is_deep(image):
        image = to_8_bits(image, value_range)
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
