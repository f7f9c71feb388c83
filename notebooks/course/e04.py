"""Checks of 04_build_a_flamingo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from .checks import exercise


@exercise("04.cross")
def cross(module: Callable[..., Any]) -> str | None:
    """Closed gates change nothing; opened, it is the package's attention, without NaN in gradients."""
    import torch

    from mmfsdp.kit.models.cross_attention import MaskedCrossAttention

    if not isinstance(module, type):
        return "Give the class itself: `check('04.cross', GatedCross)`."
    torch.manual_seed(0)
    mine, theirs = module(32, 24, 4, 8), MaskedCrossAttention(32, media_dim=24, heads=4, head_dim=8)
    if not isinstance(mine.gate, torch.nn.Parameter) or mine.gate.numel() != 1 or mine.gate.item():
        return "`self.gate` should be a parameter of one element, and 0 at first: only parameters are trained."
    text, media = torch.randn(2, 5, 32), torch.randn(2, 6, 24)
    mask = torch.zeros(2, 1, 5, 6, dtype=torch.bool)
    mask[:, :, 1:3, :3] = mask[:, :, 3:, 3:] = True  # the first token attends to nothing
    found = mine(text, media, mask)
    if found is None:
        return "`forward` returns nothing yet."
    if found.shape != text.shape:
        return f"The output has the shape {tuple(found.shape)}, and the text {tuple(text.shape)}."
    nan = "There is a NaN in the output or in a gradient: a softmax over minus infinity alone. Fill with -1e9."
    if found.isnan().any():
        return nan
    if not torch.equal(found, text):
        return "With a gate of 0 the output should be exactly the text: add to it the attention times tanh(gate)."
    for name, p in theirs.named_parameters():
        p.data.copy_(mine.get_parameter(name).data)
    mine.gate.data.fill_(0.5)
    right = text + theirs(text, media, mask) * torch.tensor(0.5).tanh()
    found = mine(text, media, mask)
    found.square().sum().backward()
    if any(p.grad is None or p.grad.isnan().any() for p in mine.parameters()):
        return nan
    if torch.allclose(found, right, atol=1e-5):
        return None
    return _difference(found, right, text)


def _difference(found: Any, right: Any, text: Any) -> str:
    """Return the hint for an output with an open gate that differs from the package's."""
    import torch

    if torch.allclose(found[:, 1:], right[:, 1:], atol=1e-5):
        return "The token before the first picture should get nothing: multiply its row by 0."
    scale = ((found - text)[:, 1:] / (right - text)[:, 1:]).mean().item()
    if torch.allclose((found - text)[:, 1:], scale * (right - text)[:, 1:], atol=1e-5):
        return f"Your attention is {scale:.2f} times the package's: is the gate tanh(g)?"
    return (
        "Opened by half, the output differs from the package's. Are the queries of the normed text, the scores divided "
        "by the root of d, the softmax over the media tokens, masked ones left out, and keys first in `to_kv`?"
    )


@exercise("04.mask")
def mask(function: Callable[..., Any]) -> str | None:
    """As the package's mask, for texts of several forms."""
    import torch

    from mmfsdp.kit.models.cross_attention import media_mask

    if not callable(function):
        return "A function is wanted here, not what it returns."
    for text, pictures in (([5, 0, 6, 7, 0, 8, 9], 2), ([0, 0, 4], 3), ([3, 2, 0], 1), ([8, 9], 1)):
        ids = torch.tensor(text)
        found = function(ids, 0, pictures)
        if found is None:
            return "It returns nothing yet."
        found = torch.as_tensor(found)
        if found.shape != (len(ids), pictures):
            return f"{len(ids)} tokens and {pictures} pictures: the mask has the shape {tuple(found.shape)}."
        announced = (ids == 0).cumsum(0)
        want = media_mask(announced[None], pictures=pictures, latents=1, attend_all=False)[0, 0]
        if torch.equal(found.bool(), want):
            continue
        if torch.equal(found.bool(), media_mask(announced[None], pictures=pictures, latents=1, attend_all=True)[0, 0]):
            return "That is the other rule (`cross_attend_all`), all pictures so far. Here a token attends to the last."
        if torch.equal(found[1:].bool(), want[:-1]):
            return "The token `<image>` itself announces its picture: from it on, that one is attended to."
        wrong = next(i for i in range(len(ids)) if not torch.equal(found[i].bool(), want[i]))
        return f"ids {text}, where 0 is `<image>`: token {wrong + 1} should have {want[wrong].int().tolist()}."
    return None


TRAINS = {
    "LLaVA, stage 1": ("projectors",),
    "LLaVA, stage 2": ("projectors", "language_model"),
    "Qwen-VL, stage 1": ("encoders", "projectors"),
}


@cache
def _projector_model() -> Any:
    """Return the lesson's projector model."""
    from .lessons import small_projector_model

    return small_projector_model()[0]


@exercise("04.frozen")
def frozen(recipes: Mapping[str, Sequence[str]]) -> str | None:
    """The parts that train are those of the table."""
    from mmfsdp import freeze
    from mmfsdp.params import ParamError

    model = _projector_model()
    for name, want in TRAINS.items():
        patterns = recipes[name]
        if patterns is ...:
            return f"{name} is not filled in yet."
        if isinstance(patterns, str):
            return f"{name}: a list of patterns, such as [{patterns!r}]."
        model.requires_grad_(True)
        try:
            trains = {path.partition(".")[0] for path in freeze(model, list(patterns)).trainable}
        except ParamError as error:
            return f"{name}: {error}"
        if extra := sorted(trains - set(want)):
            return f"{name}: `{extra[0]}` trains, and should be frozen."
        if missing := sorted(set(want) - trains):
            return f"{name}: `{missing[0]}` is frozen, and should train."
    return None


@exercise("04.overfit")
def overfit(losses: Sequence[float]) -> str | None:
    """Below 0.1 after 40 steps."""
    if len(losses) == 0:
        return "No losses yet: write the loop, and append `loss.item()` in each step."
    if len(losses) != 40:
        return f"There are {len(losses)} losses; 40 steps are asked for."
    first, last = float(losses[0]), float(losses[-1])
    if last < 0.1:
        return None
    what = f"From {first:.2f} to {last:.2f}. "
    if last != last or last > first * 0.9 and max(losses) > first * 1.2:
        return what + "The loss jumps: the steps are too long. Try a tenth of this rate."
    if abs(last - first) < 1e-3:
        return what + "Nothing is learned: are there `backward()` and `step()`, and which parameters has the optimizer?"
    return (
        what + "The loss falls, but too slowly for 40 steps: try a larger rate; and is the gradient zeroed each time?"
    )
