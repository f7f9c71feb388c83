"""What text may see, and the pieces that carry it."""

import torch

from mmfsdp.kit.models.cross_attention import GatedCrossAttention, media_bias, media_mask
from mmfsdp.kit.models.perceiver import PerceiverResampler

TIME = torch.tensor([[0, 1, 1, 2, 3]])


def test_text_sees_the_latest_picture_only_or_all_preceding():
    latest = media_mask(TIME, pictures=2, latents=2, attend_all=False)[0, 0].int().tolist()
    assert latest == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    preceding = media_mask(TIME, pictures=2, latents=2, attend_all=True)[0, 0].int().tolist()
    assert preceding == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_token_that_sees_no_picture_gets_nothing_and_no_nan():
    layer = GatedCrossAttention(12, media_dim=6, heads=2, head_dim=4)
    layer.attn_gate.data.fill_(0.5)
    text, media = torch.randn(1, 5, 12, requires_grad=True), torch.randn(1, 4, 6)
    nothing = torch.zeros(1, 1, 5, 4, dtype=torch.bool)
    out = layer(text, media, nothing)
    assert torch.equal(out, text) and torch.equal(layer(text, None, None), text)
    out.sum().backward()
    assert text.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_what_a_model_makes_of_the_mask_once_gives_what_each_layer_makes_of_it():
    torch.manual_seed(0)
    layer = GatedCrossAttention(12, media_dim=6, heads=2, head_dim=4)
    layer.attn_gate.data.fill_(0.5)
    text, media = torch.randn(1, 5, 12), torch.randn(1, 4, 6)
    mask = media_mask(TIME, pictures=2, latents=2, attend_all=False)  # the first and the last token see nothing
    once = layer(text, media, media_bias(mask, media.dtype))
    assert torch.equal(once, layer(text, media, mask)) and not torch.equal(
        once[:, 1:4], layer(text, None, None)[:, 1:4]
    )
    # The bias is what torch makes of booleans by itself.
    queries, keys = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 4, 4)
    seen = mask | ~mask.any(-1, keepdim=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    by_bias = attention(queries, keys, keys, attn_mask=media_bias(mask, media.dtype).bias)
    assert torch.equal(by_bias, attention(queries, keys, keys, attn_mask=seen))


def test_the_perceiver_sees_each_picture_by_itself():
    torch.manual_seed(0)
    features = torch.randn(2, 3, 2, 4, 8)  # 3 pictures of 2 frames of 4 patches
    plain = PerceiverResampler(8, num_latents=5, depth=2, heads=2, head_dim=4)
    out = plain(features)
    assert out.shape == (2, 3, 5, 8)
    torch.testing.assert_close(plain(features.flip(2)), out)
    torch.testing.assert_close(plain(features.flip(1)), out.flip(1))
