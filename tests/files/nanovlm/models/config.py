"""Sizes of the stand-in for nanoVLM."""

from dataclasses import dataclass


@dataclass
class VLMConfig:
    """The fields of nanoVLM's configuration that the page's script reads, small."""

    vit_img_size: int = 16
    vit_patch_size: int = 8
    vit_hidden_dim: int = 16
    vit_n_blocks: int = 2
    lm_hidden_dim: int = 32
    lm_n_blocks: int = 2
    lm_vocab_size: int = 48
    lm_max_length: int = 12
