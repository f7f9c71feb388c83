"""DataParams: where samples come from and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass

from .check import ParamError, at_least, coerce, need
from .enums import DataSource, Task


@dataclass(frozen=True, kw_only=True)
class DataParams:
    """Where samples come from and how they become batches."""

    source: DataSource = DataSource.SHAPES
    """Kind of source: shapes (generated), folder, webdataset. Default shapes."""

    path: str | None = None
    """The folder (folder), or the .tar shards: braces as in shards/{000..011}.tar, wildcards, or their folder
    (webdataset). Needed by and only for those. Default unset."""

    task: Task = Task.CAPTION
    """What the model learns to say about a picture: caption, question. Default caption."""

    max_length: int = 64
    """Longest sequence, in tokens; longer text is cut and counted. Default 64."""

    workers: int = 0
    """Loader processes per rank; a count; 0 loads in the rank itself. Default 0."""

    augment: bool = False
    """Shift and scale pictures at random during training. Default false."""

    unseen_fraction: float = 0.15
    """Share of attribute combinations of the generated pictures that no training ever sees in a picture. Default
    0.15."""

    pair_fraction: float = 0.25
    """Share of the generated pictures that show two groups of shapes and how they lie to each other. Default 0.25."""

    heldout_fraction: float = 0.02
    """Share of a folder's or of shards' records, chosen by a hash of their names, that is kept from training to
    caption afterwards; at least one record. Default 0.02."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 0, "workers")
        at_least(self, 4, "max_length")
        generated = self.source is DataSource.SHAPES
        if self.path is None and not generated:
            raise ParamError("path", f"source {self.source} needs a path; set data.path to your data")
        if self.path is not None and generated:
            raise ParamError(
                "path", f"{self.path!r} has no effect with source shapes; set source to folder or webdataset"
            )
        need(0 < self.unseen_fraction < 1, "unseen_fraction", f"{self.unseen_fraction} is not between 0 and 1")
        need(0 <= self.pair_fraction <= 1, "pair_fraction", f"{self.pair_fraction} is not between 0 and 1")
        need(0 < self.heldout_fraction < 1, "heldout_fraction", f"{self.heldout_fraction} is not between 0 and 1")
        if self.task is Task.QUESTION and not generated:
            raise ParamError("task", f"question needs source shapes, not {self.source}; set task to caption")
