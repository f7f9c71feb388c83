"""Decoder layers are found by structure, and arguments reach them."""

import pytest
import torch
from torch import nn

from mmfsdp.kit.models.flamingo import decoder_layers, extra_arguments, passes_to_layers
from mmfsdp.params import ParamError

NAMES = {
    "llama": "model.layers",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "gpt2": "transformer.h",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "mpt": "transformer.blocks",
}


def test_layers_are_found(family, text_only):
    name, layers = decoder_layers(text_only(family))
    assert name == NAMES[family] and len(layers) == 4


def test_layers_can_be_named(text_only):
    model = text_only("llama")
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(
        ParamError, match=r"one list of 4 layers.* found 2; its lists are model.layers \(4\), extra \(4\)"
    ):
        decoder_layers(model)
    assert decoder_layers(model, "model.layers") == ("model.layers", model.model.layers)
    with pytest.raises(ParamError, match="'model.layer' is not a list of layers.*did you mean model.layers"):
        decoder_layers(model, "model.layer")
    with pytest.raises(ParamError, match="'lm_head' is not a list of layers"):
        decoder_layers(model, "lm_head")


def test_arguments_are_handed_down_or_added_for_the_call(family, text_only):
    model = text_only(family)
    _, layers = decoder_layers(model)
    with layers[1].register_forward_pre_hook(lambda *_: pytest.fail("the first layer has told it")):
        assert passes_to_layers(model, layers[0], media=None) == (family != "mpt")
    got = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: got.append(kwargs.pop("media", None)), with_kwargs=True)
    media = object()
    before = [len(layer._forward_pre_hooks) for layer in layers]
    try:
        with extra_arguments(layers, media=media):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [len(layer._forward_pre_hooks) for layer in layers] == before
    model(torch.tensor([[4, 5]]))
    assert got == [None] * 4
