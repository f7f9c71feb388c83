"""Multimodal models: backbones of open_clip and transformers, and what is trained between them."""

from .base import MediaModel, MediaOutput
from .flamingo import Flamingo
from .language import build_language, load_tokenizer
from .tokens import TokenIds
from .vision import VisionEncoder, build_vision

__all__ = [
    "Flamingo",
    "MediaModel",
    "MediaOutput",
    "TokenIds",
    "VisionEncoder",
    "build_language",
    "build_vision",
    "load_tokenizer",
]
