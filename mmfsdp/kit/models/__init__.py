"""Multimodal models: backbones of open_clip and transformers, and the trained modules between them."""

from .backbones import build_language
from .encoders import VisionEncoder, build_vision
from .flamingo import Flamingo
from .media_model import MediaModel
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import TokenIds
