"""A small stand-in for nanoVLM's model: the same modules by the same names, called in the same order."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Vision(nn.Module):
    """Pictures (B, 3, H, W) to patches (B, P, D)."""

    def __init__(self, cfg):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, cfg.vit_hidden_dim, cfg.vit_patch_size, stride=cfg.vit_patch_size)
        self.blocks = nn.ModuleList(layer(cfg.vit_hidden_dim) for _ in range(cfg.vit_n_blocks))
        self.layer_norm = nn.LayerNorm(cfg.vit_hidden_dim)

    def forward(self, image):
        x = self.patch_embedding(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.layer_norm(x)


class Projector(nn.Module):
    """Patches (B, P, D) to tokens (B, P, E)."""

    def __init__(self, cfg):
        super().__init__()
        self.proj = nn.Linear(cfg.vit_hidden_dim, cfg.lm_hidden_dim, bias=False)

    def forward(self, x):
        return self.proj(x)


class Decoder(nn.Module):
    """Embedded tokens (B, L, E) to hidden states; embedding and head are tied, and called from outside."""

    def __init__(self, cfg):
        super().__init__()
        self.token_embedding = nn.Embedding(cfg.lm_vocab_size, cfg.lm_hidden_dim)
        self.blocks = nn.ModuleList(layer(cfg.lm_hidden_dim) for _ in range(cfg.lm_n_blocks))
        self.norm = nn.LayerNorm(cfg.lm_hidden_dim)
        self.head = nn.Linear(cfg.lm_hidden_dim, cfg.lm_vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight

    def forward(self, x, attention_mask=None):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=causal)
        return self.norm(x), None


class VisionLanguageModel(nn.Module):
    """The pictures' tokens stand before the text's."""

    def __init__(self, cfg, load_backbone=True):
        super().__init__()
        self.vision_encoder, self.decoder, self.MP = Vision(cfg), Decoder(cfg), Projector(cfg)

    def forward(self, input_ids, image, attention_mask=None, targets=None):
        pictures = self.MP(self.vision_encoder(image))
        hidden, _ = self.decoder(torch.cat((pictures, self.decoder.token_embedding(input_ids)), dim=1))
        logits = self.decoder.head(hidden)[:, pictures.shape[1] :]
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def layer(width):
    """Return a transformer's layer without dropout."""
    return nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
