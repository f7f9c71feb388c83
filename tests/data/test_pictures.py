"""Pictures of every kind become the encoder's tensor; damaged ones become a named CorruptRecord."""

import io
import struct
import zlib

import numpy as np
import open_clip
import pytest
import torch
from material import CLIP_MEAN, CLIP_STD, PHOTOGRAPHS, both, picture_bytes, write_metadata
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmfsdp.kit.data import open_source
from mmfsdp.kit.data.pictures import CorruptRecord, open_picture, to_rgb, to_tensor
from mmfsdp.params import DataParams, ParamError


def tensor(image: Image.Image, size: int = 32, seed: int | None = None) -> torch.Tensor:
    return to_tensor(image, size=size, mean=CLIP_MEAN, std=CLIP_STD, seed=seed)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("file", ["cat.jpg", "astronaut.jpg", "galaxies.jpg", "camera.png"])
def test_equals_open_clip_preprocessing(file, size):
    reference = open_clip.image_transform(size, is_train=False, mean=CLIP_MEAN, std=CLIP_STD)
    image = Image.open(PHOTOGRAPHS / file)
    level = 1 / 255 / min(CLIP_STD)
    difference = (tensor(image, size) - reference(image)).abs()
    # Equal where the picture is made smaller; where it is enlarged, rounding to 8 bits may go the other way.
    assert difference.max() < 3 * level and difference.mean() < 0.02 * level


@pytest.mark.parametrize("shape", [(1, 1), (20_000, 3), (3, 20_000), (1, 20_000), (31, 33)])
def test_any_shape_gives_the_same_size(shape):
    result = tensor(Image.new("RGB", shape, (255, 0, 0)))
    assert result.shape == (3, 32, 32)
    assert torch.allclose(result[0], torch.tensor((1 - CLIP_MEAN[0]) / CLIP_STD[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("image", "rgb"),
    [
        (Image.new("L", (4, 4), 100), (100, 100, 100)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("RGB", (4, 4), (1, 2, 3)).convert("P", palette=Image.Palette.ADAPTIVE), (1, 2, 3)),
        (Image.new("RGBA", (4, 4), (9, 9, 9, 0)), (255, 255, 255)),
        (Image.new("LA", (4, 4), (9, 255)), (9, 9, 9)),
        (Image.fromarray(np.full((4, 4), 65535, np.uint16)), (255, 255, 255)),
        (Image.fromarray(np.full((4, 4), 257 * 7, np.int32)), (7, 7, 7)),
        (Image.fromarray(np.full((4, 4), 7, np.float32)), (7, 7, 7)),
        (Image.fromarray(np.full((4, 4), 0.2, np.float32)), (51, 51, 51)),
        (Image.fromarray(np.full((4, 4), 257 * 7, np.float32)), (7, 7, 7)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_any_mode_becomes_rgb(image, rgb):
    result = to_rgb(image)
    assert result.mode == "RGB" and result.getpixel((1, 1)) == rgb


def test_augmentation_is_small_and_seeded():
    image = Image.open(PHOTOGRAPHS / "cat.jpg")
    assert torch.equal(tensor(image, seed=3), tensor(image, seed=3))
    assert not torch.equal(tensor(image, seed=3), tensor(image, seed=4))
    plain = tensor(image)
    moved = torch.stack([tensor(image, seed=seed) for seed in range(32)])
    assert 0 < (moved - plain).abs().mean() < (plain.flip(2) - plain).abs().mean()


def damaged() -> dict[str, bytes]:
    photograph = (PHOTOGRAPHS / "cat.jpg").read_bytes()
    png = (PHOTOGRAPHS / "camera.png").read_bytes()
    wide = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(wide, "PNG")
    return {
        "cut jpeg": photograph[: len(photograph) // 2],
        "cut png": png[: len(png) // 2],
        "broken png": png[:40] + b"\0" * 40 + png[80:],
        "empty": b"",
        "text": b"<html>404 Not Found</html>",
        "decompression bomb": wide.getvalue(),
    }


@pytest.mark.parametrize(("kind", "data"), damaged().items())
def test_damaged_pictures_are_corrupt_records(kind, data, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(CorruptRecord, match=f"'{kind}' is not a usable picture") as error:
            open_picture(source, name=kind)
        assert error.value.name == kind


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: rotate by 90 degrees
    return exif


def test_pictures_are_turned_upright():
    out = io.BytesIO()
    Image.new("RGB", (6, 4)).save(out, "JPEG", exif=rotated())
    assert open_picture(out.getvalue(), name="x").size == (4, 6)


def test_a_float_tiff_of_0_to_1_keeps_its_brightness():
    """As scientific instruments and renderers write them; a pixel without a number is black."""
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    values[0, 1] = np.nan
    values[0, 2] = np.inf
    out = io.BytesIO()
    Image.fromarray(values).save(out, "TIFF")
    result = np.asarray(open_picture(out.getvalue(), name="x"))
    assert (result.reshape(-1, 3)[3:, 0] == np.arange(3, 256)).all() and not result[0, :3].any()


@pytest.mark.parametrize("packed", [True, False])
def test_a_png_with_much_text_is_read_without_its_text(packed):
    """PIL refuses more than 1 MB of it; generators of pictures write their workflow there."""
    text = PngInfo()
    text.add_text("workflow", "a" * 2_000_000, zip=packed)
    text.add_itxt("prompt", "b" * 2_000_000, zip=True)
    image = Image.effect_noise((6, 4), 90).convert("RGB")
    out = io.BytesIO()
    image.save(out, "PNG", pnginfo=text, exif=rotated())
    with pytest.raises(ValueError, match="MAX_TEXT"):
        Image.open(io.BytesIO(out.getvalue())).load()
    expected = image.transpose(Image.Transpose.ROTATE_270)
    assert open_picture(out.getvalue(), name="x").tobytes() == expected.tobytes()
    with pytest.raises(CorruptRecord):
        open_picture(out.getvalue()[:-40], name="cut")


def test_scans_of_more_megapixels_than_the_limit_need_a_higher_one():
    limits, out = Image.MAX_IMAGE_PIXELS, io.BytesIO()
    Image.new("1", (10_000, 9_000), 1).save(out, "PNG")
    for limit in (89.5, 89.9, 0.5):
        words = f"it has 90 megapixels, more than max_megapixels {limit}; raise data.max_megapixels, or shrink it"
        with pytest.raises(CorruptRecord, match=words):
            open_picture(out.getvalue(), name="x", max_megapixels=limit)
    assert open_picture(out.getvalue(), name="x", max_megapixels=90).size == (10_000, 9_000)
    assert Image.MAX_IMAGE_PIXELS == limits


def test_the_limit_of_a_source_holds_for_its_pictures(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes(size=(1000, 1000 + i)))
    write_metadata(tmp_path, [{"file_name": f"{i}.png", "text": "a dog"} for i in range(3)])
    train, heldout, skipped = both(tmp_path, max_megapixels=1.001)
    assert len(train + heldout) == 2 and list(skipped) == ["2.png (metadata.jsonl:3)"]


def file_of(values: np.ndarray, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values).save(out, kind)
    return out.getvalue()


def ramp(low: float, high: float, dtype: type) -> np.ndarray:
    return np.linspace(low, high, 256).reshape(16, 16).astype(dtype)


OF_MORE_BITS = {
    "12 bits in 16": (ramp(0, 4095, np.uint16), "PNG", (0, 4095), "they use 6.2 % of their range of 0 to 65,535"),
    "8 bits in 16": (ramp(0, 255, np.uint16), "TIFF", (0, 255), "they use 0.39 % of their range of 0 to 65,535"),
    "12 bits in int32": (ramp(0, 4095, np.int32), "TIFF", (0, 4095), "they use 6.2 % of their range of 0 to 65,535"),
    "Hounsfield units": (ramp(-1000, 1000, np.int32), "TIFF", (-1000, 1000), "those below 0 become black"),
    "Hounsfield floats": (ramp(-1000, 1000, np.float32), "TIFF", (-1000, 1000), "those below 0 become black"),
    "20 bits": (ramp(0, 2**20, np.int32), "TIFF", (0, 2**20), "those above 65,535 become white"),
}


def write_pictures(folder, content: bytes, kind: str, count: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    name = f"{{}}.{kind.lower()}"
    for i in range(count):
        (folder / name.format(i)).write_bytes(content)
    write_metadata(folder, [{"file_name": name.format(i), "text": "a lung"} for i in range(count)])


@pytest.mark.parametrize("case", OF_MORE_BITS)
def test_pictures_of_more_bits_use_their_range_or_a_note_says_so(case, tmp_path):
    values, kind, black_to_white, words = OF_MORE_BITS[case]
    write_pictures(tmp_path, file_of(values, kind), kind)
    params = DataParams(source="folder", path=str(tmp_path))
    notes = open_source(params, image_size=16).picture_notes
    assert any(words in note and "set picture_range to the values of black and white" in note for note in notes), notes

    source = open_source(params.change(picture_range=list(black_to_white)), image_size=16)
    assert not source.picture_notes
    shown = np.asarray(next(iter(source)).images[0])[..., 0].ravel().astype(int)
    assert (np.abs(shown - np.arange(256)) <= 1).all(), "black to white, evenly"


def test_pictures_that_use_their_range_need_no_note(tmp_path):
    of_16_bits = {"16 bits": (ramp(0, 60_000, np.uint16), "PNG"), "floats of 0 to 1": (ramp(0, 1, np.float32), "TIFF")}
    for name, (values, kind) in of_16_bits.items():
        write_pictures(tmp_path / name, file_of(values, kind), kind)
        params = DataParams(source="folder", path=str(tmp_path / name))
        assert not open_source(params, image_size=16).picture_notes, name
    write_pictures(tmp_path / "8 bits", picture_bytes("black"), "PNG")
    params = DataParams(source="folder", path=str(tmp_path / "8 bits"))
    assert not open_source(params, image_size=16).picture_notes, "a dark picture of 8 bits is as it is"
    with_range = params.change(picture_range=[0, 4095])
    assert (
        "picture_range has no effect on pictures of 8 bits" in open_source(with_range, image_size=16).picture_notes[0]
    )


def test_pictures_of_one_source_that_are_scaled_differently_are_told(tmp_path):
    write_pictures(tmp_path, file_of(ramp(0, 200, np.int32), "TIFF"), "TIFF")
    (tmp_path / "2.tiff").write_bytes(file_of(ramp(0, 4000, np.int32), "TIFF"))
    notes = open_source(DataParams(source="folder", path=str(tmp_path)), image_size=16).picture_notes
    assert "some are scaled by another range than the others; set picture_range" in notes[0]


def color_png_of_16_bits(high: int) -> bytes:
    """A PNG of 4 x 4 pixels with 16 bits for each of three colors, which PIL cannot write."""
    row = b"\0" + np.full(12, high, ">u2").tobytes()
    parts = {b"IHDR": struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0), b"IDAT": zlib.compress(row * 4), b"IEND": b""}
    png = b"\x89PNG\r\n\x1a\n"
    for kind, content in parts.items():
        png += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return png


def test_color_pictures_of_16_bits_are_told_or_refused(tmp_path):
    write_pictures(tmp_path, color_png_of_16_bits(4095), "PNG")
    params = DataParams(source="folder", path=str(tmp_path))
    note = open_source(params, image_size=16).picture_notes[0]
    assert "only the upper 8 of their 16 bits are read; write them with 8 bits for each color" in note
    with pytest.raises(ParamError, match="it has 16 bits for each color, of which only the upper 8 are read"):
        open_source(params.change(picture_range=[0, 4095]), image_size=16)


@pytest.mark.parametrize("wrong", [[1], [4095, 0], [0, 0], [1, 2, 3], ["a", "b"]])
def test_a_wrong_range_is_refused_by_its_field(wrong):
    with pytest.raises(ParamError, match="picture_range"):
        DataParams(source="folder", path="x", picture_range=wrong)
