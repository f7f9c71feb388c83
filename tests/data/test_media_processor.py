"""MultimodalProcessor: every placeholder in full, labels where they belong, and mistakes by name."""

import pytest
import torch
from material import make_tokenizer
from PIL import Image

from mmfsdp.kit.data import CorruptRecord, MultimodalProcessor, Sample
from mmfsdp.params import ParamError

RED = Image.new("RGB", (9, 7), "red")


def make(**changes) -> MultimodalProcessor:
    tokenizer = make_tokenizer(eos_token="</s>")
    return MultimodalProcessor(tokenizer, 8, (0.5,) * 3, (0.5,) * 3, picture_tokens=4, **changes)


MIXED = [
    Sample.of("<image> a", "red dog", (RED,), "one"),
    Sample.of("<image> a <image>", "dog", (RED, RED), "two"),
    Sample.of("a", "red dog", (), "text"),
]


def test_placeholders_take_as_many_tokens_as_the_encoder_makes():
    processor = make()
    image = processor.image_id
    batch = processor(MIXED)
    assert [(row == image).sum().item() for row in batch.input_ids] == [4, 8, 0]
    assert batch.input_ids[0, :4].tolist() == [image] * 4
    assert batch.media["vision"].shape == (3, 2, 1, 3, 8, 8)
    blank = [(batch.media["vision"][i, t] == 0).all().item() for i in range(3) for t in range(2)]
    assert blank == [False, True, False, False, True, True]


def test_labels_leave_out_placeholders_padding_and_prompts():
    processor = make()
    batch = processor(MIXED)
    words = processor.tokenizer.convert_tokens_to_ids(["a", "red", "dog", "</s>"])
    learned = [[token for token in row if token != -100] for row in batch.labels.tolist()]
    assert learned == [words[1:], words[2:], words[1:]]
    inside = batch.labels != -100
    assert torch.equal(batch.labels[inside], batch.input_ids[inside]) and (batch.attention_mask[inside] == 1).all()


def test_prompts_are_padded_on_the_left_and_end_as_they_should():
    processor = make()
    batch = processor.prompts(MIXED)
    assert batch.labels is None and batch.attention_mask[:, -1].all()
    assert processor.decode(batch.input_ids) == ["a", "a", "a"]


def test_max_length_never_cuts_an_item_in_two():
    batch = make(max_length=9)([Sample.of("a", "red <image> <image> dog", (RED, RED), "cut")])
    assert batch.input_ids.shape == (1, 6) and batch.media["vision"].shape[1] == 1


def test_counts_that_do_not_match_are_named_with_the_sample():
    with pytest.raises(CorruptRecord, match="'x' has 2 <image> placeholders but 1 pictures"):
        make()([Sample.of("<image> <image>", "dog", (RED,), "x")])
    with pytest.raises(ParamError, match="language.name: its tokenizer has no end token"):
        MultimodalProcessor(make_tokenizer(), 8, (0.5,) * 3, (0.5,) * 3, picture_tokens=4)
