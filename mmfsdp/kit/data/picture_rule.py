"""PictureRule: how many tokens a processor of transformers makes of pictures, by their sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from .batch import IMAGE, Sample


class PictureRule:
    """The tokens that a processor of transformers makes of pictures, by their sizes.

    Most processors say it by a function, which vLLM uses too. It may leave out what the processor writes around a
    picture, so it is compared with what the processor makes of blank pictures; a processor that differs is asked with
    blank pictures each time, which takes some hundred times as long.
    """

    TRIED = ((56, 56), (300, 120), (150, 400))
    """Width and height of the blank pictures that the function is compared with."""

    def __init__(self, processor: Any) -> None:
        """Take a ChatProcessor."""
        self._processor = replace(processor, max_length=10**9)
        self._counts: dict[tuple[tuple[int, int], ...], int] = {}
        self._around = self._tokens_around()

    def tokens(self, sizes: tuple[tuple[int, int], ...]) -> int:
        """Return the tokens of the pictures of one sample. sizes: width and height of each. Raises what it raises."""
        if sizes not in self._counts:
            if self._around is None:
                self._counts[sizes] = self._by_blank_pictures(sizes)
            else:
                self._counts[sizes] = sum(self._by_function(sizes)) + self._around * len(sizes)
        return self._counts[sizes]

    def _tokens_around(self) -> int | None:
        """Return the tokens around each picture that the function does not count; None if it differs by more."""
        if not hasattr(self._processor.processor, "_get_num_multimodal_tokens"):
            return None
        differences = set()
        try:
            for size in self.TRIED:
                differences.add(self._by_blank_pictures((size,)) - self._by_function((size,))[0])
            two = self.TRIED[:2]
            both = self._by_blank_pictures(two) - sum(self._by_function(two))
        except Exception:  # a processor may raise any kind; it is asked with the pictures themselves
            return None
        around = differences.pop()
        return around if not differences and both == 2 * around else None

    def _by_function(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        heights_first = [[height, width] for width, height in sizes]
        return self._processor.processor._get_num_multimodal_tokens(image_sizes=heights_first)["num_image_tokens"]

    def _by_blank_pictures(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the tokens that a text with blank pictures has more than its words."""
        blank = tuple(Image.new("RGB", size) for size in sizes)
        sample = self._processor.encode(Sample.of(IMAGE * len(sizes), "blank", blank, "a blank picture"))
        return int(self._processor.collate([sample]).input_ids.shape[1]) - text_tokens(self._processor, sample)


def text_tokens(processor: Any, sample: Any, end: int | None = None) -> int:
    """Return the tokens of a conversation's text without its pictures; end: of its first letters only."""
    text = sample.text[:end]
    token = getattr(processor.processor, "image_token", None)
    bos = processor.tokenizer.bos_token
    has_bos = bool(bos) and sample.text.startswith(bos)
    count = len(processor.tokenizer(text, add_special_tokens=not has_bos).input_ids)
    return count - (text.count(token) if token else 0)
