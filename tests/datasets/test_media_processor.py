"""MultimodalProcessor: every placeholder in full, labels where they belong, and mistakes by name."""

import numpy as np
import pytest
import torch
from material import make_tokenizer
from PIL import Image

from mmfsdp.data import CorruptRecord, MultimodalProcessor, Sample
from mmfsdp.params import ParamError

RED = Image.new("RGB", (9, 7), "red")
TONE = np.sin(np.arange(1200) / 5).astype(np.float32)


def make(**changes) -> MultimodalProcessor:
    tokenizer = make_tokenizer(eos_token="</s>")
    settings = {"counts": {"vision": 4, "audio": 5}, "audio_shape": (8, 10), **changes}
    return MultimodalProcessor(tokenizer, 8, (0.5,) * 3, (0.5,) * 3, **settings)


MIXED = [
    Sample("<image> a <audio>", "red dog", (RED,), "both", sounds=(TONE,)),
    Sample("<image> a <image>", "dog", (RED, RED), "two"),
    Sample("a", "red dog", (), "text"),
]


def test_placeholders_take_as_many_tokens_as_the_encoder_makes():
    processor = make()
    image, audio = processor.ids["vision"], processor.ids["audio"]
    batch = processor(MIXED)
    assert [(row == image).sum().item() for row in batch.input_ids] == [4, 8, 0]
    assert [(row == audio).sum().item() for row in batch.input_ids] == [5, 0, 0]
    assert batch.input_ids[0, :4].tolist() == [image] * 4
    assert batch.media["vision"].shape == (3, 2, 1, 3, 8, 8) and batch.media["audio"].shape == (3, 1, 8, 10)
    blank = [(batch.media["vision"][i, t] == 0).all().item() for i in range(3) for t in range(2)]
    assert blank == [False, True, False, False, True, True]
    assert batch.media["audio"][0].std() > 0.1 and (batch.media["audio"][1:] == 0).all()


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
    batch = make(max_length=9)([Sample("a", "red <image> <image> dog", (RED, RED), "cut")])
    assert batch.input_ids.shape == (1, 6) and batch.media["vision"].shape[1] == 1


def test_one_modality_alone():
    pictures = make(counts={"vision": 4}, audio_shape=())
    assert set(pictures(MIXED[1:]).media) == {"vision"}
    sounds = make(counts={"audio": 5})
    assert set(sounds([Sample("<audio>", "dog", sounds=(TONE,))]).media) == {"audio"}
    assert make()([]).media["audio"].shape == (1, 1, 8, 10)


def test_counts_that_do_not_match_are_named_with_the_sample():
    with pytest.raises(CorruptRecord, match="'x' has 2 <image> placeholders but 1 pictures"):
        make()([Sample("<image> <image>", "dog", (RED,), "x")])
    with pytest.raises(CorruptRecord, match="'x' has 1 <audio> placeholders but 2 sounds"):
        make()([Sample("<audio>", "dog", (), "x", sounds=(TONE, TONE))])
    with pytest.raises(CorruptRecord, match="'x' has a sound of 0.15 s; the encoder takes 0.10 s"):
        make()([Sample("<audio>", "dog", (), "x", sounds=(np.tile(TONE, 2),))])
    with pytest.raises(ParamError, match="language.name: its tokenizer has no end token"):
        MultimodalProcessor(make_tokenizer(), 8, (0.5,) * 3, (0.5,) * 3, counts={"vision": 4})
