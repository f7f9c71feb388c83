"""Multimodal models: backbones of open_clip and transformers, and the trained modules between them."""

from .backbones import build_language
from .base import MediaModel
from .encoders import VisionEncoder, build_vision
from .flamingo import Flamingo
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import TokenIds
