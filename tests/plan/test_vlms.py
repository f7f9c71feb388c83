"""transformers' vision-language models as they are: planned with an example whose numbers their forward reads, and what
real ranks send and hold is what was planned."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.planner import make_plan
from mmfsdp.estimate import estimate
from mmfsdp.params import FSDPParams, TrainParams
from tests.bench.peaks import measure
from tests.ranks import on_ranks

IMAGE, LENGTH = 150, 24
LANGUAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = LANGUAGE | {"image_size": 28, "patch_size": 14}
LANGUAGE |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200, "pad_token_id": 0}
LANGUAGE |= {"bos_token_id": 1, "eos_token_id": 2}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
QWEN_TOKENS = {"video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
QWEN_TOKENS |= {"image_token_id": IMAGE}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])
PICTURES = torch.ones(2, 3, 28, 28)
TILES = {"pixel_values": torch.ones(2, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28], [28, 28]])}
MASKED = {"pixel_values": PICTURES[:, None], "pixel_attention_mask": torch.ones(2, 1, 28, 28, dtype=torch.bool)}


def llama(kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **LANGUAGE, **more}


def siglip(kind: str = "siglip_vision_model", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **VISION, **more}


@dataclass(frozen=True)
class Family:
    """A tiny model of one of transformers' architectures."""

    config: dict[str, Any]
    media: dict[str, torch.Tensor]
    tokens: int
    """Image tokens of a sample."""
    trains: str = "projector"
    """Part of the names of what trains."""


FAMILIES = {
    "Llava": Family(
        {"vision_config": siglip("clip_vision_model", projection_dim=32), "text_config": llama()},
        {"pixel_values": PICTURES},
        4,
    ),
    "LlavaOnevision": Family(
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
    "Qwen2VL": Family(
        {
            "text_config": llama("qwen2_vl_text", **ROPE),
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
            **QWEN_TOKENS,
        },
        {"pixel_values": torch.ones(32, 1176), "image_grid_thw": GRID},
        4,
        "merger",
    ),
    "Qwen2_5_VL": Family(
        {
            "text_config": llama("qwen2_5_vl_text", **ROPE),
            "vision_config": QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 56},
            **QWEN_TOKENS,
        },
        {"pixel_values": torch.ones(32, 1176), "image_grid_thw": GRID},
        4,
        "merger",
    ),
    "Qwen3VL": Family(
        {
            "text_config": llama("qwen3_vl_text", **ROPE),
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            **QWEN_TOKENS,
        },
        {"pixel_values": torch.ones(32, 1536), "image_grid_thw": GRID},
        4,
        "merger",
    ),
    "SmolVLM": Family({"vision_config": VISION, "text_config": llama(), "scale_factor": 2}, MASKED, 1, "connector"),
    "Idefics2": Family(
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
    "Gemma3": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("gemma3_text", sliding_window=8),
            "mm_tokens_per_image": 4,
        },
        {"pixel_values": PICTURES, "token_type_ids": (torch.arange(LENGTH) < 4).long().repeat(2, 1)},
        4,
    ),
    "PaliGemma": Family(
        {
            "vision_config": siglip(vision_use_head=False),
            "text_config": llama("gemma"),
            "projection_dim": 32,
            "hidden_size": 32,
        },
        {"pixel_values": PICTURES, "token_type_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
        4,
    ),
    "InternVL": Family(
        {
            "vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
            "text_config": llama("qwen2"),
            "downsample_ratio": 0.5,
        },
        {"pixel_values": PICTURES},
        1,
    ),
    "Mllama": Family(
        {
            "vision_config": VISION
            | {"num_global_layers": 1, "attention_heads": 4, "max_num_tiles": 2, "vision_output_dim": 96}
            | {"intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
            "text_config": llama("mllama_text_model", cross_attention_layers=[1], num_hidden_layers=3),
        },
        {
            "pixel_values": torch.ones(2, 1, 2, 3, 28, 28),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, LENGTH, 1, 2, dtype=torch.long),
        },
        1,
    ),
}


def build(name: str) -> torch.nn.Module:
    """The family's model, of which the projector trains."""
    family = FAMILIES[name]
    config_class = getattr(transformers, f"{name}Config")
    image = {key: IMAGE for key in ("image_token_id", "image_token_index")}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config_class(**image | family.config))
    for parameter_name, p in model.named_parameters():
        p.requires_grad_(family.trains in parameter_name)
    return model


class Inputs:
    """A batch as `train_step` takes it: the mapping that transformers' processors return."""

    source, weight, size, label_tokens = "data", 1.0, 2, 2 * (LENGTH - 1)

    def __init__(self, name: str):
        ids = torch.arange(3, 3 + 2 * LENGTH).view(2, LENGTH)
        ids[:, : FAMILIES[name].tokens] = IMAGE
        self.mapping = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if "Qwen" in name:
            self.mapping["mm_token_type_ids"] = (ids == IMAGE).long()
        for key, tensor in FAMILIES[name].media.items():
            self.mapping[key] = tensor.clone()

    def to(self, device: torch.device) -> "Inputs":
        return self

    def inputs(self) -> dict[str, Any]:
        return self.mapping


POLICIES = {name: ("SHARD", "KEEP", "REPLICATE")[i % 3] for i, name in enumerate(FAMILIES)}
CONV3D = {"Qwen2_5_VL", "Qwen3VL"}
"""Their peak is in a Conv3d, which takes memory of its own on CPUs that no plan predicts."""


def measured(plans: dict[str, str]) -> dict[str, Any]:
    """What this rank sends and holds, by family."""
    rows = {}
    for name, text in plans.items():
        rows[name] = measure(lambda name=name: (build(name), [Inputs(name)]), WrapPlan.from_json(text))
    return rows


def test_real_ranks_send_and_hold_what_was_planned_with_an_example():
    plans = {}
    for name, policy in POLICIES.items():
        model = build(name)
        plan = make_plan(model, FSDPParams(frozen_policy=policy), world_size=2, example=Inputs(name).inputs())
        plan.check()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert plan.flops and trained == {p.name for p in plan.params if p.trainable}, name
        plans[name] = plan
    by_rank = on_ranks(measured, 2, {n: p.to_json() for n, p in plans.items()}, backend="one_thread_gloo")
    for name, plan in plans.items():
        cost = estimate(plan, TrainParams(device="cpu"))
        wire = sorted((w.kind, w.phase, w.count, w.bytes, w.wire_bytes) for w in cost.wire)
        for rows in by_rank:
            row = rows[name]
            assert [tuple(w) for w in row["wire"]] == wire, name
            assert row["parameters"] == cost.memory.parameters, name
            assert cost.peak_bytes <= 1.02 * row["peak"], name
            assert name in CONV3D or cost.peak_bytes >= 0.98 * row["peak"], name
