"""DataParams: where samples come from and how they become batches."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from .base import ParamError, Params
from .data_sources import DataSource, sources_that_read
from .own import OwnCode, path_of

MAX_MEGAPIXELS = 89.5
"""PIL's own limit, beyond which it takes a picture for an attack by decompression."""


class SourceParams(Params):
    """One source of samples."""

    source: DataSource = DataSource.SHAPES
    """Kind of source: shapes (generated), folder, json, parquet, webdataset, hub, own (`reader`). Default shapes."""

    reader: OwnCode | None = None
    """Import path of your own reader, my_data:read, or {call: my_data:read, size: 3} with arguments. It returns an
    object with `__len__` and `__getitem__(i)`, such as a Dataset of torch; a row is a dict as in a JSON file, its
    picture a PIL image, bytes or a path. With it, `source` is own. Default unset."""

    path: str | None = None
    """The folder (folder), the files of rows (json, parquet) or the .tar shards (webdataset): braces as in
    shards/{000..011}.tar, wildcards, or their folder. For hub a name, org/name or org/name:configuration, or a folder
    that save_to_disk wrote. Needed by all but shapes and own. Default unset."""

    pictures: str | None = None
    """Folder of the pictures that a file of rows names, if it is not the file's own. Default unset: the file's own."""

    max_length: int = Field(64, ge=4)
    """Longest sequence, in tokens; longer text is cut and counted. Default 64."""

    weight: float = Field(1.0, gt=0)
    """Factor of this source's mean loss in the loss of a step. Default 1.0."""

    resample: bool = False
    """An epoch draws shards, or records, with replacement rather than taking each once. Default false."""

    by_length: int = Field(0, ge=0)
    """Records of similar length that follow each other in the order; a count. Batches then have less padding, and ranks
    wait less for each other. Set it to a multiple of batch size x ranks. The length of every record is measured before
    the first step, from its text and picture headers; an order is a function of the seed and the lengths, so that a
    resumed run goes on exactly. Default 0: a random order."""

    longest_first: bool = False
    """With by_length, the group with the longest record comes first: a run that has too little memory for it fails in
    its first step. Default false."""

    even_ranks: bool = False
    """Deal the records of each micro-step to the ranks so that each has about as many tokens. The lengths are measured
    as for by_length. Default false: in their order."""

    min_similarity: float = 0.24
    """Pictures of an interleaved document that match their sentence (matched_sim) by less are left out. Default
    0.24."""

    max_pictures: int = Field(6, ge=1)
    """Pictures of an interleaved document beyond so many are left out; a count. Default 6."""

    max_megapixels: float = Field(MAX_MEGAPIXELS, gt=0)
    """A larger picture is skipped, in millions of pixels. A decoded picture has 3 MB for each, so raise it only for
    pictures that you trust, such as scans. Default 89.5."""

    picture_range: tuple[float, ...] = ()
    """Values of pictures of more than 8 bits (16-bit, integer or float, one channel) that become black and white, such
    as [0, 4095] for 12 bits or [-1000, 1000] for Hounsfield units. Default none: 0 and 65535 for 16 bits, 0 and 1 for
    floats of this range, else 0 and 255, or 65535 if a value is above 255."""

    heldout_fraction: float = Field(0.02, gt=0, lt=1)
    """Share of the records, chosen by a hash of their pictures' or their own names, that is held out of training, for
    eval_every and for captions afterwards; at least one record. Where files or folders are named as published splits
    (train, validation, test), those are kept apart, and this has no effect. Generated pictures are without end.
    Default 0.02."""

    heldout: str | None = None
    """Held out in place of that share, or of the published split that would be: the name of another published split
    (test), or the path of other files in the same format. Default unset: validation, else test, else a share."""

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **{name: ("source", sources) for name, sources in sources_that_read().items()},
        "heldout_fraction": ("heldout", (None,)),
    }
    SETS_BACK: ClassVar[dict[str, tuple[str, ...]]] = {
        source.takes.chosen_by: ("source", *(name for name in sources_that_read() if name not in source.takes.fields))
        for source in DataSource
        if source.takes.chosen_by
    }

    @model_validator(mode="before")
    @classmethod
    def _become_own(cls, values: Any) -> Any:
        """With a `reader` and no source, take source own."""
        if not isinstance(values, dict):  # a SourceParams
            return values
        for source in DataSource:
            field = source.takes.chosen_by
            if field and values.get(field) is not None:
                values = {"source": source} | values
        return values

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.picture_range and (len(self.picture_range) != 2 or self.picture_range[0] >= self.picture_range[1]):
            words = f"{list(self.picture_range)} is no range; give the value of black and a larger one of white"
            raise ParamError("picture_range", f"{words}, such as [0, 4095]")
        for source in DataSource:
            field = source.takes.chosen_by
            value = getattr(self, field) if field else None
            if value is not None and self.source is not source:
                words = f"{path_of(value)!r} is the source {source}, but source is {self.source}; unset one of the two"
                raise ParamError(field, words)
            if field and value is None and self.source is source:
                words = f"source {source} needs a {field}, such as my_data:read; set it, or another source"
                raise ParamError(field, words)
        if self.longest_first and not self.by_length:
            words = "has no effect without by_length, which makes groups of records of similar length"
            raise ParamError("longest_first", f"{words}; set by_length to batch size x ranks")
        if self.path is None and self.source.takes.needs_path:
            raise ParamError("path", f"source {self.source} needs a path; set path to your data")
        return self


class MoreParams(SourceParams):
    """A further source. Every micro-step takes a batch of its own from it."""

    batch_size: int | None = Field(None, ge=1)
    """Samples of this source per rank and micro-step; a count. Default unset: train.batch_size."""


class DataParams(SourceParams):
    """The sources of samples, and how they become batches."""

    more: tuple[MoreParams, ...] = ()
    """Further sources, each with the fields of a source and batch_size: every step learns from all of them. On the
    command line as YAML: --data.more '[{source: json, path: docs.jsonl, weight: 0.2}]'. Default none."""

    workers: int = Field(0, ge=0)
    """Loader processes per rank and source; a count; 0 loads in the rank itself. Default 0."""

    augment: bool = False
    """Shift and scale pictures at random during training. Default false."""

    feature_cache: str | None = None
    """Folder that keeps what the frozen vision encoder makes of each picture, so that later epochs and runs skip it.
    The predicted traffic is for a step that encodes every picture. Not with augment. Default unset: none."""

    pair_fraction: float = Field(0.25, ge=0, le=1)
    """Share of the generated pictures that show two groups of shapes and how they lie to each other. Default 0.25."""

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.augment and self.feature_cache is not None:
            message = "with augment no picture comes twice; set augment to false, or unset feature_cache"
            raise ParamError("feature_cache", message)
        return self

    def batch_sizes(self, batch_size: int) -> list[int]:
        """Return the samples of a micro-batch of each source. batch_size: of the first one, `train.batch_size`."""
        return [batch_size, *(more.batch_size or batch_size for more in self.more)]

    def sources(self) -> dict[str, DataParams]:
        """Return each source by itself, by the dotted name of its parameters: data, data.more.0, ..."""
        sources = {"data": self.change(more=())}
        for i, more in enumerate(self.more):
            own = {name: getattr(more, name) for name in SourceParams.model_fields}
            sources[f"data.more.{i}"] = self.change(more=(), **own)
        return sources
