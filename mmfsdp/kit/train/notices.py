"""notices: what a person should know of a run's data before it starts, found in what was opened for it.

`mmfsdp new`, the cockpit and every launch ask for them; the run, its panel and its report show those of its launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from PIL import Image

from ...params import RunParams
from ...params.base import without_controls
from ...params.findings import (
    BY_LENGTH,
    CUT_TEXTS,
    DATA,
    FEW_ROWS,
    PICTURE_VALUES,
    SKIPPED_ROWS,
    UNKNOWN_WORDS,
    Finding,
)
from ..data.batch import IMAGE, Sample
from ..data.chat import NO_SYSTEM, SEVERAL_TURNS
from ..data.corrupt import CorruptRecord, first_reasons, printable, shorten
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from ..data.sources.stream import Source
from ..data.value_range import VALUES
from ..run.rank_count import with_ranks

LOOKED_AT = 32
"""Records of a source that are read: decoding and encoding so many takes less than a second."""
MIN_UNKNOWN = 0.01
"""Share of unknown words from which they are told: a rare sign is unknown to many a tokenizer."""
EXAMPLES = 3
FLAT = 0.1
"""Share of 0 to 255 below which a picture is almost flat: of 12 bits that were written into 16, 8 bits keep 6 %."""
WHOLE = 10**6
"""A max_length that cuts nothing: with the run's own, the limit would be the longest length that is found."""


@dataclass
class Look:
    """Holds how a model takes the first records of a source."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each usable record, uncut."""
    refused: dict[str, str] = field(default_factory=dict)
    """Label to reason of those that cannot be read, or that the model does not take."""
    words: Counter[str] = field(default_factory=Counter)
    """The words of their texts, by how often each occurs."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Those of them that the tokenizer does not know."""
    ranges: list[tuple[float, float]] = field(default_factory=list)
    """The least and the largest value of each picture of 8 bits."""

    @property
    def records(self) -> int:
        """Return the number of records that were read."""
        return len(self.lengths) + len(self.refused)


def look_at(source: Source, processor: SampleProcessor | None, count: int = LOOKED_AT) -> Look:
    """Read the first records of a source as a model takes them.

    Nothing is looked at where nobody knows the model's tokenizer, where a model takes rows as they are, and where a
    record can be read only once.
    """
    look = Look()
    if processor is None or processor.takes_given_rows or not source.can_be_read_again:
        return look
    whole = replace(processor, max_length=WHOLE)
    for item in islice(source.loaded(), count):
        if not isinstance(item, Sample):
            look.refused |= {item.label: item.reason} if isinstance(item, CorruptRecord) else {}
            continue
        look.ranges += [_range_of(image) for image in item.images if VALUES not in image.info]
        for message in item.messages:
            for text in message.truths:
                look.words.update(text.replace(IMAGE, " ").split())
        try:
            batch = whole([item])
        except CorruptRecord as error:
            look.refused[error.label] = error.reason
        else:
            look.refused |= batch.skipped
            look.lengths += [batch.input_ids.shape[1]] if not batch.skipped else []
    unknown = unknown_words(processor.tokenizer, list(look.words))
    look.unknown = Counter({word: look.words[word] for word in unknown})
    return look


def _range_of(image: Image.Image) -> tuple[float, float]:
    """Return the least and the largest value of a picture, over all of its channels."""
    extrema: Any = image.getextrema()
    bands = extrema if isinstance(extrema[0], tuple) else [extrema]
    return min(low for low, _ in bands), max(high for _, high in bands)


def unknown_words(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """Return the words in whose place the tokenizer puts its token for the unknown, or nothing."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not words or not callable(tokenizer):
        return []
    found = []
    for word, ids in zip(words, tokenizer(list(words), add_special_tokens=False).input_ids, strict=True):
        is_lost = not ids and any(letter.isalnum() for letter in word)
        if is_lost or (unknown is not None and unknown in ids):
            found.append(word)
    return found


def notices(
    params: RunParams,
    data: Mapping[str, Splits],
    processor: SampleProcessor | None,
    *,
    looks: Mapping[str, Look] | None = None,
) -> list[Finding]:
    """Return what a person should know of the data of a run before it starts, errors first.

    Args:
        params: The choices of the run.
        data: Its sources, opened: what `open_sources` returns.
        processor: The model's. None: what depends on its tokenizer is not told.
        looks: What `look_at` returned of a source, by its place. Others are looked at, but for those that are drawn.
    """
    found: list[Finding] = []
    few, mixed = few_rows(params, data), mixed_groups(params)
    for place, source_params in params.data.sources().items():
        source, look = data[place]["train"], (looks or {}).get(place)
        if look is None:
            look = Look() if source_params.source.takes.draws else look_at(source, processor)
        where = f"{place}.{source.field}"
        found += refused_kinds(where, source, processor)
        texts = {
            UNKNOWN_WORDS: unknown_words_text(look),
            SKIPPED_ROWS: skipped_text(source, look),
            PICTURE_VALUES: "; ".join(source.picture_notes) or flat_text(look),
            FEW_ROWS: few.get(place, ""),
            CUT_TEXTS: cut_text(look, f"{place}.max_length", source_params.max_length),
            BY_LENGTH: mixed.get(place, ""),
        }
        found += [Finding("warning", code, f"{where}: {text}") for code, text in texts.items() if text]
        found += [Finding("note", DATA, f"{where}: {note}") for note in source.notes]
    return sorted(found, key=lambda finding: finding.level != "error")


def refused_kinds(where: str, source: Source, processor: SampleProcessor | None) -> Iterator[Finding]:
    """Yield an error for conversations that a source has and the model's chat template cannot take."""
    warnings = processor.warnings if processor is not None else {}
    if source.has_turns and SEVERAL_TURNS in warnings:
        words = f"{where} has conversations of several turns: {warnings[SEVERAL_TURNS]}"
        yield Finding("error", SEVERAL_TURNS, words)
    if source.has_system and NO_SYSTEM in warnings:
        yield Finding("error", NO_SYSTEM, f"{where} has system texts: {warnings[NO_SYSTEM]}")


def unknown_words_text(look: Look) -> str:
    """Return a text about words that the tokenizer does not know; "" where it knows nearly all."""
    unknown, words = look.unknown.total(), look.words.total()
    if not words or unknown / words < MIN_UNKNOWN:
        return ""
    shown = [repr(printable(without_controls(shorten(word)))) for word, _ in look.unknown.most_common(EXAMPLES)]
    return (
        f"the model's tokenizer does not know {unknown / words:.0%} of the words in the first {look.records} rows, "
        f"such as {', '.join(shown)}. The model reads all of them as one unknown token and cannot write them: its "
        "captions use other words, whatever a picture shows. Choose a model that knows them: `mmfsdp new` takes "
        "--vision DIR --language DIR, or --model NAME"
    )


def skipped_text(source: Source, look: Look) -> str:
    """Return a text about rows that cannot be used, as far as they were read; "" if there are none."""
    skipped = source.skipped | look.refused
    if not skipped:
        return ""
    reasons = printable(without_controls(first_reasons(skipped)))
    return f"rows that are skipped, as far as they were read: {len(skipped):,}; {reasons}"


def flat_text(look: Look) -> str:
    """Return a text about pictures of 8 bits that are all almost flat; "" if one is not."""
    if not look.ranges or max(high - low for low, high in look.ranges) >= FLAT * 255:
        return ""
    low, high = max(look.ranges, key=lambda values: values[1] - values[0])
    return (
        f"pictures are almost flat: none of the first {len(look.ranges)} uses more than "
        f"{100 * (high - low) / 255:.2g} % of the range of 0 to 255, such as {low:g} to {high:g}; stretch their "
        "contrast before the training"
    )


def few_rows(params: RunParams, data: Mapping[str, Splits]) -> dict[str, str]:
    """Return a text about each source with fewer rows to train on than a step takes, by the source's place."""
    train, ranks = params.train, with_ranks(params).launch.world_size
    sizes = params.data.batch_sizes(train.batch_size)
    texts = {}
    for place, size in zip(params.data.sources(), sizes, strict=True):
        rows, in_step = data[place]["train"].length, size * train.accumulation * ranks
        if rows is not None and rows < in_step:
            texts[place] = (
                f"{rows} rows to train on, and a step takes {in_step} (batch size {size} "
                f"x accumulation {train.accumulation} x {ranks} ranks), so each step has rows several times; give it "
                "more rows, or lower train.batch_size, train.accumulation or launch.ranks"
            )
    return texts


def mixed_groups(params: RunParams) -> dict[str, str]:
    """Return a text about each source whose groups of similar length do not fit a micro-step, by the source's place."""
    train, ranks = params.train, with_ranks(params).launch.world_size
    sizes = params.data.batch_sizes(train.batch_size)
    texts = {}
    for (place, source), size in zip(params.data.sources().items(), sizes, strict=True):
        in_step = size * ranks
        if source.by_length % in_step:
            texts[place] = (
                f"groups of {source.by_length} are no multiple of the {in_step} records of a micro-step (batch "
                f"size {size} x {ranks} ranks), so some micro-steps have records of two lengths, and ranks wait; set "
                f"{place}.by_length to {-(-source.by_length // in_step) * in_step}"
            )
    return texts


def cut_text(look: Look, name: str, max_length: int) -> str:
    """Return a text about records that are longer than a limit, which has that name; "" if none are."""
    cut = [length for length in look.lengths if length > max_length]
    if not cut:
        return ""
    return (
        f"{len(cut)} of the first {look.records} rows have more than {max_length} tokens, up to {max(cut)}: they are "
        f"cut there, or skipped where no answer is left; raise {name}"
    )
