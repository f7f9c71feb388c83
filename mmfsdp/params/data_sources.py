"""DataSource: the kinds of source, and what each takes from the parameters. What opens one is in mmfsdp.kit.data."""

from __future__ import annotations

from dataclasses import dataclass

from .enums import Choice


@dataclass(frozen=True)
class SourceTakes:
    """Say what a kind of source takes from DataParams, and what it does with it."""

    fields: tuple[str, ...] = ()
    """Fields that it reads, of those that not every kind reads: with it they have an effect."""
    chosen_by: str = ""
    """A field that chooses this kind by being set, and that no other kind has."""
    draws: bool = False
    """It draws its pictures, in any size and without end, rather than reading them."""
    gives_rows: bool = False
    """Its rows may be handed on as they are, not as samples: what opens it takes `as_given`."""
    elsewhere: str = ""
    """The reason why its rows are not looked at before a launch, where they are not in files on this machine."""

    @property
    def needs_path(self) -> bool:
        """Return True if it reads `path`."""
        return "path" in self.fields


FILES = ("path", "heldout", "picture_range")
ARRANGED = ("by_length", "longest_first", "even_ranks")
"""Fields of sources whose records can be read in any order."""


class DataSource(Choice):
    """The source of samples. A new one is an entry here and a file that opens it; see kit/data/open_sources.py."""

    takes: SourceTakes
    """The parameters that it reads."""

    SHAPES = (
        "shapes",
        "Pictures of colored shapes, drawn on the fly; needs nothing on disk.",
        "mmfsdp.kit.shapes.shapes_source:open_shapes",
        SourceTakes(draws=True),
    )
    FOLDER = (
        "folder",
        "A folder of pictures with metadata.jsonl or .csv (imagefolder), with 1.txt beside 1.png, or in class folders.",
        "mmfsdp.kit.data.sources.records:open_records",
        SourceTakes((*FILES, *ARRANGED, "pictures")),
    )
    JSON = (
        "json",
        "Rows in .json (LLaVA, COCO captions), .jsonl, .csv or .tsv files, also .gz.",
        "mmfsdp.kit.data.sources.records:open_records",
        SourceTakes((*FILES, *ARRANGED, "pictures")),
    )
    WEBDATASET = (
        "webdataset",
        "WebDataset .tar shards: .jpg or .png with .txt or .json (LAION), or documents (MMC4).",
        "mmfsdp.kit.data.sources.shards:open_shards",
        SourceTakes(FILES),
    )
    PARQUET = (
        "parquet",
        "Rows of .parquet files, with the pictures inside or beside them. Needs mmfsdp[parquet].",
        "mmfsdp.kit.data.sources.records:open_records",
        SourceTakes((*FILES, *ARRANGED, "pictures")),
    )
    HUB = (
        "hub",
        "A data set of the Hugging Face hub, or a folder of its save_to_disk. Needs mmfsdp[hub].",
        "mmfsdp.kit.data.sources.hub:open_hub",
        SourceTakes((*FILES, *ARRANGED, "pictures"), elsewhere="the hub is not asked before a launch"),
    )
    OWN = (
        "own",
        "Your own code: what the import path `reader` gives.",
        "mmfsdp.kit.data.sources.reader:open_reader",
        SourceTakes(
            ("picture_range", *ARRANGED),
            chosen_by="reader",
            gives_rows=True,
            elsewhere="your own reader is not called before a launch",
        ),
    )


def sources_that_read() -> dict[str, tuple[DataSource, ...]]:
    """Return the kinds of source that read each field of SourceParams, of those that not every kind reads."""
    sources: dict[str, tuple[DataSource, ...]] = {}
    for source in DataSource:
        for name in source.takes.fields:
            sources[name] = (*sources.get(name, ()), source)
    return sources
