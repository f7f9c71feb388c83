"""The texts of the toy world, with and without pictures, and the tokenizer of their words."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .scenes import caption, combinations, draw_scene, questions


def some_text(rng: random.Random) -> str:
    """Return a caption of any combination or pair of them, mostly followed by questions and their answers.

    To answer from the text before, a language model must tell every word from every other. One that has read captions
    alone could give all colors one meaning, and no picture could make it choose among them.
    """
    scene = draw_scene(rng, combinations(), pair=rng.random() < 0.2)
    parts = [caption(scene)]
    if rng.random() < 0.8:
        pairs = [("what is there ?", parts[0]), *questions(scene)]
    else:
        pairs = []
    for question, answer in rng.sample(pairs, min(3, len(pairs))):
        parts.append(f"{question} {answer}")
    return " ".join(parts)


def every_word() -> list[str]:
    """Return all words of all texts, in a fixed order."""
    rng = random.Random(0)
    words: set[str] = set()
    for _ in range(5000):
        words.update(some_text(rng).split())
    return sorted(words)


def word_tokenizer(*, close: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per word, with a begin token first and, with `close`, an end token last.

    The end token has the highest id, which is how CLIP's text tower finds it.
    """
    words = ["<pad>", "<unk>", "<s>", *every_word(), "</s>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if close else "<s> $A", special_tokens=[(t, vocabulary[t]) for t in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
