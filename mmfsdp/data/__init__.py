"""Samples and batches: generated pictures, folders, WebDataset shards."""

from .batch import Batch, Sample
from .corrupt import CorruptRecord
from .loader import Batches, batches
from .processor import END_OF_CHUNK, IMAGE, PAD, MultimodalProcessor, Processor, add_special_tokens
from .sources import open_source, open_sources, open_splits
from .stream import Source
