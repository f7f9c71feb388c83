"""Checks of 01_data_parallel."""

from __future__ import annotations

import re

from mmfsdp.kit.widgets.ranks_cell.ranks_magic import run_on_ranks

from .checks import DEADLOCK, cell_code, exercise, number, saved

POINT_TO_POINT = {"send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv", "barrier", "get_rank"}
OTHER_VALUES = ([2.0, 7.0, 1.0, 8.0, 2.0, 9.0], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0])
"""The x of each rank when `ring_sum` is called again: an answer that holds for the first x alone fails."""


@exercise("01.ring")
def ring() -> str | None:
    """Both ranks hold the sum of both x."""
    import torch

    found = saved("01.ring")
    if isinstance(found, str):
        return found
    code = cell_code("01.ring")
    without_comments = re.sub(r"#.*", "", code)
    used = sorted(set(re.findall(r"\bdist\.(\w+)", without_comments)) - POINT_TO_POINT)
    if used:
        return f"The exercise asks for `dist.send` and `dist.recv` only: no `{used[0]}`."
    want = torch.arange(6.0) * 3
    for rank, values in enumerate(found):
        got = values.get("sum")
        if got is None or got.shape != want.shape:
            return f"Rank {rank} should save(sum=...) with 6 numbers; the last two lines of the cell do that."
        mine, other = (slice(0, 3), slice(3, 6)) if rank == 0 else (slice(3, 6), slice(0, 3))
        if torch.equal(got[mine], want[mine]) and not torch.equal(got[other], want[other]):
            return (
                f"Rank {rank} has the sum of its own half, but not of the other one: after the second exchange, "
                "`halves[other]` must hold what the other rank sends of its `halves[mine]`."
            )
        if torch.allclose(got, want / 2):
            return "That is the mean. An all-reduce gives the sum."
        if not torch.equal(got, want):
            return (
                f"Rank {rank} has {got.tolist()}, and the sum of both is {want.tolist()}: neither half is a sum. After "
                "the first exchange `halves[mine]` is one: send that, and receive into `halves[other]`."
            )
    run_on_ranks(f"{code}\n\nsave(again=ring_sum(torch.tensor({OTHER_VALUES}[rank])))", 2, "01.ring.again")
    again = saved("01.ring.again")
    if isinstance(again, str):
        return f"Right for this x. Then the check called `ring_sum` again, with another x. {again}"
    want = torch.tensor(OTHER_VALUES).sum(0)
    for rank, values in enumerate(again):
        if not torch.equal(values["again"], want):
            return (
                f"Right for this x only: with x = {OTHER_VALUES[0]} on rank 0 and {OTHER_VALUES[1]} on rank 1, "
                f"`ring_sum` returns {values['again'].tolist()} on rank {rank}. The other rank must send its half."
            )
    return None


@exercise("01.wire")
def wire(megabytes: float) -> str | None:
    """2 x 400 MB x 7/8."""
    near = {
        350.0: "That is one half of it, the reduce-scatter; the all-gather sends as much again.",
        800.0: "Nearly: a rank keeps its own part and so sends (W-1)/W of the bytes each time.",
        175.0: "That counts each parameter as one byte; fp32 has four.",
        400.0: "That is the size of the gradients. How often is it sent, and how much of it by each rank?",
        700e6: "Right in bytes; the question asks for megabytes.",
        2800.0: "That multiplies by W - 1 and forgets to divide by W. Each piece is 1/W of the whole.",
    }
    return number(megabytes, 700.0, near, "2 N (W-1)/W, with N the bytes of all gradients and W = 8.")


@exercise("01.ledger")
def ledger(gib: float) -> str | None:
    """2.9e9 x 2 + 0.1e9 x 16 bytes."""
    near = {
        3e9 * 16 / 2**30: "That trains everything. A frozen parameter has no gradient and no optimizer state.",
        (2.9e9 * 4 + 0.1e9 * 16) / 2**30: "The frozen parameters rest in bf16 here: 2 bytes each.",
        (2.9e9 * 2 + 0.1e9 * 4) / 2**30: "The trainable ones need more than their weights: gradient and two moments.",
        (2.9e9 * 2 + 0.1e9 * 12) / 2**30: "One of the four is missing: weight, gradient, and two moments are 16 bytes.",
        (2.9e9 * 2 + 0.1e9 * 20) / 2**30: "Right with the second copy of the gradients that torch's DDP makes. "
        "Here the trainable ones are as in the ledger: 16 bytes.",
        (2.9e9 * 2) / 2**30: "Those are the frozen ones. The trainable ones come on top, with all that they need.",
        (2.9e9 * 16 + 0.1e9 * 2) / 2**30: "That is the other way round: the 0.1 billion are the trainable ones.",
        (3e9 * 2 + 0.1e9 * 16) / 2**30: "Nearly: 2.9 billion are frozen, and the 0.1 billion should be counted once.",
        (2.9e9 * 2 + 0.1e9 * 16) / 1e9: "Right in units of 10⁹ bytes; a GiB has 2³⁰.",
        (2.9e9 * 2 + 0.1e9 * 16): "Right in bytes; the question asks for GiB.",
    }
    return number(gib, (2.9e9 * 2 + 0.1e9 * 16) / 2**30, near, "frozen x 2 bytes + trainable x 16 bytes.")


@exercise("01.ddp")
def ddp() -> str | None:
    """The same weights on both ranks, and torch's."""
    import torch

    found = saved("01.ddp")
    if found == DEADLOCK and re.search(r"broadcast\([^)]*\brank\b", cell_code("01.ddp")):
        return "Each rank broadcasts its own weights, and waits. The source is the same on every rank: `src=0`."
    if isinstance(found, str):
        return found
    first, second = (f["weights"] for f in found)
    if not torch.allclose(first, second, atol=1e-5):
        if torch.allclose(found[0]["losses"][0], found[0]["true_losses"][0]) and torch.allclose(
            found[1]["losses"][0], found[1]["true_losses"][0]
        ):
            return (
                "The ranks begin with the same weights and then drift apart: each follows its own gradients. "
                "All-reduce `p.grad` in `average`."
            )
        return (
            "The ranks hold different weights: the broadcast is missing, or it does not reach the parameters. "
            "`dist.broadcast(p.data, src=0)` for each one, before the first forward."
        )
    if torch.allclose(first, found[0]["true_weights"], atol=1e-5):
        return None
    if torch.allclose(found[0]["losses"][0], found[0]["true_losses"][0]):
        return (
            "Both ranks agree, but not with torch: is it the *mean* over the ranks? An all-reduce gives the sum, so "
            "the step is twice too long."
        )
    return "The ranks agree with each other, but start from other weights than torch's DDP: it takes those of rank 0."
