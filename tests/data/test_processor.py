"""What becomes a token, what carries loss, and which samples are refused."""

import copy
from dataclasses import replace

import pytest
import torch
from material import make_tokenizer
from PIL import Image

from mmfsdp.kit.data import END_OF_CHUNK, IMAGE, CorruptRecord, Processor, Sample, add_special_tokens
from mmfsdp.kit.data.batch import IGNORE

RED = Image.new("RGB", (8, 6), "red")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def small() -> Processor:
    return Processor(make_tokenizer(bos_token="<s>", eos_token="</s>"), 8, HALF, HALF, max_length=16)


def learned(processor: Processor, sample: Sample) -> str:
    """The tokens that carry loss."""
    batch = processor([sample])
    return " ".join(processor.tokenizer.convert_ids_to_tokens(batch.labels[batch.labels != IGNORE].tolist()))


def test_loss_is_on_the_text_and_the_end_of_chunk_alone(small):
    samples = [
        Sample.of(IMAGE + "is a", "red dog", (RED,)),
        Sample.of("a", "dog"),
        Sample.of("a" + IMAGE + IMAGE, "a dog", (RED, RED)),
    ]
    batch = small(samples)
    assert [learned(small, s) for s in samples] == [s.text + " " + END_OF_CHUNK for s in samples]
    assert batch.label_tokens == 3 + 2 + 3
    for special in (small.image_id, small.pad_id, small.tokenizer.bos_token_id):
        assert not (batch.labels == special).any()
    assert torch.equal(batch.labels[batch.labels != IGNORE], batch.input_ids[batch.labels != IGNORE])
    assert ((batch.input_ids == small.pad_id) == (batch.attention_mask == 0)).all()
    assert batch.media["vision"].shape == (3, 2, 1, 3, 8, 8) and not batch.media["vision"][1].any()
    assert batch.size == 3 and batch.media["vision"].dtype == torch.float32


@pytest.mark.parametrize(
    ("prompt", "text", "pictures", "expected"),
    [
        ("", f"a {IMAGE} red dog", 1, f"red dog {END_OF_CHUNK}"),
        ("", f"{IMAGE} red {END_OF_CHUNK} a {IMAGE} dog", 2, f"red {END_OF_CHUNK} dog {END_OF_CHUNK}"),
        ("", f"{IMAGE} red {END_OF_CHUNK} is is", 1, f"red {END_OF_CHUNK}"),
        (IMAGE, f"red {END_OF_CHUNK} a {IMAGE} dog {END_OF_CHUNK}", 2, f"red {END_OF_CHUNK} dog {END_OF_CHUNK}"),
        ("", f"{IMAGE} {IMAGE} red", 2, f"red {END_OF_CHUNK}"),
    ],
)
def test_interleaved_text_learns_only_what_a_picture_precedes(small, prompt, text, pictures, expected):
    assert learned(small, Sample.of(prompt, text, (RED,) * pictures)) == expected


def test_a_first_token_that_nothing_precedes_has_no_label():
    plain = Processor(make_tokenizer(), 8, HALF, HALF)
    assert learned(plain, Sample.of("", "red dog")) == f"dog {END_OF_CHUNK}"


def test_batch_neighbors_change_nothing(small):
    short, long = Sample.of(IMAGE, "a dog", (RED,)), Sample.of("a a a a", "red dog is a red dog")
    alone, together = small([short]), small([long, short])
    length = alone.input_ids.shape[1]
    assert torch.equal(alone.input_ids[0], together.input_ids[1, :length])
    assert torch.equal(alone.labels[0], together.labels[1, :length])
    assert torch.equal(alone.media["vision"][0], together.media["vision"][1])


def test_long_text_is_cut_and_its_pictures_with_it(small):
    row = small.encode(Sample.of(IMAGE, "red dog " * 5_000, (RED,)))
    assert len(row.ids) == len(row.labels) == 16 and row.truncated and small.end_id not in row.ids
    assert not small.encode(Sample.of(IMAGE, "red dog", (RED,))).truncated
    late = small.encode(Sample.of(IMAGE, "red dog " * 10 + IMAGE + " red", (RED, RED)))
    assert len(late.pictures) == late.ids.count(small.image_id) == 1


def test_a_training_batch_has_a_mask_only_where_the_model_needs_one(small):
    """Prompts keep theirs: they are padded on the left."""
    causal = replace(small, mask_padding=False)
    padded = [Sample.of("a", "dog"), Sample.of("a", "red dog")]
    assert (small(padded).attention_mask == 0).any()
    assert causal(padded).attention_mask is None and "attention_mask" not in causal(padded).inputs()
    assert small(padded[:1]).attention_mask is None
    assert causal.prompts([Sample.of("a", "dog"), Sample.of("a a", "dog")]).attention_mask is not None


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (Sample.of(IMAGE, "a", (), "first"), "'first' has 1 <image> placeholders but 0 pictures"),
        (Sample.of("", "a", (RED, RED), "second"), "'second' has 0 <image> placeholders but 2 pictures"),
        (Sample.of(IMAGE, " \n", (RED,), "third"), "'third' has no text"),
        (Sample.of(IMAGE + "a " * 20, "dog", (RED,), "fourth"), "'fourth' has no token to learn from .* max_length"),
    ],
)
def test_unusable_samples_are_named(small, sample, words):
    with pytest.raises(CorruptRecord, match=words):
        small([sample])


def test_prompts_are_the_beginning_of_training_rows(small):
    samples = [Sample.of(IMAGE + "is a", "dog", (RED,)), Sample.of("a", "dog")]
    batch, training = small.prompts(samples), small(samples)
    assert batch.labels is None and "labels" not in batch.inputs()
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    for given, row, mask in zip(batch.input_ids, training.input_ids, batch.attention_mask, strict=True):
        tokens = given[mask.bool()]
        assert torch.equal(tokens, row[: len(tokens)])
    assert torch.equal(batch.media["vision"], training.media["vision"])


def test_decode_drops_special_tokens(small):
    batch = small([Sample.of(IMAGE, "a red dog", (RED,)), Sample.of("is", "a")])
    assert small.decode(batch.input_ids) == ["a red dog", "is a"]
    padded = torch.nn.functional.pad(batch.input_ids, (3, 0), value=small.pad_id)
    assert small.decode(padded) == ["a red dog", "is a"]


def test_no_samples_make_one_row_without_loss(small):
    batch = small([])
    assert batch.size == 1 and batch.label_tokens == 0 and batch.media["vision"].shape == (1, 1, 1, 3, 8, 8)


def test_special_tokens_are_added_once_and_what_is_there_stays():
    tokenizer = make_tokenizer(eos_token="</s>", pad_token="</s>")
    add_special_tokens(tokenizer)
    size = len(tokenizer)
    add_special_tokens(tokenizer)
    assert len(tokenizer) == size
    assert tokenizer.pad_token == tokenizer.eos_token == "</s>"
    assert tokenizer(f"{IMAGE}dog{END_OF_CHUNK}").input_ids == tokenizer.convert_tokens_to_ids(
        [IMAGE, "dog", END_OF_CHUNK]
    )


def test_augments_only_when_told_to(small):
    noisy = copy.copy(small)
    noisy.augment = True
    sample = Sample.of(IMAGE, "a", (Image.effect_noise((20, 20), 90),))
    plain, moved, again = [p.encode(sample, seed=1).pictures[0] for p in (small, noisy, noisy)]
    assert torch.equal(moved, again) and not torch.equal(moved, plain)
    assert torch.equal(noisy.prompts([sample]).media["vision"][0, 0, 0], plain)
