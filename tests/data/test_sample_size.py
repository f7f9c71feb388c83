"""The size of a sample is known from its text and the headers of its pictures, and equals that of the encoded one."""

import io
from dataclasses import replace

import pytest
from material import CLIP_MEAN, CLIP_STD, make_tokenizer, picture_bytes
from PIL import Image

from mmfsdp.kit.data import CorruptRecord, MultimodalProcessor, Processor, Sample
from mmfsdp.kit.data.picture_rule import PictureRule
from mmfsdp.kit.data.pictures import PictureHeader, headers_only, open_picture
from mmfsdp.kit.models.build import build_model
from mmfsdp.params import ModelParams
from tests.tiny_vlms import FAMILIES, save_vlm

SIZES = [((28, 28),), ((100, 40),), ((40, 300), (60, 60)), ((500, 260),) * 3]
"""Width and height of the pictures of four samples."""


def sample_with(sizes) -> Sample:
    pictures = tuple(Image.new("RGB", each) for each in sizes)
    return Sample.of("<image> and " * len(sizes) + "what?", "a red dog", pictures, "one")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_sample_has_the_tokens_that_its_processor_makes(family, tmp_path, monkeypatch):
    _, processor = build_model(ModelParams(kind="transformers", name=str(save_vlm(family, tmp_path))), meta=True)
    processor = replace(processor, max_length=2_000)
    for sizes in SIZES:
        batch, measured = processor([sample_with(sizes)]), processor.measure(sample_with(sizes))
        assert measured.tokens == batch.input_ids.shape[1] and measured.pictures == sizes

    slow = replace(processor)
    monkeypatch.setattr(PictureRule, "_by_function", None)  # as of a processor that has none, or another rule
    assert [slow.measure(sample_with(sizes)) for sizes in SIZES] == [
        processor.measure(sample_with(sizes)) for sizes in SIZES
    ]


def test_what_is_too_long_is_left_out_as_the_batch_leaves_it_out(tmp_path):
    _, processor = build_model(ModelParams(kind="transformers", name=str(save_vlm("qwen2_5_vl", tmp_path))), meta=True)
    sample = sample_with(SIZES[1])
    whole = replace(processor, max_length=2_000).measure(sample).tokens
    for limit in range(4, whole + 2):
        limited = replace(processor, max_length=limit)
        reasons = limited([sample]).skipped.values()
        if not reasons:
            assert limited.measure(sample).tokens == limited([sample]).input_ids.shape[1] == min(whole, limit)
            continue
        with pytest.raises(CorruptRecord) as caught:
            limited.measure(sample)
        assert [caught.value.reason] == list(reasons)


@pytest.mark.parametrize("kind, tokens", [(Processor, 1), (MultimodalProcessor, 4)])
def test_a_sample_of_one_picture_size_has_the_length_of_its_row(kind, tokens):
    tokenizer = make_tokenizer(eos_token="</s>")
    for max_length in (5, 7, 30):
        processor = kind(tokenizer, 8, CLIP_MEAN, CLIP_STD, max_length=max_length, picture_tokens=tokens)
        for number in (1, 2):
            picture = Image.new("RGB", (9, 7))
            sample = Sample.of("a <image> " * number, "red dog", (picture,) * number, "one")
            if processor.refusal(sample):
                continue
            encoded, measured = processor.encode(sample), processor.measure(sample)
            assert (measured.tokens, measured.visual) == (len(encoded.ids), tokens * len(encoded.pictures))


def test_a_header_gives_the_upright_size_of_every_format_and_decodes_nothing(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: rotate by 90 degrees
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        for options in ({}, {"exif": exif}):
            path = tmp_path / f"picture.{kind.lower()}"
            Image.new("RGB", (40, 24), "red").save(path, kind, **options)
            size = open_picture(path, name="one").size
            with headers_only():
                for source in (path, path.read_bytes(), Image.open(path)):
                    header = open_picture(source, name="one")
                    assert isinstance(header, PictureHeader) and header.size == size, (kind, options)
    content = picture_bytes(size=(300, 200))
    with headers_only():
        assert open_picture(content[:100], name="cut off").size == (300, 200)
        with pytest.raises(CorruptRecord, match="is not a usable picture"):
            open_picture(b"no picture", name="none")
        with pytest.raises(CorruptRecord, match="more than max_megapixels 0.01"):
            open_picture(content, name="large", max_megapixels=0.01)
    with pytest.raises(CorruptRecord):
        open_picture(content[:100], name="cut off")
    assert not isinstance(open_picture(Image.open(io.BytesIO(content)), name="one"), PictureHeader)
