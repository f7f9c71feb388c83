"""The tokenizer of the generated texts."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .shapes import every_word


def word_tokenizer(*, close: bool) -> PreTrainedTokenizerFast:
    """One token per word of the generated texts, a begin token first and, with `close`, an end token last.

    The end token has the highest id, which is how CLIP's text tower finds it.
    """
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", *every_word(), "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if close else "<s> $A", special_tokens=[(t, vocabulary[t]) for t in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
