"""Patch tokens from the towers of both libraries."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmfsdp.kit.models import build_vision
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.params import BackboneParams, ParamError
from tests.models.test_multimodal import TOWERS, VIT


@pytest.mark.parametrize("tower", TOWERS)
def test_towers_give_patch_tokens(tower):
    params = TOWERS[tower]
    encoder = build_vision(params).eval()
    assert (encoder.num_tokens, encoder.dim) == (4, 24)
    pixels = torch.randn(3, 3, encoder.image_size, encoder.image_size)
    with torch.no_grad():
        out = encoder(pixels)
    assert out.shape == (3, 4, 24) and out.isfinite().all()
    assert all(p.device.type == "cpu" for p in encoder.parameters())  # the probe left no trace

    meta = build_vision(params, meta=True)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}
    assert {p.device.type for p in [*meta.parameters(), *meta.buffers()]} == {"meta"}


def test_a_layer_that_a_tower_lacks_is_named_with_those_that_it_has():
    params = TOWERS["CLIP"].change(feature_layer=9)
    layers = params.config["num_hidden_layers"]
    with pytest.raises(ParamError, match=f"^vision.feature_layer: 9 .* choose {-layers - 1} to {layers}$"):
        build_vision(params, meta=True)


def test_class_tokens_are_left_out():
    """A patch token follows its own patch more than any other; a class token would shift them all by one."""
    for tower in ("open_clip ViT", "CLIP", "ViT"):
        torch.manual_seed(0)
        encoder = build_vision(TOWERS[tower]).eval()
        pixels = torch.randn(1, 3, 16, 16)
        other = pixels.clone()
        other[..., 8:16, :8] += 3  # row 1, column 0 of a 2 x 2 grid
        with torch.no_grad():
            change = (encoder(other) - encoder(pixels)).norm(dim=-1)[0]
        assert change.argmax() == 2


def test_normalization_belongs_to_the_model():
    siglip = build_vision(TOWERS["SigLIP"], meta=True)
    assert siglip.mean == siglip.std == (0.5, 0.5, 0.5)
    own = {**VIT, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}}
    assert build_vision(BackboneParams(source="open_clip", config=own)).mean == (0.1, 0.2, 0.3)


def test_mistakes_name_the_field_and_near_names():
    with pytest.raises(ParamError, match="vision.name: open_clip has no 'ViT-B-33'; did you mean ViT-B-32"):
        build_vision(BackboneParams(source="open_clip", name="ViT-B-33"))
    with pytest.raises(ParamError, match="vision.config: .*needs embed_dim and vision_cfg"):
        build_vision(BackboneParams(source="open_clip", config={"vision_cfg": {}}))
    with pytest.raises(
        ParamError, match="vision.name: ModifiedResNet of open_clip returns no patch tokens; choose a ViT"
    ):
        build_vision(BackboneParams(source="open_clip", name="RN50"), meta=True)
    with pytest.raises(ParamError, match="vision.config: .*unexpected keyword argument 'depth'"):
        build_vision(BackboneParams(source="open_clip", config={"embed_dim": 8, "vision_cfg": {"depth": 1}}))
    with pytest.raises(ParamError, match="vision.config.hiden_size: no such field; did you mean hidden_size"):
        build_vision(BackboneParams(config={"model_type": "vit", "hiden_size": 8}))
    with pytest.raises(ParamError, match="vision.config: .*names no model_type"):
        build_vision(BackboneParams(config={"hidden_size": 8}))


def test_a_frozen_vit_copies_no_weights_for_its_tokens_in_bf16():
    config = {"embed_dim": 16, "vision_cfg": {**VIT["vision_cfg"], "width": 96}}
    encoder = build_vision(BackboneParams(source="open_clip", config=config))
    encoder = (
        encoder.to(torch.bfloat16).requires_grad_(False).train()
    )  # as in a step; in eval mode torch has its own way
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)
    with cpu_memory() as memory:
        encoder(pixels)
    assert 0 < memory.peak < sum(p.nbytes for p in encoder.parameters())


def test_a_frozen_vit_counts_the_operations_of_its_attention():
    """In eval mode, as frozen encoders are."""
    counts = []
    for training in (True, False):
        encoder = build_vision(BackboneParams(source="open_clip", config=VIT)).requires_grad_(False).train(training)
        with FlopCounterMode(display=False) as counted:
            encoder(torch.randn(2, 3, 16, 16))
        counts.append(counted.get_total_flops())
    assert counts[0] == counts[1] > 0
