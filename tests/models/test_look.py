"""Attention over patches is what the layers themselves compute with, and nothing stays behind."""

import pytest
import torch

from mmfsdp.kit.models.attention_view import attention_weights, looking_layers, picture_attention
from mmfsdp.kit.models.perceiver import attend
from tests.models.test_multimodal import batch
from tests.models.test_multimodal import build as build_multimodal
from tests.tiny import KNOWN, tiny_batch, tiny_flamingo


def test_the_weights_are_those_that_attend_weighs_with():
    query, both, mask = torch.randn(2, 5, 12), torch.randn(2, 7, 24), torch.rand(2, 1, 5, 7) > 0.3
    mask[..., 0] = True
    weights = attention_weights(query, both[..., :12], heads=3, mask=mask)
    values = both[..., 12:].unflatten(-1, (3, 4)).transpose(1, 2)
    by_hand = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(by_hand, attend(query, both, heads=3, mask=mask))


def test_a_flamingo_looks_at_the_picture_that_was_announced_and_at_nothing_before():
    model, inputs = tiny_flamingo().eval(), tiny_batch()
    assert looking_layers(model) == [1]
    ids = torch.cat((torch.full((2, 1), 3), inputs.input_ids), dim=1)
    ids[:, 5] = KNOWN + 1  # the second picture
    media = {"vision": torch.randn(2, 2, 1, 3, 16, 16)}
    before = model(ids, media=media).logits
    look = picture_attention(model, ids, media=media, layer=1)
    assert look.shape == (2, 10, 2, 4)
    sums = look.sum(-1)
    assert not sums[:, 0].any(), "before the first picture there is nothing to see"
    torch.testing.assert_close(sums[:, 1:5], torch.tensor([1.0, 0.0]).expand(2, 4, 2))
    torch.testing.assert_close(sums[:, 5:], torch.tensor([0.0, 1.0]).expand(2, 5, 2))
    other = {"vision": media["vision"].flip(0)}
    assert not torch.allclose(look, picture_attention(model, ids, media=other, layer=1))
    torch.testing.assert_close(model(ids, media=media).logits, before, rtol=0, atol=0)
    assert not any(m._forward_pre_hooks for m in (model.perceiver, model.layers[1].cross_attention.attn))
    with pytest.raises(ValueError, match=r"layer: 0 does not look at patches; those that do are \[1\]"):
        picture_attention(model, ids, media=media, layer=0)


def test_a_projector_that_keeps_patches_shows_the_language_models_attention(text_only):
    model = build_multimodal(text_only)
    inputs = batch(model)
    before = model.language_model.config._attn_implementation
    look = picture_attention(model, inputs["input_ids"], media=inputs["media"], layer=0)
    patches = model.num_tokens["vision"]
    assert look.shape == (3, inputs["input_ids"].shape[1], 2, patches)
    assert (look[0, 0] == 0).all() and (look[0, 1 + patches :, 0] > 0).all(), "one before the picture, those after it"
    assert (look[0, :, 1] == 0).all() and (look[2] == 0).all(), "pictures that a sample does not have"
    assert (look.sum((2, 3)) <= 1 + 1e-5).all()
    assert model.language_model.config._attn_implementation == before
