"""Checks of 04_build_a_flamingo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .checks import exercise, number, unanswered


@exercise("04.perceiver")
def perceiver(shape: Sequence[int]) -> str | None:
    """(batch, pictures, latents, width)."""
    if tuple(shape) == (2, 3, 64, 1024):
        return None
    if len(shape) == 5 or 4 in shape or 12 in shape:
        return "The latents look at all frames of a picture at once: there is no dimension of frames any more."
    if 256 in shape or 1024 * 4 in shape:
        return (
            "Patches are what goes in. What comes out is one vector for each latent, and a picture has 64 latents, "
            "however many frames and patches it has."
        )
    if len(shape) != 4:
        return "Four dimensions: batch, pictures of a sample, latents of a picture, width."
    if sorted(shape) != [2, 3, 64, 1024]:
        strange = next(size for size in shape if size not in (2, 3, 64, 1024))
        return f"Where is the {strange} from? A latent has the width of a patch token, and there are 64 in a picture."
    return "Order: batch, pictures of a sample, latents of a picture, width (which stays that of the encoder)."


@exercise("04.gate")
def gate(moves: Mapping[str, object]) -> str | None:
    """Only the gates."""
    gates, weights = moves["the gates"], moves["the cross-attention's weights"]
    resampler = moves["the perceiver"]
    if hint := unanswered(moves):
        return hint
    if not gates:
        return "The derivative of tanh(g) at 0 is 1, so a gate gets a gradient although it is 0."
    if weights:
        return (
            "The attention's output is multiplied by tanh(0) = 0, and so is the gradient of all that comes before it."
        )
    if resampler:
        return "The perceiver gets its gradient through the cross-attention only, behind a gate that is 0."
    return None


@exercise("04.mask")
def mask(pairs: Sequence[Sequence[object]]) -> str | None:
    """Each token sees the picture announced last."""
    want = [(0, 0), (1, 0), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]
    if any(value is ... for pair in pairs for value in pair):
        return "Write the seven pairs out, with 0 and 1 (or False and True)."
    given = [tuple(int(bool(v)) for v in pair) for pair in pairs]
    if given == want:
        return None
    if len(given) != 7 or any(len(pair) != 2 for pair in given):
        return "Seven tokens, two pictures: seven pairs."
    if given[0] != (0, 0):
        return "Before the first `<image>` there is no picture to see, so 'the' sees none."
    if given[4:] == [(1, 1)] * 3:
        return "That is the other rule (`cross_attend_all`), all pictures so far. Here only the last one is seen."
    if given[1] == (0, 0) or given[4] == (1, 0):
        return "The token `<image>` itself announces its picture: from it on, that one is seen."
    wrong = next(i for i in range(7) if given[i] != want[i])
    return f"Look at token {wrong + 1} again: which `<image>` stood last before it?"


@exercise("04.overfit")
def overfit(losses: Sequence[float]) -> str | None:
    """Below 0.1 at the end."""
    if len(losses) == 0:
        return "Choose a learning rate first; then run both cells."
    first, last = losses[0], losses[-1]
    if last < 0.1:
        return None
    what = f"From {first:.2f} to {last:.2f}. "
    if last != last or last > first * 0.9 and max(losses) > first * 1.2:
        return what + "The loss jumps: the steps are too long. Try a tenth of this rate."
    return what + "The loss falls, but too slowly for 40 steps: try a larger rate."


@exercise("04.length")
def length(projector: float, flamingo: float) -> str | None:
    """40 + 5 x 256; 40 + 5."""
    first = {40.0: "The patches stand in the sequence, too.", 296.0: "That is with one picture; there are five."}
    second = {
        40.0: "Nearly: each picture has its one `<image>` token.",
        1320.0: "A Flamingo's patches stay outside the text.",
    }
    return number(projector, 1320, first, "the text, and each patch of each picture.", tolerance=0) or number(
        flamingo, 45, second, "the text, and one token for each picture.", tolerance=0
    )
