"""Tiny models of transformers' multimodal architectures, by model type, each with a batch as its processor makes it."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmfsdp.models.build import add_lora

IMAGE, LENGTH = 150, 24
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = TOWER | {"image_size": 28, "patch_size": 14}
LANGUAGE = TOWER | {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200, "pad_token_id": 0}
LANGUAGE |= {"bos_token_id": 1, "eos_token_id": 2}
BERT = TOWER | {"encoder_hidden_size": 32, "vocab_size": 200, "hidden_dropout_prob": 0.0}
BERT |= {"attention_probs_dropout_prob": 0.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GRID_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
GRID_TOKENS = {"video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
GLM_TOKENS = {"image_start_token_id": 152, "image_end_token_id": 153, "video_token_id": 151}
GLM_TOKENS |= {"video_start_token_id": 154, "video_end_token_id": 155}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
HALF_ROPE = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
ROPE = {"rope_parameters": ROPE}


def llama(kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **LANGUAGE, **more}


def siglip(kind: str = "siglip_vision_model", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **VISION, **more}


def pictures(*shape: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(*shape, generator=torch.Generator().manual_seed(0))}


def patches(width: int) -> dict[str, torch.Tensor]:
    """Two pictures of 4 x 4 patches."""
    return {**pictures(32, width), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}


def first_of(tokens: int) -> torch.Tensor:
    return (torch.arange(LENGTH) < tokens).long().repeat(2, 1)


ONE = pictures(2, 3, 28, 28)
SIZES = {"image_sizes": torch.tensor([[28, 28], [28, 28]])}
TILES = {**pictures(2, 2, 3, 28, 28), **SIZES}
MASKED = {**pictures(2, 1, 3, 28, 28), "pixel_attention_mask": torch.ones(2, 1, 28, 28, dtype=torch.bool)}
Q_FORMER = {"vision_config": VISION, "qformer_config": BERT, "num_query_tokens": 4}
Q_FORMER["text_config"] = TOWER | {"model_type": "opt", "ffn_dim": 64, "vocab_size": 200, "word_embed_proj_dim": 32}
Q_FORMER["text_config"] |= {"dropout": 0.0}
VQ = {"embed_dim": 16, "num_embeddings": 16, "latent_channels": 16, "base_channels": 32, "channel_multiplier": [1, 1]}
VQ |= {"num_res_blocks": 1}
IMAGE_WORDS = {f"IMGIMGA{letter}Z": 160 + i for i, letter in enumerate("ABCDEFGHIJ")}
IMAGE_WORDS |= {f"IMGIMGB{letter}Z": 170 + i for i, letter in enumerate("ABCDEF")}
"""Chameleon's names of the 16 entries of its codebook."""


@dataclass(frozen=True)
class Family:
    """A tiny model of one of transformers' architectures."""

    config: dict[str, Any]
    media: dict[str, torch.Tensor]
    tokens: int = 4
    """Image tokens of a sample."""
    trains: str = "projector"
    """Part of the names of what trains."""

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return max(LENGTH, self.tokens + 8)


FAMILIES = {
    "aria": Family(
        {
            "vision_config": siglip("idefics3_vision"),
            "text_config": llama("aria_text", moe_num_experts=4, intermediate_size=16),
            "projector_patch_to_query_dict": {4: 4},
        },
        {**ONE, "pixel_mask": torch.ones(2, 28, 28, dtype=torch.bool)},
    ),
    "aya_vision": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("cohere2", layer_types=["full_attention"] * 2),
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
            "vision_feature_layer": -1,
        },
        ONE,
        1,
    ),
    "blip": Family(
        {"vision_config": VISION, "text_config": BERT | {"bos_token_id": 1, "sep_token_id": 2}},
        ONE,
        0,
        "crossattention",
    ),
    "blip-2": Family(Q_FORMER, ONE, 4, "language_projection"),
    "chameleon": Family(
        LANGUAGE
        | {"vq_config": VQ | {"resolution": 32}, "num_key_value_heads": 4}
        | {
            "vocabulary_map": {
                **{f"IMGIMG{'ABCDEFGHIJ'[i // 10]}{'ABCDEFGHIJ'[i % 10]}Z": i + 160 for i in range(16)},
                "<image>": IMAGE,
            }
        },
        pictures(2, 3, 8, 8),
        16,
        "layers.1",
    ),
    "cohere2_vision": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("cohere2", layer_types=["full_attention"] * 2),
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
        },
        ONE,
        1,
    ),
    "deepseek_vl": Family({"vision_config": siglip(vision_use_head=False), "text_config": llama()}, ONE, 4, "aligner"),
    "deepseek_vl_hybrid": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "high_res_vision_config": {"model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16}
            | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 16, "mlp_dim": 64}
            | {"window_size": 2, "global_attn_indexes": [1]},
            "text_config": llama(),
        },
        {**ONE, "high_res_pixel_values": torch.randn(2, 3, 64, 64)},
        4,
        "aligner",
    ),
    "emu3": Family(
        {
            "vq_config": {"codebook_size": 16, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
            | {"hidden_size": 32, "temporal_downsample_factor": 1},
            "text_config": llama("emu3_text_model", attention_dropout=0.0),
            "vocabulary_map": {**{f"<|visual token {i:06d}|>": i + 20 for i in range(16)}, "<image>": IMAGE}
            | {"<|extra_200|>": 199},
        },
        {**pictures(2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8], [8, 8]])},
        20,
        "layers.1",
    ),
    "ernie4_5_vl_moe": Family(
        {
            "text_config": llama(
                "ernie4_5_vl_moe_text", moe_intermediate_size=[16, 16], moe_num_experts=4, moe_k=2, **ROPE
            ),
            "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4},
            **GLM_TOKENS,
        },
        {**patches(588), "moe_mm_token_type_ids": first_of(4), "mm_token_type_ids": first_of(4)},
        4,
        "resampler",
    ),
    "fast_vlm": Family(
        {
            "vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_t8", "do_pooling": False}
            | {"num_classes": 0, "hidden_size": 768, "model_args": {"inference_mode": True}},
            "text_config": llama("qwen2"),
        },
        pictures(2, 3, 64, 64),
    ),
    "florence2": Family(
        {
            "vision_config": {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1]}
            | {"patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4]}
            | {"window_size": 4, "projection_dim": 32, "drop_path_rate": 0.0},
            "text_config": {"model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
            | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64}
            | {"decoder_ffn_dim": 64, "vocab_size": 200, "dropout": 0.0},
        },
        pictures(2, 3, 32, 32),
        17,
    ),
    "fuyu": Family(
        {"text_config": llama("persimmon", num_key_value_heads=4), "image_size": 28, "patch_size": 14},
        {"image_patches": torch.randn(2, 4, 588), "image_patches_indices": torch.arange(LENGTH).repeat(2, 1)},
        4,
        "vision_embed_tokens",
    ),
    "gemma3": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("gemma3_text", sliding_window=8),
            "mm_tokens_per_image": 4,
        },
        {**ONE, "token_type_ids": first_of(4)},
    ),
    "gemma3n": Family(
        {
            "vision_config": {"architecture": "mobilenetv5_300m_enc"},
            "text_config": llama("gemma3n_text", vocab_size_per_layer_input=140, hidden_size_per_layer_input=8)
            | {"laurel_rank": 8, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2}
            | {"activation_sparsity_pattern": [0.0, 0.0]},
            "audio_config": {"hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1}
            | {"sscp_conv_channel_size": [8, 4], "vocab_offset": 170, "vocab_size": 10},
            "audio_token_id": 171,
        },
        pictures(2, 3, 64, 64),
        256,
        "embed_vision",
    ),
    "gemma4": Family(
        {
            "vision_config": TOWER
            | {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
            | {"pooling_kernel_size": 2, "position_embedding_size": 16},
            "text_config": llama("gemma4_text", vocab_size_per_layer_input=200, hidden_size_per_layer_input=8)
            | {"layer_types": ["sliding_attention", "full_attention"]},
            "audio_config": None,
            **GRID_TOKENS,
            "audio_token_id": 160,
        },
        {
            **pictures(2, 16, 48),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(2, 1, 1),
            "mm_token_type_ids": first_of(4),
        },
        4,
        "embed_vision",
    ),
    "git": Family(BERT | {"vision_config": VISION, "bos_token_id": 1, "eos_token_id": 2}, ONE, 0, "visual_projection"),
    "glm4v": Family(
        {
            "text_config": llama("glm4v_text", **HALF_ROPE),
            "vision_config": GRID_VISION | {"patch_size": 14, "image_size": 56},
            **GLM_TOKENS,
        },
        {**patches(1176), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "glm4v_moe": Family(
        {
            "text_config": llama("glm4v_moe_text", **HALF_ROPE, **EXPERTS, n_routed_experts=4),
            "vision_config": GRID_VISION | {"patch_size": 14, "image_size": 56},
            **GLM_TOKENS,
        },
        {**patches(1176), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "got_ocr2": Family(
        {
            "vision_config": {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "mlp_dim": 64}
            | {"num_attention_heads": 4, "image_size": 64, "patch_size": 16, "window_size": 2}
            | {"global_attn_indexes": [1]},
            "text_config": llama("qwen2"),
        },
        pictures(2, 3, 64, 64),
        1,
    ),
    "idefics": Family(
        {key: value for key, value in LANGUAGE.items() if key not in ("num_key_value_heads", "head_dim")}
        | {"vision_config": VISION | {"embed_dim": 32}, "freeze_text_layers": False, "freeze_vision_layers": False},
        {**pictures(2, 1, 3, 28, 28), "image_attention_mask": torch.ones(2, LENGTH, 1, dtype=torch.long)},
        0,
        "gated_cross_attn_layers",
    ),
    "idefics2": Family(
        {
            "vision_config": VISION,
            "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1}
            | {"resampler_n_heads": 2, "num_key_value_heads": 1, "resampler_head_dim": 16},
            "text_config": llama("mistral"),
        },
        MASKED,
        4,
        "connector",
    ),
    "idefics3": Family({"vision_config": VISION, "text_config": llama(), "scale_factor": 2}, MASKED, 1, "connector"),
    "instructblip": Family(
        Q_FORMER,
        {**ONE, "qformer_input_ids": torch.arange(3, 9).repeat(2, 1)},
        4,
        "language_projection",
    ),
    "internvl": Family(
        {
            "vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
            "text_config": llama("qwen2"),
            "downsample_ratio": 0.5,
        },
        ONE,
        1,
    ),
    "janus": Family(
        {
            "vision_config": VISION | {"projection_dim": 32, "num_image_tokens": 4},
            "text_config": llama(),
            "vq_config": VQ | {"projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4},
        },
        ONE,
        4,
        "model.aligner",
    ),
    "kosmos-2": Family(
        {
            "vision_config": VISION,
            "text_config": {"embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4, "vocab_size": 200}
            | {"dropout": 0.0, "attention_dropout": 0.0},
            "latent_query_num": 4,
        },
        {**ONE, "image_embeds_position_mask": first_of(4)},
        4,
        "image_to_text_projection",
    ),
    "kosmos-2.5": Family(
        {
            "vision_config": TOWER | {"patch_embed_hidden_size": 12, "head_dim": 8, "max_num_patches": 16},
            "text_config": {"embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4, "vocab_size": 200}
            | {"dropout": 0.0},
            "latent_query_num": 4,
        },
        {
            "flattened_patches": torch.ones(2, 16, 14),
            "image_embeds_position_mask": first_of(4),
            "width": torch.ones(2, 1),
            "height": torch.ones(2, 1),
        },
        4,
        "image_to_text_projection",
    ),
    "lfm2_vl": Family(
        {
            "vision_config": TOWER
            | {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16}
            | {"vision_use_head": False},
            "text_config": llama("lfm2", layer_types=["conv", "full_attention"]),
            "projector_hidden_size": 32,
        },
        {
            **pictures(2, 16, 48),
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        },
    ),
    "llama4": Family(
        {
            "vision_config": VISION
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
            | {"intermediate_size": 128},
            "text_config": llama("llama4_text", num_local_experts=2, intermediate_size_mlp=64),
        },
        ONE,
        1,
    ),
    "llava": Family(
        {"vision_config": siglip("clip_vision_model", projection_dim=32), "text_config": llama()},
        ONE,
    ),
    "llava_next": Family(
        {
            "vision_config": siglip("clip_vision_model", projection_dim=32),
            "text_config": llama(),
            "image_grid_pinpoints": [[28, 28], [56, 28]],
        },
        TILES,
        10,
    ),
    "llava_next_video": Family(
        {
            "vision_config": siglip("clip_vision_model", projection_dim=32),
            "text_config": llama(),
            "image_grid_pinpoints": [[28, 28], [56, 28]],
            "video_token_index": 151,
        },
        TILES,
        10,
    ),
    "llava_onevision": Family(
        {
            "vision_config": siglip(),
            "text_config": llama("qwen2"),
            "image_grid_pinpoints": [[28, 28], [56, 28]],
            "video_token_id": 151,
            "video_token_index": 151,
            "vision_feature_layer": -1,
        },
        TILES,
        10,
    ),
    "mistral3": Family(
        {
            "vision_config": siglip("pixtral", head_dim=8, image_size=56),
            "text_config": llama("mistral"),
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        {**pictures(2, 3, 56, 56), "image_sizes": torch.tensor([[56, 56], [56, 56]])},
    ),
    "mllama": Family(
        {
            "vision_config": VISION
            | {"num_global_layers": 1, "attention_heads": 4, "max_num_tiles": 2, "vision_output_dim": 96}
            | {"intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
            "text_config": llama("mllama_text_model", cross_attention_layers=[1], num_hidden_layers=3),
        },
        {
            **pictures(2, 1, 2, 3, 28, 28),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, LENGTH, 1, 2, dtype=torch.long),
        },
        1,
        "cross_attn",
    ),
    "ovis2": Family(
        {
            "vision_config": VISION | {"vocab_size": 16, "num_visual_indicator_tokens": 5},
            "text_config": llama("qwen2"),
            "visual_indicator_token_ids": [160, 161, 162, 163, 164],
            "hidden_size": 32,
            "vocab_size": 200,
        },
        ONE,
        4,
        "visual_embeddings_table",
    ),
    "paligemma": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("gemma"),
            "projection_dim": 32,
            "hidden_size": 32,
        },
        {**ONE, "token_type_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
    ),
    "perception_lm": Family(
        {
            "vision_config": {"model_type": "timm_wrapper", "architecture": "vit_pe_core_tiny_patch16_384"}
            | {"do_pooling": False, "num_classes": 0, "initializer_range": 0.02}
            | {"model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": [32, 32], "global_pool": ""}},
            "text_config": llama(),
            "video_token_id": 151,
        },
        pictures(2, 1, 3, 32, 32),
    ),
    "pix2struct": Family(
        {
            "text_config": {"hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
            | {"vocab_size": 200, "dropout_rate": 0.0, "pad_token_id": 0},
            "vision_config": TOWER | {"d_ff": 64, "d_kv": 8, "patch_embed_hidden_size": 12, "seq_len": 16},
        },
        {"flattened_patches": torch.ones(2, 16, 14)},
        0,
        "encoder_decoder_attention",
    ),
    "qwen2_5_vl": Family(
        {
            "text_config": llama("qwen2_5_vl_text", **ROPE),
            "vision_config": GRID_VISION | {"fullatt_block_indexes": [1], "window_size": 56},
            **GRID_TOKENS,
        },
        {**patches(1176), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "qwen2_vl": Family(
        {
            "text_config": llama("qwen2_vl_text", **ROPE),
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
            **GRID_TOKENS,
        },
        {**patches(1176), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "qwen3_5": Family(
        {
            "text_config": llama("qwen3_5_text", layer_types=["linear_attention", "full_attention"])
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
            | {"linear_num_value_heads": 4}
            | HALF_ROPE,
            "vision_config": GRID_VISION | {"num_position_embeddings": 16},
            **GRID_TOKENS,
        },
        {**patches(1536), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "qwen3_vl": Family(
        {
            "text_config": llama("qwen3_vl_text", **ROPE),
            "vision_config": GRID_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            **GRID_TOKENS,
        },
        {**patches(1536), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "qwen3_vl_moe": Family(
        {
            "text_config": llama("qwen3_vl_moe_text", **ROPE, **EXPERTS, num_experts=4),
            "vision_config": GRID_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            **GRID_TOKENS,
        },
        {**patches(1536), "mm_token_type_ids": first_of(4)},
        4,
        "merger",
    ),
    "smolvlm": Family({"vision_config": VISION, "text_config": llama(), "scale_factor": 2}, MASKED, 1, "connector"),
    "udop": Family(
        {"vocab_size": 200, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "image_size": 28}
        | {"patch_size": 14, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        {**ONE, "bbox": torch.zeros(2, LENGTH, 4)},
        0,
        "EncDecAttention",
    ),
    "video_llava": Family(
        {
            "vision_config": siglip("clip_vision_model", projection_dim=32),
            "text_config": llama(),
            "video_token_index": 151,
        },
        {"pixel_values_images": torch.ones(2, 3, 28, 28)},
    ),
    "vipllava": Family(
        {
            "vision_config": siglip("clip_vision_model", projection_dim=32),
            "text_config": llama(),
            "vision_feature_layers": [-1, -2],
            "vision_feature_layer": [-1, -2],
        },
        ONE,
    ),
    "vision-encoder-decoder": Family(
        {
            "encoder": siglip("vit"),
            "decoder": {"model_type": "trocr", "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
            | {"decoder_ffn_dim": 64, "vocab_size": 200, "cross_attention_hidden_size": 32, "dropout": 0.0}
            | {"is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
        ONE,
        0,
        "encoder_attn",
    ),
}


def build(name: str, *, lora: bool = False, device: str = "cpu") -> nn.Module:
    """Return the family's model, of which the projector trains; with lora, adapters on its language model instead."""
    family = FAMILIES[name]
    image = {key: IMAGE for key in ("image_token_id", "image_token_index")}
    config = CONFIG_MAPPING[name](**image | family.config)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.requires_grad_(False)
        if lora:
            add_lora(model.get_decoder(), rank=4)
        else:
            for parameter_name, p in model.named_parameters():
                if family.trains in parameter_name:
                    p.requires_grad_()
                    if device == "cpu":
                        nn.init.normal_(p, std=0.02)  # some gates and projectors begin as zeros
    return model


class Inputs:
    """A batch of two samples as `train_step` takes it: the mapping that transformers' processors return."""

    source, weight, size = "data", 1.0, 2

    def __init__(self, name: str, seed: int = 0):
        family = FAMILIES[name]
        ids = (3 + 7 * seed + torch.arange(2 * family.length) % 110).view(2, family.length)
        ids[:, : family.tokens] = IMAGE
        labels = ids.masked_fill(ids == IMAGE, -100)
        labels[0, family.length - seed :] = -100  # label tokens of unlike number
        self.mapping = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        for key, tensor in family.media.items():
            if tensor.is_floating_point():
                tensor = tensor + seed / 8
            self.mapping[key] = tensor.clone()

    @property
    def label_tokens(self) -> int:
        return int((self.mapping["labels"][:, 1:] != -100).sum())

    def to(self, device: torch.device) -> "Inputs":
        return self

    def inputs(self) -> dict[str, Any]:
        return dict(self.mapping)
