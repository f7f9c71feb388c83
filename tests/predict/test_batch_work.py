"""FLOPs of batches of any length and pictures, of three models, beside those counted by hand from their layers.

Each formula below is of the forward: 2 FLOPs for each weight and row in a product, and 4 L M H d for attention of L
queries over M keys, of H heads of width d. A product whose weight trains costs 3 times its forward in a step, a frozen
one that backward passes through 2 times, attention, which has no weights, 3 times, and what comes before all that
trains once.
"""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, Qwen2VLConfig

from mmfsdp import FSDPParams, make_plan
from mmfsdp.core.freeze import freeze
from mmfsdp.core.step_batch import LOSS_POSITIONS, loss_positions
from mmfsdp.core.token_loss import computes_loss_in_head
from mmfsdp.kit.models import Flamingo, ModalEncoder, MultimodalModel, TokenIds, build_language, build_vision
from mmfsdp.kit.models.from_transformers import spell_out_parts
from mmfsdp.kit.models.loss_in_head import loss_in_head
from mmfsdp.params import BackboneParams, ModelParams
from mmfsdp.predict.batch_work import BatchSizes, BatchWork

FROZEN, PASSED, TRAINED = 1, 2, 3
"""Times that a product is computed in a step: forward; and for its input's gradient; and for its weight's."""
E, HIDDEN, LAYERS, HEADS, VOCABULARY = 96, 256, 4, 4, 500
"""Of the language models: their width is E, that of a head is E / HEADS."""
D, PATCH, SIDE, VISION_LAYERS = 64, 8, 40, 3
"""Of the vision encoders, whose pictures have P patches."""
P = (SIDE // PATCH) ** 2
LANGUAGE = {
    "model_type": "llama",
    "hidden_size": E,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "vocab_size": VOCABULARY,
}
SIZES = [(2, 64, 1), (3, 64, 1), (2, 23, 1), (5, 200, 1), (2, 64, 3), (3, 150, 4)]
"""Texts, their length, and pictures of each. The first are those of the plan's example."""


def decoder(length, *, weights, attention, key_values=HEADS // 2):
    """Return the FLOPs of a text in all decoder layers and the head; weights, attention: how often computed."""
    projections = 2 * length * (E * E + 2 * E * (E // HEADS * key_values) + E * E)  # query; key and value; output
    gated = 3 * 2 * length * E * HIDDEN
    scores = 4 * length * length * E
    return LAYERS * (weights * (projections + gated) + attention * scores) + weights * 2 * length * E * VOCABULARY


def encoder(tokens, *, width=D, layers=VISION_LAYERS, ratio=4, channels=3 * PATCH * PATCH, patches=P):
    """Return the FLOPs of a picture in a frozen vision encoder: the patches, then the layers with their attention."""
    layer = 2 * tokens * width * (4 * width + 2 * ratio * width) + 4 * tokens * tokens * width
    return 2 * patches * channels * width + layers * layer


def flamingo_by_hand(rows, length, pictures):
    """Return the FLOPs of a step of `flamingo`."""
    inner, latents = 2 * 16, 8
    # The tower has a class token, and projects the picture's mean to embed_dim.
    vision = encoder(P + 1) + 2 * D * 32
    keys = P + latents
    resampler = 2 * latents * D * inner + 2 * keys * D * 2 * inner + 2 * latents * inner * D
    resampler += 4 * latents * keys * inner + 2 * latents * 8 * D * D
    media = pictures * latents
    cross = 2 * length * E * inner + 2 * media * D * 2 * inner + 2 * length * inner * E
    cross += 4 * length * media * inner + 2 * length * 8 * E * E
    # Two of the four layers have cross-attention. The new tokens' rows train, so backward passes through every layer.
    new_rows = TRAINED * 2 * length * E * 3
    text = decoder(length, weights=PASSED, attention=TRAINED) + TRAINED * 2 * cross + new_rows
    return rows * (pictures * (FROZEN * vision + TRAINED * 2 * resampler) + text)


def flamingo():
    """Return a Flamingo, frozen as by default."""
    tower = {"image_size": SIDE, "patch_size": PATCH, "width": D, "layers": VISION_LAYERS, "head_width": 16}
    config = {"embed_dim": 32, "vision_cfg": tower, "quick_gelu": False}
    vision = build_vision(BackboneParams(source="open_clip", config=config), meta=True)
    language = build_language(BackboneParams(config=LANGUAGE), meta=True)
    sizes = {"num_latents": 8, "perceiver_depth": 2, "attention_heads": 2, "attention_head_dim": 16}
    model = Flamingo(vision, language, tokens=TokenIds.after(VOCABULARY), cross_attention_every=2, **sizes)
    freeze(model, ModelParams(language=BackboneParams(name="x")).frozen_patterns)
    return model


def llava_by_hand(rows, length, pictures):
    """Return the FLOPs of a step of `llava`: its pictures' tokens are among the text's."""
    projector = PASSED * 2 * P * D * E + TRAINED * 2 * P * E * E  # nothing before the first matrix trains
    text = decoder(length, weights=TRAINED, attention=TRAINED)
    return rows * (pictures * (FROZEN * encoder(P + 1) + projector) + text)


def llava():
    """Return a model as LLaVA's in its second stage, in which projector and language model train."""
    config = {
        "model_type": "clip_vision_model",
        "hidden_size": D,
        "intermediate_size": 4 * D,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    vision = build_vision(BackboneParams(config=config), meta=True)
    model = MultimodalModel(
        {"vision": ModalEncoder(vision)}, build_language(BackboneParams(config=LANGUAGE), meta=True)
    )
    freeze(model, ("encoders.*",))
    return model


def with_pictures(rows, length, pictures):
    """Return a batch of the two models above."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    media = {"vision": torch.empty(rows, pictures, 1, 3, SIDE, SIDE, device="meta")}
    return {"input_ids": ids, "labels": ids, "media": media}


GRID = 6
"""Patches along the side of a Qwen2-VL's picture; it merges 2 x 2 of them to one token."""
TEMPORAL = 2
"""Frames of which it makes one."""


def qwen_by_hand(rows, length, pictures):
    """Return the FLOPs of a step of `qwen`, in which the merger trains."""
    patches, merged = GRID * GRID, 4 * D
    vision = encoder(patches, ratio=2, channels=3 * TEMPORAL * PATCH * PATCH, patches=patches)
    # The merger's norm trains, too, so backward passes through its first matrix.
    merger = 2 * (patches // 4) * merged * (merged + E)
    text = decoder(length, weights=PASSED, attention=TRAINED)
    return rows * (pictures * (FROZEN * vision + TRAINED * merger) + text)


def qwen():
    """Return a Qwen2-VL of transformers, frozen but for its merger."""
    text = {**LANGUAGE, "model_type": "qwen2_vl_text", "rope_parameters": ROPE, "max_position_embeddings": 512}
    vision = {"depth": VISION_LAYERS, "embed_dim": D, "hidden_size": E, "num_heads": 4, "mlp_ratio": 2}
    vision |= {"patch_size": PATCH, "temporal_patch_size": TEMPORAL, "spatial_merge_size": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=IMAGE - 1
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    freeze(model, spell_out_parts(model, ("*", "!projector")))
    return model


ROPE = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0}
IMAGE = 490


def with_patches(rows, length, pictures):
    """Return a batch of `qwen`. It reads values: where pictures are, and how many patches each has."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    for first in range(0, 10 * pictures, 10):
        ids[:, first : first + GRID * GRID // 4] = IMAGE
    grid = torch.tensor([[1, GRID, GRID]] * (rows * pictures))
    pixels = torch.empty(rows * pictures * GRID * GRID, 3 * TEMPORAL * PATCH * PATCH)
    kinds = (ids == IMAGE).long()
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


MODELS = {
    "a Flamingo": (flamingo, with_pictures, flamingo_by_hand),
    "a LLaVA": (llava, with_pictures, llava_by_hand),
    "a Qwen2-VL of transformers": (qwen, with_patches, qwen_by_hand),
}


@pytest.fixture(scope="module", params=MODELS)
def counted(request):
    """Return (how to make a batch, FLOPs by hand, BatchWork, model, plan) of a model."""
    build, batch, by_hand = MODELS[request.param]
    model, example = build(), batch(*SIZES[0])
    assert loss_in_head(model) == ""
    plan = make_plan(model, FSDP, world_size=2, example=example)
    return batch, by_hand, BatchWork.of(model, plan, example), model, plan


FSDP = FSDPParams(mixed_precision="bf16", activation_checkpointing="all")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_needed_flops_of_any_batch_are_those_counted_by_hand(counted, sizes):
    batch, by_hand, work, *_ = counted
    assert work.flops(batch(*sizes)).needed == pytest.approx(by_hand(*sizes), rel=0.01)


def test_what_a_batch_executes_is_what_a_plan_made_with_it_counts(counted):
    batch, _, work, model, _ = counted
    other = batch(3, 150, 2)
    plan = make_plan(model, FSDP, world_size=2, example=other)
    flops = work.flops(other)
    assert flops.needed == pytest.approx(plan.flops, rel=0.01)
    assert flops.executed == pytest.approx(plan.hardware_flops, rel=0.01) and flops.executed > 1.1 * flops.needed


def test_a_head_that_computes_the_loss_works_only_where_there_is_one(counted):
    batch, _, work, model, _ = counted
    whole = batch(3, 150, 2)
    assert computes_loss_in_head(model)
    answers = torch.zeros(3, 150, dtype=torch.long).masked_fill(torch.arange(150) < 110, -100)  # prompts and pictures
    some = {**whole, LOSS_POSITIONS: loss_positions(answers)}
    plan = make_plan(model, FSDP, world_size=2, example=some)
    assert work.flops(some).needed == pytest.approx(plan.flops, rel=0.01)
    head = model.get_output_embeddings()
    table = getattr(head, "table", head).weight
    of_a_position = (TRAINED if table.requires_grad else PASSED) * 2 * E * VOCABULARY
    # 40 positions of each text predict a label, 120 in all, and the head computes whole pieces of 128.
    saved = work.flops(whole).needed - work.flops(some).needed
    assert saved == pytest.approx((450 - 128) * of_a_position, rel=0.01)


def test_6n_counts_each_parameter_for_each_position_of_the_text(counted):
    batch, _, work, model, _ = counted
    parameters = sum(p.numel() for p in model.parameters())
    assert work.flops_6n(batch(3, 150, 4)) == 6 * parameters * 3 * 150


def test_it_travels_as_json(counted):
    batch, _, work, *_ = counted
    received = BatchWork.from_dict(json.loads(json.dumps(work.to_dict())))
    assert received == work and received.flops(batch(3, 150, 4)) == work.flops(batch(3, 150, 4))


class Table(nn.Module):
    """A model whose table of positions ends."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 8), nn.Parameter(torch.zeros(20, 8))

    def forward(self, input_ids, labels):
        logits = (self.words(input_ids) + self.positions[: input_ids.shape[1]]) @ self.words.weight.T
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_where_longer_texts_cannot_be_traced_only_batches_of_the_examples_sizes_are_counted():
    model, ids = Table(), torch.zeros(2, 20, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    plan = make_plan(model, world_size=2, example=example)
    work = BatchWork.of(model, plan, example)
    assert work.flops(example).needed == plan.flops > 0
    assert work.flops({"input_ids": ids[:, :9], "labels": ids[:, :9]}) is None


def test_inputs_that_are_no_text_have_no_sizes():
    ids = torch.zeros(2, 9, dtype=torch.long)
    assert BatchSizes.of({"input_ids": ids, "labels": ids[:, :3]}) is None, "an encoder and a decoder"
    assert BatchSizes.of({"pixel_values": torch.zeros(2, 3, 8, 8)}) is None
    assert BatchSizes.of({"input_ids": ids, "labels": ids[:, 0]}) == (2, 9, 0, 18), "a class of each text"
