"""Checks of 03_frozen_parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from .checks import exercise, unanswered
from .grades import DTYPE, beside_torch, graded, other_dtype, predicted_as_measured
from .small_units import hint_for_small_units


@exercise("03.flow")
def flow(said: Mapping[str, object]) -> str | None:
    """Only what lies above something trainable has grad flow."""
    encoder = said["a layer of the vision encoder"]
    decoder = said["the last decoder layer of the language model"]
    embedding = said["the frozen token embedding, at the very start"]
    if hint := unanswered(said):
        return hint
    if encoder:
        return (
            "Is there anything trainable before the vision encoder? Backward goes no further back than the "
            "earliest thing that trains."
        )
    if not decoder:
        return (
            "The last decoder layer comes after trainable cross-attention: backward goes through it to get there, "
            "though it is frozen itself."
        )
    if embedding:
        return "The token embedding comes first of all. Is there anything trainable before it?"
    return None


@exercise("03.backward")
def backward() -> str | None:
    """As mmfsdp: losses, bytes, what is held, the peak."""
    found = graded("03.backward", "watch")
    if isinstance(found, str):
        return next((hint for words, hint in FAILED.items() if words in found), found)
    small = found[0]["small"]
    if small["keyword"]["held"] and not small["two modules"]["held"]:
        return (
            "A module that is called with a keyword, as the layers of transformers are (`layer(hidden_states=x)`), is "
            "never freed: its inputs are in `kwargs`. Wait for the inputs in both, and give both their views."
        )
    return beside_torch(found) or hint_for_small_units(small)


FAILED = {
    "expand(torch.": "The gradient of an input was taken for that of a parameter. `grads` begins with the parameters' "
    "gradients only if the unit trains: put the whole parameters first in `last`, and let `after_backward` (lesson 02) "
    "reduce only if `unit.trains`.",
    "Expected gradient function to be set": "You wait for a frozen parameter. It never gets a gradient: wait for "
    "parameters only if `unit.trains`.",
}
"""What a rank's failure says in 03.backward -> the hint."""


@exercise("03.policies")
def policies() -> str | None:
    """The same losses for each policy, the bytes of the plan, and two refusals."""
    import torch

    found = graded("03.policies", "shard")
    if isinstance(found, str):
        return REPLICATED_DTYPE if _replicated_unlike(found) else found
    values = found[0]
    if not values["refused"][0]:
        return "A projector that trains was replicated: raise ValueError, since nobody would average its gradients."
    if not values["refused"][1]:
        return "A unit of both kinds was made: raise ValueError if frozen and trainable parameters are left in it."
    if not values["taken"]:
        return "An outer unit would take the replicated parameters once more: mark each of them, `p.taken = True`."
    if values["uncast"]:
        return "Two modules were replicated together, in bf16, and one of them does not cast its inputs: each needs it."
    for policy in ("SHARD", "KEEP", "REPLICATE"):
        run = values[policy]
        if not torch.allclose(run["losses"], values["SHARD"]["losses"], rtol=1e-2):
            return f"{policy}: the losses differ from those of SHARD. A policy must not change what is computed."
        for name in sorted({*run["sent"], *run["planned"]}):
            sent, planned = run["sent"].get(name, 0), run["planned"].get(name, 0)
            if sent != planned:
                return f"{policy}: {name}: {sent:,} bytes sent, and the plan says {planned:,}. {WHY[policy]}"
        if run["held"]:
            return f"{policy}: after backward {run['held']:,} bytes of whole parameters are still there."
    return None


def _replicated_unlike(failure: str) -> bool:
    """Return True if the cell came as far as REPLICATE, and failed by the dtype."""
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

    if failure != DTYPE:
        return False
    return "KEEP " in (artifacts("03.policies") / "0.log").read_text(errors="replace")  # it has run: it has failed


REPLICATED_DTYPE = (
    "REPLICATE: weights and inputs differ in dtype. In `shard`, put the data of each parameter into `dtype`, and give "
    "each module a pre-hook `partial(cast, dtype)` with `with_kwargs=True`."
)
WHY = {
    "SHARD": "The argument `reshard` says whether a unit is released after forward.",
    "KEEP": "A unit that is kept does not reshard after forward, so backward need not gather it.",
    "REPLICATE": "Nothing that is replicated is gathered.",
}


@exercise("03.predict")
def predict() -> str | None:
    """The bytes that were measured, for SHARD in fp32, and for KEEP and REPLICATE in bf16."""
    found = graded("03.predict", "predict", 3)
    if isinstance(found, str):
        return found
    for policy in ("SHARD", "KEEP", "REPLICATE"):
        bytes_sent = found[0][policy]
        in_bf16 = policy != "SHARD"
        hint = other_dtype(**bytes_sent) if in_bf16 else None
        hint = hint or predicted_as_measured(**bytes_sent, world=len(found), frozen=True)
        if hint:
            return f"{policy}: {hint}"
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
    if not names:
        return 'Your list is empty: kinds are written in small letters, `"mixed"`.'
    extra, missing = set(names) - want, want - set(names)
    if extra:
        return f"{sorted(extra)[0]!r} is not mixed: look at its `kind`."
    if missing:
        return f"{len(missing)} more of them, such as {sorted(missing)[0]!r}: some parameters frozen and some not."
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
