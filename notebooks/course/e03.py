"""Checks of 03_frozen_parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from .checks import exercise, number, unanswered


@exercise("03.flow")
def flow(said: Mapping[str, object]) -> str | None:
    """Only what lies above something trainable has grad flow."""
    encoder = said["a layer of the vision encoder"]
    decoder = said["the last decoder layer of the language model"]
    embedding = said["the frozen token embedding, at the very start"]
    if hint := unanswered(said):
        return hint
    if encoder:
        return "Is there anything trainable before the vision encoder? Backward stops at the first thing that trains."
    if not decoder:
        return (
            "The last decoder layer comes after trainable cross-attention: backward goes through it to get there, "
            "though it is frozen itself."
        )
    if embedding:
        return "The token embedding comes first of all. Is there anything trainable before it?"
    return None


@functools.cache
def _mixed_units() -> frozenset[str]:
    """Plan the lesson's model once, however many answers are checked; return the names of the mixed units."""
    from mmfsdp import FSDPParams, make_plan

    from .lessons import small_flamingo

    model, example = small_flamingo()
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "FlamingoLayer"}
    plan = make_plan(model, FSDPParams(backend="FSDP1", **layers), world_size=2, example=example)
    return frozenset(unit.name for unit in plan.units if unit.kind == "mixed")


@exercise("03.mixed")
def mixed(names: Sequence[str]) -> str | None:
    """The units of one FlamingoLayer that has cross-attention, and the root."""
    want = _mixed_units()
    names = names if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        return "Give a list of names, such as [unit.name for unit in bad_plan.units if ...]."
    extra, missing = set(names) - want, want - set(names)
    if extra:
        return f"{sorted(extra)[0]!r} is not mixed: look at its `kind`."
    if missing:
        return f"{len(missing)} more of them, such as {sorted(missing)[0]!r}: some parameters frozen and some not."
    return None


@exercise("03.floor")
def floor(shard: float, keep: float, replicate: float) -> str | None:
    """The three formulas."""
    g, fe, fb, t = 7 / 8, 0.3, 7.0, 0.2
    all_parts = "That counts all eight parts: a rank need not send itself its own part, so take (W-1)/W."
    rows = [
        ("SHARD", shard, g * (2 * fe + 4 * fb + 8 * t), g * (4 * fe + 4 * fb + 8 * t)),
        ("KEEP", keep, g * (2 * fe + 2 * fb + 6 * t), g * (2 * fe + 2 * fb + 8 * t)),
        ("REPLICATE", replicate, g * 6 * t, g * 8 * t),
    ]
    slips = [
        "That gathers the encoder in backward as well, and no gradient passes through it.",
        "Trainable units are kept as well here: one all-gather of 2 bytes and one reduction of 4, so 6 T.",
        "That is DDP's 8 T. With the trainable weights kept, it is one all-gather (2) and one reduction (4) for each.",
    ]
    for (name, given, right, slip), why in zip(rows, slips, strict=True):
        near = {
            slip: why,
            right / g: all_parts,
            right * 1e9: "Right in bytes; gigabytes are asked.",
        }
        hint = number(given, right, near, "the table, with F and T in billions, which gives gigabytes.")
        if hint:
            return f"{name}: {hint}"
    return None


@exercise("03.mend")
def mend(fields: dict[str, Any]) -> str | None:
    """No finding, at most 6 GiB at rest, less than a fifth of the bytes."""
    from mmfsdp import FSDPParams, estimate, make_plan
    from mmfsdp.params import FrozenPolicy, ParamError

    from .lessons import frozen

    model = frozen("clip_llama_1b")
    first = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "FlamingoLayer"}
    before = estimate(make_plan(model, FSDPParams(**first, frozen_dtype="bf16"), world_size=8)).wire_bytes
    try:
        plan = make_plan(model, FSDPParams(**fields), world_size=8)
    except (ParamError, TypeError, ValueError) as error:
        return str(error)
    cost = estimate(plan)
    held = (cost.memory.parameters + cost.memory.gradients + cost.memory.optimizer) / 2**30
    what = f"That holds {held:.2f} GiB at rest and sends {cost.wire_bytes / before:.2f} of the bytes. "
    if held > 6:
        return what + "Too much to hold: are the trainable weights and their optimizer states sharded?"
    if cost.wire_bytes >= before / 5:
        if any(unit.frozen_policy not in (None, FrozenPolicy.REPLICATE) for unit in plan.units):
            return (
                what + "Weights that never change need not be sent: there is a frozen policy that sends none of them."
            )
        if any(unit.kind == "mixed" for unit in plan.units):
            return what + "A mixed unit is sent whole. Which `auto_wrap_policy` keeps frozen and trainable apart?"
        return what + "No frozen weight is sent any more. In which dtype, and how often, are the trainable ones sent?"
    if plan.lint:
        return f"{what}The lint still says: {plan.lint[0].message}"
    return None
