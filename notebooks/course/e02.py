"""Checks of 02_fsdp_from_scratch."""

from __future__ import annotations

import re
from typing import Any

from .checks import exercise, number
from .file_parts import own_parts
from .grades import DTYPE, beside_torch, graded, other_dtype, predicted_as_measured
from .small_units import hint_for_small_units


@exercise("02.traffic")
def traffic(factor: float) -> str | None:
    """Two all-gathers and one reduce-scatter."""
    near = {
        2.0: "That is DDP's. FSDP all-gathers the weights in forward *and* in backward.",
        4.0: "An all-reduce counts twice, but here the gradients are reduce-scattered only: each rank needs one part.",
        1.5: "Relative to DDP that is right; the question asks for the factor of N(W-1)/W.",
    }
    return number(factor, 3, near, "one all-gather in forward, one in backward, one reduce-scatter.")


@exercise("02.shard")
def shard() -> str | None:
    """6, 7 and 2 rows on three ranks: 2, 3 and 1 each, the last ones padded with zeros."""
    import torch

    found = graded("02.shard", "shard_of", 3)
    if isinstance(found, str):
        return found
    for rows in (6, 7, 2):
        each = (rows + 2) // 3
        whole = torch.arange(1.0, 2 * rows + 1).view(rows, 2)
        padded = torch.cat([whole, torch.zeros(3 * each - rows, 2)]).view(3, each, 2)
        shards = [values[f"of_{rows}"] for values in found]
        sizes = [len(shard) for shard in shards]
        if len(set(sizes)) > 1:
            return (
                f"Of {rows} rows the ranks keep {sizes}. An all-gather wants shards of one size: pad the last ones "
                "with rows of zeros."
            )
        if sizes[0] != each:
            return f"Of {rows} rows each rank keeps {sizes[0]}: it should be {rows} / 3, rounded up, which is {each}."
        for rank, (got, want) in enumerate(zip(shards, padded, strict=True)):
            if not torch.equal(got, want):
                return f"Of {rows} rows rank {rank} should keep {want.tolist()}, and it has {got.tolist()}."
    for rank, values in enumerate(found):
        for name, got in values.items():
            if got.untyped_storage().nbytes() > got.nbytes:
                return (
                    f"The rows are right, and rank {rank} holds {got.untyped_storage().nbytes()} bytes for the "
                    f"{got.nbytes} of {name}: a slice is a view, and the memory of the whole tensor stays as long as "
                    "there is one. Copy the rows into memory of their own, so that the whole can be freed."
                )
    return None


@exercise("02.refill")
def refill() -> str | None:
    """0, 36 and 0 bytes; the model sees the whole in both places; the gradient is right."""
    import torch

    found = graded("02.refill", "refill")
    if isinstance(found, str):
        return found
    values = found[0]
    at_rest, filled, freed = values["sizes"]
    if not values["same"]:
        return (
            "`piece.whole` is another tensor now. Autograd still holds the old one, with its memory: keep the tensor, "
            "and resize its storage."
        )
    if filled != 36:
        return f"Filled, the whole parameter has {filled} bytes: 3 x 3 numbers of 4 bytes are 36, without the padding."
    if (freed or at_rest) and re.search(r"\.whole\.data\s*=(?!=)", own_parts()["refill"]):
        return "Do not give the whole parameter other memory: copy into what it has."
    if freed or at_rest:
        return f"Freed, the whole parameter still has {freed or at_rest} bytes: resize its storage to 0."
    if not all(values["seen"][::2]):
        return "The model does not see what it should: `fill` has to place the whole parameter, and `free` the shard."
    if not all(values["seen"]):
        return "The second layer, tied to the first one, still has another parameter: place it for *every* owner."
    if not torch.allclose(values["grad"].flatten(), values["want"]):
        return "Backward gave another gradient than the values make: are the rows copied without the padding?"
    if values["half"] != 18:
        return (
            f"With a whole parameter in bf16 it has {values['half']} bytes: 3 x 3 numbers of 2 bytes are 18. The bytes "
            "of an element are those of `piece.whole`; the shard may be in another dtype."
        )
    return None


@exercise("02.gather")
def gather() -> str | None:
    """The weights as they were, and twice the mean of 1, 2 and 3 times the gradients; one collective each time."""
    import torch

    found = graded("02.gather", "collectives", 3)
    if isinstance(found, str):
        return found
    for rank, values in enumerate(found):
        if not torch.equal(values["gathered"], values["before"]):
            return (
                f"Rank {rank} gathered {numbers(values['gathered'])}, and the layer had {numbers(values['before'])}. "
                "Row r of `by_rank` has the shards of rank r, and each piece its own columns."
            )
        if not torch.equal(values["half"], values["before"].bfloat16()):
            return "In fp32 all is right, and a unit whose whole parameters are in bf16 gathers other values."
        if rows := set(values["rows"]) - {rank, -1}:
            return (
                f"Rank {rank} sends row {min(rows)} of `by_rank`, which is another rank's. gloo gives the right values "
                "all the same; NCCL wants the rank's own row, or memory of its own."
            )
        if values["weight"] is None or values["bias"] is None:
            return "The shards have no gradient: set `piece.shard.grad` in the loop."
        whole = torch.cat([torch.arange(8.0).view(4, 2), torch.zeros(2, 2)])
        want = 4 * whole[2 * rank : 2 * rank + 2]  # two times the mean of one, two and three times
        got = values["weight"]
        if not torch.allclose(got, want):
            if torch.allclose(got, 3 * want):
                return "That is the sum over the ranks. The gradient of the whole batch is their mean."
            if torch.allclose(got, 1.5 * want):
                return "Divided by 2? The mean is over as many ranks as there are: `dist.get_world_size()`."
            if torch.allclose(got, want / 2):
                return "The second micro-batch replaced the gradient of the first: add to what is there."
            return f"Rank {rank}'s gradient of the weight is {got.tolist()}, and should be {want.tolist()}."
        if not torch.allclose(values["bias"], torch.tensor([[4.0, 4.0], [4.0, 4.0], [0.0, 0.0]])[rank]):
            return (
                f"The weight's gradient is right, and the bias's is {values['bias'].tolist()}: which columns are its?"
            )
        if hint := collectives_hint(values["calls"]):
            return hint
    return None


def collectives_hint(calls: dict[str, int]) -> str | None:
    """Return the hint for other collectives than one all-gather, and a reduce-scatter for each of two micro-batches."""
    others = sorted(set(calls) - {"all-gather", "reduce-scatter"})
    if others:
        return (
            f"The values are right. But there is {' and '.join(others)}: `gather` is one all-gather, `reduce` is one "
            "reduce-scatter. An all-reduce sends twice as much, and gives each rank all gradients, not its own part."
        )
    for kind, wanted in (("all-gather", 1), ("reduce-scatter", 2)):
        if calls.get(kind, 0) != wanted:
            return (
                f"The values are right, with {calls.get(kind, 0)} times {kind} where {wanted} would do: one for all "
                "parameters of the unit, side by side in a matrix. Each collective has a fixed cost."
            )
    return None


def numbers(tensor: Any) -> list[float]:
    """Return the numbers of a tensor, rounded."""
    return [round(number, 2) for number in tensor.tolist()]


@exercise("02.moments")
def moments() -> str | None:
    """As torch: losses, bytes, what is held, the peak; and the losses in bf16."""
    import torch

    found = graded("02.moments", "moments")
    if isinstance(found, str):
        return NOT_GATHERED if found == DTYPE and _shards_were_multiplied() else found
    if hint := beside_torch(found):
        return hint
    if not torch.allclose(found[0]["half"], found[0]["torchs_half"], rtol=1e-2):
        return "In fp32 all is right, and in bf16 the losses differ from torch's: which inputs does each module get?"
    return hint_for_small_units(found[0]["small"])


NOT_GATHERED = (
    "A module computed with a shard in place of the whole parameter: `before_forward` has to gather the unit first."
)


def _shards_were_multiplied() -> bool:
    """Return True if the cell's first modules, which are in fp32, had shapes that do not fit."""
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

    return "shapes cannot be multiplied" in (artifacts("02.moments") / "0.log").read_text(errors="replace")


@exercise("02.predict")
def predict() -> str | None:
    """The bytes that were measured, in fp32 and with whole parameters in bf16."""
    found = graded("02.predict", "predict", 3)
    if isinstance(found, str):
        return found
    if hint := predicted_as_measured(**found[0]["fp32"], world=len(found)):
        return hint
    half = found[0]["bf16"]
    hint = other_dtype(**half) or predicted_as_measured(**half, world=len(found))
    return hint and f"In fp32 all is right. {hint}"


@exercise("02.hidden")
def hidden(quick: float, slow: float) -> str | None:
    """0.8 + 8; 8 x 1.5 + 1."""
    near_quick = {
        14.4: "That is without prefetch: compute waits for each all-gather.",
        8.0: "Nearly: compute has to wait for the very first all-gather.",
        6.4 + 1: "The network is done by then, but compute takes longer here.",
    }
    near_slow = {
        20.0: "That is without prefetch: the next unit is gathered while this one computes.",
        9.5: "That would be right if an all-gather were faster than compute. Here each unit waits for its own.",
        12.0: "Nearly: after the last all-gather, the last unit still has to compute.",
    }
    return number(quick, 8.8, near_quick, "the first all-gather, then eight units of compute.") or number(
        slow, 13.0, near_slow, "eight all-gathers one after the other, then the last unit's compute."
    )


@exercise("02.strategy")
def strategy(choice: dict[str, Any]) -> str | None:
    """Of those that fit, the one with the least traffic."""
    from mmfsdp.params import ParamError, ShardingStrategy

    if choice.get("sharding_strategy") is ...:
        return f"Choose one of {', '.join(s.name for s in ShardingStrategy)}."
    others = sorted(set(choice) - {"sharding_strategy", "dp_shard"})
    if others:
        return f"Leave {others[0]} as it is: this is about `sharding_strategy` and `dp_shard`."
    try:
        held, sent = cost_of(choice)
    except (ParamError, TypeError) as error:
        return str(error)
    what = f"That holds {held:.2f} GiB and sends {sent:.2f} GiB a step. "
    if held > LIMIT_GIB:
        return what + f"It does not fit into {LIMIT_GIB} GiB: shard further."
    best = cost_of({"sharding_strategy": "SHARD_GRAD_OP"})
    if sent > best[1] * 1.001:
        return (
            what
            + "It fits, but another one that fits sends less. Must the weights be gathered again in backward? (Under "
            "FULL_SHARD a little less than 3N(W-1)/W is sent: the last unit is kept, since backward begins there.)"
        )
    return None


LIMIT_GIB = 2.2


def cost_of(choice: dict[str, Any]) -> tuple[float, float]:
    """(GiB at rest, GiB sent in a step) of a language model of 1.1 billion parameters on 16 ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mmfsdp import FSDPParams, estimate, make_plan

    with torch.device("meta"):
        size = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_key_value_heads=4, **size))
    given = {k: v for k, v in choice.items() if v is not None}
    cost = estimate(make_plan(model, FSDPParams(**given), world_size=16))
    memory = cost.memory
    return (memory.parameters + memory.gradients + memory.optimizer) / 2**30, cost.wire_bytes / 2**30
