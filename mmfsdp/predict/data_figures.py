"""DataFigures: what the sizes of a run's records say of its batches: the largest, padding, and ranks that wait."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ..params.findings import Finding
from ..params.in_words import WIDTH, size
from .memory import Memory

OUTSIZE = 2.0
"""A largest batch of so many times the tokens of the median one is told with the records that make it so."""
MUCH = 0.25
"""Above this share of padding, or of waiting, the plan says what helps."""


@dataclass(frozen=True)
class RecordFigures:
    """A record, and its size in a batch."""

    name: str
    tokens: int
    """Length of its row, cut at data.max_length."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Width and height of each picture, as its file has it."""

    def __str__(self) -> str:
        words = f"{self.name} ({self.tokens:,} tokens"
        if self.pictures:
            width, height = max(self.pictures, key=lambda sides: sides[0] * sides[1])
            largest = f"{width} x {height}"
            words += f", {largest}" if len(self.pictures) == 1 else f", {len(self.pictures)} pictures up to {largest}"
        return f"{words})"


@dataclass(frozen=True)
class BatchFigures:
    """A batch of the data."""

    source: str
    """The source's name in the parameters: data, data.more.0, ..."""
    samples: int
    tokens: int
    """Length of its rows, padding included."""
    visual: int
    """Tokens of its pictures, or pictures where they are not among the text."""
    longest: tuple[RecordFigures, ...]
    """The longest records in it, at most three."""
    step: int = 0
    """The optimizer step that has it, from 1; 0 if no step of the run has it."""
    rank: int = 0

    def __str__(self) -> str:
        where = f"step {self.step:,}, rank {self.rank}: " if self.step else ""
        source = "" if self.source == "data" else f" of {self.source}"
        return f"{where}{self.samples} rows of {self.tokens:,} tokens{source}"


@dataclass(frozen=True)
class DataFigures:
    """Figures of a run's batches, by the sizes of its records."""

    records: int
    """Records whose size was looked at: texts, and headers of pictures."""
    of: int | None
    """All records to train on; None if unknown."""
    covers_run: bool
    """True if every batch of the run was looked at."""
    largest: BatchFigures
    """The batch with the highest peak, of those in the order of the seed."""
    possible: BatchFigures
    """The batch with the highest peak that these records could make in another order."""
    possible_peak: Memory
    """At the peak of a step with that."""
    median_tokens: int
    """Of a micro-batch, padding included."""
    padding: float
    """Share of all positions that are padding."""
    waiting: float
    """Share of a step's compute in which a rank waits on average for the one with most tokens."""

    @property
    def words(self) -> str:
        """Return which batch the largest is."""
        if self.covers_run:
            return "the largest batch of the run"
        return f"the largest batch of the first {self.records:,} records"

    @property
    def sizes_differ(self) -> bool:
        """True if a batch is larger than the median one, or has padding."""
        return self.padding > 0 or self.largest.samples * self.largest.tokens > self.median_tokens

    @property
    def shares(self) -> str:
        """Return the shares of padding and of waiting as words."""
        waiting = f"a rank waits on average {self.waiting:.0%} of a step for the one with most tokens"
        return f"{self.padding:.0%} of all positions are padding; {waiting}"

    def lines(self) -> list[str]:
        """Return lines for a table."""
        of = f" of {self.of:,}" if self.of is not None and self.of != self.records else ""
        sample = "" if self.covers_run else "; others may be larger: --all-data reads all"
        texts = [f"data: {self.records:,}{of} records by their texts and picture headers{sample}"]
        texts.append(f"largest batch: {self.largest}; longest: {', '.join(map(str, self.largest.longest))}")
        possible = f"largest that another order may have: {self.possible}"
        texts.append(f"{possible}, peak {size(self.possible_peak.bytes)}")
        texts.append(self.shares)
        lines = textwrap.wrap(texts[0], WIDTH, subsequent_indent="  ")
        for text in texts[1:]:
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        return lines

    def findings(self) -> list[Finding]:
        """Return what a person should know before a launch."""
        found = []
        tokens = self.largest.samples * self.largest.tokens
        if tokens >= OUTSIZE * self.median_tokens:
            names = ", ".join(map(str, self.largest.longest))
            found.append(
                Finding(
                    "warning",
                    "outsize-records",
                    f"{self.words} ({self.largest}) has {tokens / self.median_tokens:.2g} times the tokens of the "
                    f"median one; its longest records: {names}. Memory must be enough for it, and the other ranks wait "
                    "for it: leave out or shrink what is too large, or lower data.max_length",
                )
            )
        if self.of is not None and max(self.padding, self.waiting) > MUCH:  # records have an index
            fix = "data.by_length, a multiple of batch size x ranks, puts records of similar length together, and "
            fix += "data.even_ranks deals them evenly"
            found.append(Finding("warning", "uneven-batches", f"{self.shares}; {fix}"))
        return found
