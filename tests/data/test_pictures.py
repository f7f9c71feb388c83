"""Pictures of every kind become the encoder's tensor; damaged ones become a named CorruptRecord."""

import io

import numpy as np
import open_clip
import pytest
import torch
from material import CLIP_MEAN, CLIP_STD, PHOTOGRAPHS, both, picture_bytes, write_metadata
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmfsdp.data.pictures import CorruptRecord, open_picture, to_rgb, to_tensor


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
