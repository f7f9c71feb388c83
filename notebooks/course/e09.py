"""Checks of 09_multimodal_any."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .checks import exercise, number


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
def lora(count: float) -> str | None:
    """8 x (128 + 256)."""
    near = {
        8 * 128 * 256: "The two matrices are thin: 128 x 8 and 8 x 256. What is multiplied are matrices, not counts.",
        128 * 256: "That is the frozen matrix itself.",
        8 * 128: "That is the first of the two matrices; the second goes back up to 256.",
        8 * 256: "That is the second of the two matrices; the first comes down from 128.",
        128 + 256: "That would be rank 1.",
    }
    return number(count, 8 * (128 + 256), near, "what the matrices 128 x rank and rank x 256 have together.")


@exercise("09.labels")
def labels(tokens: Sequence[str], learned: Sequence[bool]) -> str | None:
    """Text after a picture, up to the end of its chunk."""
    if isinstance(learned, str) or len(learned) != len(tokens):
        return f"One True or False for each of the {len(tokens)} tokens."
    want, learning = [], False
    for token in tokens:
        learning = learning or token == "<image>"
        want.append(learning and token != "<image>")
        learning = learning and token != "<|endofchunk|>"
    first = tokens.index("<image>")
    if any(learned[:first]):
        return "Before the first picture no text is about a picture: no loss there."
    if any(bool(a) for a, token in zip(learned, tokens, strict=True) if token == "<image>"):
        return "The model does not predict where a picture stands: no loss on `<image>`."
    if not all(a for a, token in zip(learned, tokens, strict=True) if token == "<|endofchunk|>"):
        return "The model must learn when to stop: `<|endofchunk|>` carries loss."
    wrong = next((i for i, (a, b) in enumerate(zip(learned, want, strict=True)) if bool(a) != b), None)
    return None if wrong is None else f"Token {wrong + 1}, {tokens[wrong]!r}: is it said of a picture?"


@exercise("09.prompt")
def prompt(given: str, said: str) -> str | None:
    """Two pictures named by their shape, the third to be named."""
    if not isinstance(given, str):
        return "A string: pictures as `<image>`, words, and `<|endofchunk|>` after each example."
    if given.count("<image>") != 3:
        return f"{given.count('<image>')} times `<image>`; there are three pictures."
    if not given.rstrip().endswith("<image>"):
        return "Leave the last picture's word to the model: the prompt ends with its `<image>`."
    shots = re.findall(r"<image>\s*(.*?)\s*<\|endofchunk\|>", given)
    if len(shots) != 2:
        return "Each example ends with `<|endofchunk|>`, as the documents of the training did."
    if any(len(shot.split()) != 1 for shot in shots):
        return f"One word after each picture, as in the training: not {max(shots, key=len)!r}."
    if [shot.rstrip("s") for shot in shots] == ["red", "black"]:
        return "Those examples show colors, so the model goes on with a color. It is the shape that is wanted."
    if shots != ["circles", "hearts"]:
        return f"The words after the first two pictures are {shots}: look at what they show (`gallery` has it)."
    return None if said == "stars" else f"The examples are right; but this model said {said!r}: train it for longer."
