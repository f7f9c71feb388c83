"""What the checks of lessons 02 and 03 share: is the part written, did its cell run, and how it compares to torch."""

from __future__ import annotations

import re
from typing import Any

from .checks import saved
from .file_parts import blanks, broken, own_file, own_parts, unfinished_function

VERSION = (
    "Autograd refuses the weight: it counts each change of a tensor that it has saved. Fill the whole parameter "
    "through `piece.whole.data`, which is not counted."
)
FREED = (
    "A rank computed with a parameter whose memory was freed, or is too small. Is the unit gathered before it is used, "
    "in forward and in backward? Is the storage as large as elements times bytes of an element?"
)
SHARD_USED = (
    "A module computed with a shard in place of the whole parameter: `fill` has to place the whole one in the model."
)
DTYPE = (
    "A module got inputs in another dtype than its weights: `before_forward` has to cast the inputs, and to return "
    "them."
)
HOOK = (
    "PyTorch calls a hook with the gradient and nothing else. `partial(before_backward, unit)` makes such a function, "
    "which has the unit too; `before_backward(unit, ...)` calls it at once."
)
KNOWN = {
    "modified by an inplace operation": VERSION,
    "must have the same dtype": DTYPE,
    "expected m1 and m2": DTYPE,
    "shapes cannot be multiplied": SHARD_USED,
    "leaf Variable that requires grad": "Autograd refuses to write to a parameter: write to its `.data`.",
    "out of bounds for storage of size 0": FREED,
    "ended without": FREED,
    "out of bounds for storage of size": "The size of a storage is in bytes: elements times bytes of an element.",
}
"""What a rank's failure says -> the hint."""
KNOWN_OF_PART = {
    "shard_of": {
        "index out of range|not enough values": "Of 2 rows, `chunk` makes 2 parts, and there are 3 ranks: a rank "
        "without a row keeps rows of zeros. Take the rows by their numbers: `tensor[first:last]` may be empty.",
        "broadcast shape|must match the (existing )?size": "The last ranks have fewer rows than the others, or none "
        "at all: copy what there is into the *first* rows of the shard.",
    },
    "refill": {
        "must match the (existing )?size": "The parts have the rows of the padding too, and the whole parameter has "
        "not: copy the first `len(piece.whole)` of them.",
        "inconsistent tensor size": "Do not give the whole parameter other memory: resize the storage that it has, "
        "and copy into it.",
        "name 'module' is not defined": "`piece.owners` has the modules, each with the parameter's name: go through "
        "all of them.",
        "size mismatch, got input": "The whole parameter has lost its shape. Leave the tensor as it is, and resize "
        "its storage to 0.",
    },
    "collectives": {
        "Sizes of tensors must match": "A row is for a rank, and pieces stand side by side in it: concatenate along "
        "`dim=1`.",
        "invalid tensor size": "A collective takes flat tensors here: `by_rank.view(-1)`, and this rank's row.",
    },
    "watch": {
        "has no attribute 'remove'": "In the first step there is no hook yet: remove it only if there is one.",
        "has no attribute 'view_as'": "Not every input is a tensor: make a view of those only for which "
        "`needs_grad(x)`.",
        r"after_backward\(\) missing 1 required": "PyTorch calls a hook with the gradients and nothing else. "
        "`partial(after_backward, unit)` makes such a function, which has the unit too.",
        r"len\(\) of a 0-d tensor|iteration over a 0-d tensor": "`after_backward` wants all gradients, when the last "
        'is there. With `mode="any"` a hook gets the first one alone.',
    },
    "shard": {
        r"cast\(\) missing": "PyTorch calls a pre-hook with the module and its inputs, and with `with_kwargs=True` "
        "with those by keyword, too: register `partial(cast, dtype)` so.",
        "cannot access local variable 'unit'": "The unit is made further down: set `reshard`, which it is given.",
        "list index out of range": "A unit without parameters was made. A replicated module is no unit: return None.",
    },
    "moments": {
        "'Unit' object has no attribute": "`gather`, `reduce` and `release` are functions of your file, which take the "
        "unit: `gather(unit)`.",
        "missing 1 required positional argument: '_'|'NoneType' object is not callable": HOOK,
    },
}
"""What a failure says in a part of the file, as a pattern -> the hint."""


def graded(name: str, part: str, ranks: int = 2) -> list[dict[str, Any]] | str:
    """Return what the ranks of an exercise's cell saved, or the hint that says why there is nothing to check."""
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

    if hint := unwritten(part):
        return hint
    cell = artifacts(name) / "cell.py"
    if cell.is_file() and cell.stat().st_mtime < own_file().stat().st_mtime:
        return f"my_fsdp.py has changed since: run the `%%ranks {ranks} {name}` cell again."
    found = saved(name, ranks)
    if isinstance(found, str):
        return explained(found, part)
    return found


def unwritten(part: str) -> str | None:
    """Return the hint for a part of the file that is not there, not finished, or does not parse."""
    code = own_parts().get(part)
    if code is None:
        return f"my_fsdp.py has no part {part!r} yet: run the cell of this exercise that begins with `%%part`."
    if part in broken:
        return (
            f"The last cell of part {part!r} has a syntax error, so my_fsdp.py is unchanged: mend it, and run it again."
        )
    if lines := blanks(code):
        return (
            f"Not answered yet: put your own code in place of the three dots in `{lines[0]}` of "
            f"`{unfinished_function(code)}`, and run that cell."
        )
    return None


def explained(failure: str, part: str) -> str:
    """Return the hint for what a rank's failure says in a part of the file; the failure itself if there is none."""
    error = failure.partition("Error: ")[2]
    for pattern, hint in KNOWN_OF_PART.get(part, {}).items():
        if re.search(pattern, error):
            return hint
    for words, hint in KNOWN.items():
        if words in failure:
            return hint
    return failure


def beside_torch(ranks: list[dict[str, Any]]) -> str | None:
    """Return the hint for a run of `prove`: losses, bytes sent, bytes held and the peak, beside torch's."""
    import torch

    mine, theirs = ranks[0]["mine"], ranks[0]["theirs"]
    if not torch.allclose(mine["losses"][:1], theirs["losses"][:1], rtol=1e-5):
        return (
            f"The loss of step 0 is {mine['losses'][0]:.5f}, and torch's is {theirs['losses'][0]:.5f}. Nothing is "
            "trained yet, so forward computed with other weights."
        )
    if hint := _gradient(mine["gradient"] / theirs["gradient"], len(ranks)):
        return hint
    if mine["held"]:
        return (
            f"After backward {mine['held']:,} bytes of whole parameters are still there: `after_backward` has to "
            "release the unit, and it must be called for each unit that was gathered in backward."
        )
    backward = "all-gather, backward"
    if mine["stale"] and mine["sent"].get(backward, 0) < theirs["sent"].get(backward, 0):
        return (
            f"{backward}: {mine['sent'].get(backward, 0):,} bytes sent, and torch sends {theirs['sent'][backward]:,}. "
            "Units stay gathered after forward: `after_forward` has to release a unit that reshards."
        )
    if mine["stale"]:
        return (
            "After an evaluation no backward comes, so nobody frees the unit: the next forward has the old weights. "
            "Release it also if no output needs a gradient."
        )
    if mine["rest"] > theirs["rest"]:
        return (
            f"Between steps the parameters of a rank hold {mine['rest']:,} bytes, and torch's {theirs['rest']:,}: a "
            "shard is a view of the whole parameter, whose memory stays. `shard_of` (step 1) has to copy its rows into "
            "memory of their own."
        )
    if hint := _sent(mine["sent"], theirs["sent"]) or _calls(mine["calls"], theirs["calls"]):
        return hint
    if not torch.allclose(mine["losses"], theirs["losses"], rtol=1e-5):
        return "The first step is right, and a later one is not: what is left over from one step to the next?"
    if mine["peak"] > 1.15 * theirs["peak"]:
        return (
            f"The peak is {mine['peak'] / theirs['peak']:.2f} times torch's: units stay gathered for too long. The "
            "gradient of a tensor is complete when backward has left *all* modules that read it: wait for a view that "
            "only this module reads, `x.view_as(x)`, and hand it on to the module."
        )
    return None


def _gradient(factor: float, world: int) -> str | None:
    """Return the hint for a first gradient that is so many times torch's."""
    if abs(factor - 1) < 1e-3:
        return None
    if factor < 1e-6:
        return (
            "The shards have no gradient: `after_backward` has to reduce the gradients of a unit that trains. (If it "
            "does: is the graph cut? A view keeps the inputs in it, and `detach` does not.)"
        )
    if abs(factor - world) < 1e-2:
        return f"Your gradient is {world} times torch's: it is the sum over the ranks. Each step is too long."
    if abs(factor - 1 / world) < 1e-2:
        return f"Your gradient is 1/{world} of torch's: is it divided by the number of ranks twice?"
    return f"The norm of your first gradient is {factor:.3f} times torch's. Some parameters get another gradient."


def _sent(mine: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Return the hint for bytes of a step, by collective and phase, that differ from torch's."""
    for name in sorted({*mine, *theirs}):
        sent, torchs = mine.get(name, 0), theirs.get(name, 0)
        if sent == torchs:
            continue
        head = f"{name}: {sent:,} bytes sent, and torch sends {torchs:,}. "
        if name == "reduce-scatter, backward" and sent > torchs:
            return head + "A hook of the step before is still there, and reduces once more: remove it."
        if name == "all-gather, backward" and sent > torchs:
            return (
                head + "A unit is gathered again in backward that need not be. Is one released that does not reshard?"
            )
        if name == "all-gather, forward" and sent < torchs:
            return (
                f"{head}In a later step some units are still gathered from the step before, with old weights. Who "
                "frees them after backward: is the hook of the step before removed, and a new one made in each step?"
            )
        if name == "all-gather, backward":
            return head + "Units stay gathered from forward to backward: `after_forward` has to release them."
        return head + "Count which units are gathered and reduced, and how often."
    return None


def _calls(mine: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Return the hint for more collectives than torch's, for the same bytes."""
    for name in sorted(mine):
        if mine[name] > theirs.get(name, 0):
            return (
                f"{name}: {mine[name]} collectives in a step, and torch needs {theirs.get(name, 0)} for the same "
                "bytes: one for all parameters of a unit. Each has a fixed cost."
            )
    return None


def predicted_as_measured(
    predicted: dict[str, int], measured: dict[str, int], *, world: int, frozen: bool = False
) -> str | None:
    """Return the hint for bytes of a step that were predicted otherwise than measured on so many ranks; frozen: some
    units are."""
    for name in sorted({*measured, *predicted}):
        got, sent = predicted.get(name, 0), measured.get(name, 0)
        if got == sent:
            continue
        head = f"{name}: you predict {got:,} bytes, and {sent:,} are sent. "
        if not got:
            return head + "Add what each unit sends there, if it does."
        if got * (world - 1) == sent * world:
            return head + "A rank need not send its own part to itself: (W-1)/W of the whole."
        if got * (world - 1) == sent:
            return f"{head}That is one shard. A rank sends {world - 1} times as much: W-1 of the W parts of the whole."
        if name == "all-gather, backward" and got > sent:
            passes = ", and through which does backward not pass" if frozen else ""
            return f"{head}Which units are not released after forward{passes}?"
        if name == "reduce-scatter, backward" and got > sent:
            return head + "Only a unit that trains is reduced."
        return head + "The whole is W times the elements of a shard, padding included, times the bytes of one."
    return None


def other_dtype(predicted: dict[str, int], measured: dict[str, int]) -> str | None:
    """Return the hint for bytes of another dtype, where whole parameters are in bf16 and shards in fp32: twice as many
    or half of what is measured."""
    for name in sorted(measured):
        got, sent = predicted.get(name, 0), measured[name]
        if got != sent and got in (2 * sent, sent / 2):
            return (
                f"With whole parameters in bf16, {name}: you predict {got:,} bytes, and {sent:,} are sent. Weights "
                "travel in the dtype of `piece.whole`, gradients in that of `piece.shard`."
            )
    return None
