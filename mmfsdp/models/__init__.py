"""Multimodal models: backbones of open_clip and transformers, and what is trained between them."""

from .audio import AudioEncoder, build_audio
from .base import MediaModel, MediaOutput
from .flamingo import Flamingo
from .language import build_language, load_tokenizer
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import TokenIds, kept_tokens
from .vision import VisionEncoder, build_vision
from .weights import Weights, origins

__all__ = [
    "AudioEncoder",
    "Flamingo",
    "MediaModel",
    "MediaOutput",
    "ModalEncoder",
    "MultimodalModel",
    "TokenIds",
    "VisionEncoder",
    "Weights",
    "build_audio",
    "build_language",
    "build_vision",
    "kept_tokens",
    "load_tokenizer",
    "origins",
]
