"""DataParams: where samples come from and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .check import ParamError, at_least, coerce, need
from .enums import DataSource, Task

MOST_UNSEEN = 0.15
"""No pretraining shows this share of the combinations, so that any run may call them unseen."""


@dataclass(frozen=True, kw_only=True)
class SourceParams:
    """One source of samples."""

    source: DataSource = DataSource.SHAPES
    """Kind of source: shapes (generated), folder, json, webdataset. Default shapes."""

    path: str | None = None
    """The folder (folder), the .json or .jsonl files (json) or the .tar shards (webdataset): braces as in
    shards/{000..011}.tar, wildcards, or their folder. Needed by all but shapes. Default unset."""

    pictures: str | None = None
    """Folder of the pictures that JSON names, where they are neither beside it nor in its shard. Default unset."""

    task: Task = Task.CAPTION
    """What the model learns to say about a generated picture: caption, question. Default caption."""

    max_length: int = 64
    """Longest sequence, in tokens; longer text is cut and counted. Default 64."""

    weight: float = 1.0
    """Factor of this source's mean loss in the loss of a step. Default 1.0."""

    resample: bool = False
    """An epoch draws shards, or records, with replacement rather than taking each once. Default false."""

    min_similarity: float = 0.24
    """Pictures of an interleaved document that match their sentence (matched_sim) by less are left out. Default
    0.24."""

    max_pictures: int = 6
    """Pictures of an interleaved document beyond so many are left out; a count. Default 6."""

    heldout_fraction: float = 0.02
    """Share of the records, chosen by a hash of their pictures' or their own names, that is held out of training, for
    eval_every and for captions afterwards; at least one record. Generated pictures are without end. Default 0.02."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 4, "max_length")
        at_least(self, 1, "max_pictures")
        generated = self.source is DataSource.SHAPES
        if self.path is None and not generated:
            raise ParamError("path", f"source {self.source} needs a path; set path to your data")
        for name in ("path", "pictures"):
            if getattr(self, name) is not None and generated:
                raise ParamError(
                    name,
                    f"{getattr(self, name)!r} has no effect with source shapes; set source to folder, json or "
                    "webdataset",
                )
        need(self.weight > 0, "weight", f"{self.weight} must be above 0; leave the source out to learn nothing from it")
        need(0 < self.heldout_fraction < 1, "heldout_fraction", f"{self.heldout_fraction} is not between 0 and 1")
        if self.task is Task.QUESTION and not generated:
            raise ParamError("task", f"question needs source shapes, not {self.source}; set task to caption")


@dataclass(frozen=True, kw_only=True)
class MoreParams(SourceParams):
    """A further source, of which every micro-step takes a batch of its own."""

    batch_size: int | None = None
    """Samples of this source per rank and micro-step; a count. Default unset: train.batch_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch_size")


@dataclass(frozen=True, kw_only=True)
class DataParams(SourceParams):
    """Where samples come from and how they become batches."""

    more: tuple[MoreParams, ...] = ()
    """Further sources, each with the fields of a source and batch_size: every step learns from all of them. On the
    command line as YAML: --data.more '[{source: json, path: docs.jsonl, weight: 0.2}]'. Default none."""

    workers: int = 0
    """Loader processes per rank and source; a count; 0 loads in the rank itself. Default 0."""

    augment: bool = False
    """Shift and scale pictures at random during training. Default false."""

    feature_cache: str | None = None
    """Folder that keeps what the frozen vision encoder makes of each picture, so that later epochs and runs skip it.
    The predicted traffic is that of a step which does not. Not with augment. Default unset: none."""

    unseen_fraction: float = 0.15
    """Share of attribute combinations of the generated pictures that no training ever sees in a picture; at most
    0.15, since the generated backbones are pretrained on the rest. Default 0.15."""

    pair_fraction: float = 0.25
    """Share of the generated pictures that show two groups of shapes and how they lie to each other. Default 0.25."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "workers")
        if self.augment and self.feature_cache is not None:
            raise ParamError(
                "feature_cache", "with augment no picture comes twice; set augment to false, or unset feature_cache"
            )
        need(
            0 < self.unseen_fraction <= MOST_UNSEEN,
            "unseen_fraction",
            f"{self.unseen_fraction} is not above 0 and at most {MOST_UNSEEN}",
        )
        need(0 <= self.pair_fraction <= 1, "pair_fraction", f"{self.pair_fraction} is not between 0 and 1")

    def sources(self) -> dict[str, DataParams]:
        """Each source by itself, by the dotted name of its place in a run's parameters."""
        names = [f.name for f in fields(SourceParams)]
        every: dict[str, SourceParams] = {"data": self} | {f"data.more.{i}": more for i, more in enumerate(self.more)}
        return {
            place: replace(self, more=(), **{name: getattr(one, name) for name in names})
            for place, one in every.items()
        }
