"""Checks of 09_multimodal_any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .checks import exercise


@exercise("09.freeze")
def patterns(given: Sequence[str]) -> str | None:
    """Only the audio's projector trains."""
    from mmfsdp import freeze
    from mmfsdp.params import ParamError

    from .senses import senses

    if isinstance(given, str):
        return f"A list of patterns, such as [{given!r}, ...]."
    model, _ = senses(meta=True)
    try:
        trains = freeze(model, list(given)).trainable
    except ParamError as error:
        return str(error)
    for part, words in {
        "encoders.": "An encoder trains: both are pretrained, and stay frozen.",
        "language_model.": "The language model trains: it is to stay frozen, too.",
        "projectors.vision.": "The picture's projector trains, too. `projectors.*` are two: `vision` and `audio`.",
    }.items():
        if any(name.startswith(part) for name in trains):
            return f"{words} ({sum(name.startswith(part) for name in trains)} of its parameters, to be exact.)"
    return None if trains else "Nothing trains now: the audio's projector should."


@exercise("09.lora")
def lora(module: Callable[..., Any]) -> str | None:
    """At first the frozen layer; then with the product of both; only those two train."""
    import torch

    if not isinstance(module, type):
        return "Give the class itself: `check('09.lora', LoRA)`."
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(128, 256), torch.randn(3, 5, 128)
    before = linear(x).detach()
    layer: Any = module(linear, 8, 16.0)
    for name, shape in (("A", (8, 128)), ("B", (256, 8))):
        p = getattr(layer, name, None)
        if not isinstance(p, torch.nn.Parameter):
            return f"`self.{name}` should be an `nn.Parameter`: only parameters are trained."
        if p.shape != shape:
            return f"From 128 features to 256, with r = 8: {name} should have the shape {shape}, not {tuple(p.shape)}."
    found = layer(x)
    if found is None:
        return "`forward` returns nothing yet."
    if found.shape != before.shape or not torch.equal(found.detach(), before):
        return "At first nothing should change: B begins with zeros, and is multiplied with A."
    layer.B.data.normal_()
    found = layer(x)
    beside = x @ layer.A.T @ layer.B.T
    if torch.allclose(found, before + beside, atol=1e-3):
        return "The scale is missing: alpha / r."
    if not torch.allclose(found, before + 2 * beside, atol=1e-3):
        return (
            "With other numbers in B, x W should get alpha / r times x A B beside it (transposed as they have to be)."
        )
    found.square().sum().backward()
    if any(p.grad is None for p in (layer.A, layer.B)) or any(p.grad is not None for p in linear.parameters()):
        return "A and B should get gradients, and the linear layer none."
    return None


TEXTS = (
    "there <image> red <|endofchunk|> <image> blue <|endofchunk|>",
    "<image> a cat <|endofchunk|> and more <image> dogs",
    "no picture <|endofchunk|> at all",
)


@exercise("09.labels")
def labels(learned: Callable[[list[str]], Any]) -> str | None:
    """Text after a picture, up to the end of its chunk."""
    if not callable(learned):
        return "A function is wanted here, not what it returns."
    for text in TEXTS:
        tokens = text.split()
        found = learned(list(tokens))
        if found is None:
            return "It returns nothing yet."
        if len(found) != len(tokens):
            return f"One True or False for each of the {len(tokens)} tokens, not {len(found)}."
        said, learning = [bool(each) for each in found], False
        for i, token in enumerate(tokens):
            learning = learning or token == "<image>"
            if said[i] != (learning and token != "<image>"):
                return f"{text}: {_why(token, tokens[:i])}"
            learning = learning and token != "<|endofchunk|>"
    return None


def _why(token: str, before: list[str]) -> str:
    """Return the hint for a token that is labelled wrongly."""
    if token == "<image>":
        return "the model does not predict where a picture stands: no loss on `<image>`."
    if "<image>" not in before:
        return f"{token!r} comes before the first picture, and so is about none: no loss there."
    if token == "<|endofchunk|>":
        return "the model must learn when to stop: `<|endofchunk|>` carries loss."
    return f"{token!r}, token {len(before) + 1}: is it said of a picture?"
