"""Samples and batches: of folders, rows of JSON, WebDataset shards, or a source of another room."""

from .batch import Batch, Message, Sample
from .corrupt import CorruptRecord
from .loader import Batches, batches
from .open_sources import open_source, open_sources, open_splits
from .processor import END_OF_CHUNK, IMAGE, PAD, MultimodalProcessor, Processor, add_special_tokens
from .sources.stream import Source
