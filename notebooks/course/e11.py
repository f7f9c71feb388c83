"""Checks of 11_change_the_real_one."""

from __future__ import annotations

from typing import Any

from .checks import exercise, saved

SMALL, LARGE, JUST_BELOW = ("blocks.0", "blocks.2"), "blocks.1", "blocks.3"


def last_name(answer: object) -> str:
    """Return the last name of what was given: free_storage of torch.distributed...free_storage()."""
    if not isinstance(answer, str):
        answer = getattr(answer, "__name__", "")
    return str(answer).strip().partition("(")[0].rpartition(".")[2]


@exercise("11.free")
def free(answer: object) -> str | None:
    """The function that resizes a storage to 0."""
    name = last_name(answer)
    if name == "free_storage":
        return None
    if name == "resize_":
        return "That is what is called on the storage, as in your `free`. In which function of torch does it stand?"
    if name in ("free_unsharded_param", "to_sharded", "reshard", "post_backward", "_to_sharded"):
        return f"`{name}` leads there, and does not do it itself: follow what it calls to the last function."
    return "Search `_fsdp_param.py` for `resize_(0)`, and give the name of the function around it."


@exercise("11.version")
def version(answer: object) -> str | None:
    """The context manager that leaves the version count alone."""
    name = last_name(answer)
    if name == "_unsafe_preserve_version_counter":
        return None
    if name in ("foreach_all_gather_copy_out", "wait_for_unshard"):
        return f"It is used in `{name}`, around the copy. What is the name of the context manager?"
    if name in ("data", "detach", "no_grad"):
        return "That is another way. torch's FSDP writes to the tensor itself, inside of a `with`: which one?"
    return "Search `_fsdp_collectives.py` for `with torch.autograd`: it stands around the copy into the parameters."


@exercise("11.needed")
def needed(answer: object) -> str | None:
    """The call that spares a unit the all-gather of backward."""
    name = last_name(answer)
    if name == "set_unshard_in_backward":
        return None
    if name == "needed_in_backward":
        return "That is how the plan knows it. Which method of torch's FSDP is called then?"
    if name in ("set_modules_to_backward_prefetch", "set_prefetch", "set_modules_to_forward_prefetch"):
        return "Prefetch decides when a unit is gathered, not whether."
    if name in ("reshard_after_forward", "fully_shard"):
        return "That decides about forward's end. A unit that was freed there would still be gathered in backward."
    return "Read the loop of `wrap_fsdp2` to its end: what is called for a unit that is not `needed_in_backward`?"


@exercise("11.change")
def change(result: dict[str, Any]) -> str | None:
    """KEEP for small units, SHARD for the large one, predicted as measured; SHARD and KEEP as before."""
    if "error" in result:
        error = str(result["error"])
        if "KEEP_SMALL" in error and "frozen_policy" in error:
            return "The copy knows no KEEP_SMALL: begin with the first row of the table, its name and meaning."
        return f"The ranks failed: {error}"
    backward = result["backward"]
    if set(backward) != {"SHARD", "KEEP", "KEEP_SMALL"}:
        return 'Measure the new policy: `measure("KEEP_SMALL")`.'
    if backward["SHARD"][SMALL[0]] != 1:
        return (
            "SHARD has changed: it gathers every unit with grad flow again in backward. Only the new policy may differ."
        )
    if backward["KEEP"][LARGE] != 0:
        return "KEEP has changed: it keeps units of any size. Only the new policy may differ."
    new = backward["KEEP_SMALL"]
    if new[LARGE] == 0:
        return f"{LARGE} has 16.2 MiB, and is kept: a unit of 16 MiB or more should be sharded."
    if not any(new[name] for name in SMALL) and new[JUST_BELOW]:
        return f"{JUST_BELOW} has 15.7 MiB, and is gathered again in backward: a MiB is 2**20 bytes, not a million."
    if not any(new[name] for name in SMALL) and result["in_bf16"][LARGE]:
        return (
            f"In bf16 {LARGE} has 8.1 MiB unsharded, and is not kept: take the bytes of the dtype that a parameter has "
            "in compute, not of the one that it has at rest."
        )
    if any(new[name] for name in SMALL):
        return f"{SMALL[0]} has 0.2 MiB, and is gathered again in backward: a unit below 16 MiB should be kept."
    if result["predicted"] != result["measured"]:
        return f"Predicted {result['predicted']}, measured {result['measured']}: what wraps the model does not agree."
    return None


@exercise("11.four_bits")
def four_bits() -> str | None:
    """Codes and scales as the package's; the whole parameter from two ranks' bytes; losses near those in 16 bits."""
    import torch

    from mmfsdp.quantized.nf4 import Nf4

    from .four_bits import numbers_to_pack, weight_of_7_rows

    found = saved("11.four_bits")
    if isinstance(found, str):
        return found
    packed = found[0]["packed"]
    numbers = numbers_to_pack()
    codes, scales = Nf4().quantize(numbers[None])
    blocks = scales.numel()
    if packed.shape != (blocks, 36):
        shape = tuple(packed.shape)
        return f"{len(numbers)} numbers are {blocks} blocks of 36 bytes, and `pack` returns the shape {shape}."
    mine = packed[:, 32:].contiguous().view(torch.float32).flatten()
    if not torch.allclose(mine, scales.flatten()):
        return f"The scales of the blocks are {scales.flatten().tolist()}, and you have {mine.tolist()}."
    if (packed[:, :32] != codes.view(blocks, 32)).float().mean() > 0.02:  # a number may be as near to two levels
        return "Some codes are not those of the nearest level: nearest to the number over the scale of its block."
    rows = torch.nn.functional.pad(weight_of_7_rows(), (0, 0, 0, 1)).chunk(2)
    parts = [Nf4().dequantize(*Nf4().quantize(part.reshape(1, -1)), 40, torch.float32) for part in rows]
    want = torch.cat(parts).reshape(8, 10)[:7]
    filled = found[0]["filled"]
    if torch.allclose(filled, want, atol=1e-5):
        if torch.allclose(found[0]["narrow"], found[0]["wide"], rtol=0.05):
            return None
        return "The losses are not near those in 16 bits."
    if torch.allclose(filled.flatten()[1:40:2], want.flatten()[:40:2], atol=1e-5):
        return "The two codes of a byte are swapped: the first one is in the upper half, byte // 16."
    return "`fill` makes other numbers than the bytes stand for: the level of each code, times the scale of its block."
