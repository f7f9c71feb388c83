"""Tiny models of nine of transformers' families, each with its processor, tokenizer and chat template, in a folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests import families

LETTERS = ["\n", *map(chr, range(32, 127))]
SPECIAL = {
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<image>",
    "video_token": "<video>",
}
ROLES = ["<user>", "<assistant>", "<end>", "<vision>", "</vision>", "<fake_token_around_image>", "<global-img>"]
LLAMA4 = ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<NAME>{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }}{% endif %}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
).replace("<NAME>", "{% if m.role == 'user' %}<user>{% else %}<assistant>{% endif %}")
"""A template as most are: roles, no mark of what is generated."""

SIDE = {"height": 28, "width": 28}
PINPOINTS = [[28, 28], [56, 28]]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter."""
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *SPECIAL.values(), *ROLES, *LLAMA4, *LETTERS]
    vocabulary: dict[str, int] = {}
    for token in tokens:
        vocabulary.setdefault(token, len(vocabulary))
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=SPECIAL | {f"own_{i}": token for i, token in enumerate(ROLES + LLAMA4)},
    )


def _config(family: str, ids: dict[str, int]) -> dict[str, Any]:
    """The keys of the family's config.json: those of families.yaml, with this tokenizer's ids."""
    config = copy.deepcopy(families.FAMILIES[family].config)
    config["text_config"] |= {"bos_token_id": 2, "eos_token_id": 3, "max_position_embeddings": 512}
    config |= {"image_token_id": ids["<image>"], "image_token_index": ids["<image>"]}
    if family == "llava":
        config["image_seq_length"] = 4
    if family == "gemma3":
        config |= {"boi_token_index": ids["<boi>"], "eoi_token_index": ids["<eoi>"]}
    if family == "llama4":
        config["image_token_index"] = config["image_token_id"] = ids["<|patch|>"]
    if family == "paligemma":
        config["text_config"]["vocab_size"] = 1500  # the processor adds 1,152 tokens
    for key, token in {"video": "<video>", "vision_start": "<vision>", "vision_end": "</vision>"}.items():
        if f"{key}_token_id" in config:
            config[f"{key}_token_id"] = ids[token]
    return config


def _processor(family: str, words: PreTrainedTokenizerFast) -> transformers.ProcessorMixin:
    if family == "llava":
        pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=SIDE)
        return transformers.LlavaProcessor(
            pictures, words, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
    if family == "qwen2_5_vl":
        pictures = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
        return transformers.Qwen2_5_VLProcessor(pictures, words, transformers.Qwen2VLVideoProcessor())
    if family == "qwen3_vl":
        size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
        pictures = transformers.Qwen2VLImageProcessor(size=size, patch_size=16)
        return transformers.Qwen3VLProcessor(pictures, words, transformers.Qwen3VLVideoProcessor())
    if family == "llama4":
        return transformers.Llama4Processor(transformers.Llama4ImageProcessor(size=SIDE, max_patches=2), words)
    if family == "gemma3":
        return transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(size=SIDE), words, image_seq_length=4)
    if family == "idefics3":
        edge = {"longest_edge": 28}
        pictures = transformers.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size=edge)
        return transformers.Idefics3Processor(pictures, words, image_seq_len=1)
    if family == "mllama":
        return transformers.MllamaProcessor(transformers.MllamaImageProcessor(size=SIDE, max_image_tiles=2), words)
    if family == "paligemma":
        pictures = transformers.SiglipImageProcessor(size=SIDE)
        pictures.image_seq_length = 4
        return transformers.PaliGemmaProcessor(pictures, words)
    assert family == "llava_onevision", family
    pictures = transformers.LlavaOnevisionImageProcessor(size=SIDE, image_grid_pinpoints=PINPOINTS)
    videos = transformers.LlavaOnevisionVideoProcessor(size=SIDE)
    return transformers.LlavaOnevisionProcessor(
        pictures, words, videos, num_image_tokens=4, vision_feature_select_strategy="full"
    )


IMAGES = {"gemma3": "<boi>", "llama4": "<|image|>"} | dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl"), "<vision><image></vision>"
)
FAMILIES = "llava qwen2_5_vl qwen3_vl gemma3 idefics3 mllama paligemma llava_onevision".split()


def save_vlm(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a family's tiny random model and its processor into a folder, as `save_pretrained` does."""
    words = tokenizer()
    ids = words.get_vocab()
    config = transformers.AutoConfig.for_model(family, **_config(family, ids))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = [3, ids["<end>"]]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor = _processor(family, words)
    processor.chat_template = CHAT.replace("IMAGE", IMAGES.get(family, "<image>"))
    processor.save_pretrained(folder)
    return folder
