"""Checks of 02_fsdp_from_scratch."""

from __future__ import annotations

from typing import Any

from .checks import exercise, number, saved


@exercise("02.traffic")
def traffic(factor: float) -> str | None:
    """Two all-gathers and one reduce-scatter."""
    near = {
        2.0: "That is DDP's. FSDP all-gathers the weights in forward *and* in backward.",
        4.0: "An all-reduce counts twice, but here the gradients are reduce-scattered only: each rank needs one part.",
        1.5: "Relative to DDP that is right; the question asks for the factor of N(W-1)/W.",
    }
    return number(factor, 3, near, "one all-gather in forward, one in backward, one reduce-scatter.")


@exercise("02.gather")
def gather() -> str | None:
    """Rank r's gradient is the mean over ranks of their gradients' part r."""
    import torch

    found = saved("02.gather")
    if isinstance(found, str):
        return found
    total = torch.arange(6.0) * 3
    for rank, values in enumerate(found):
        want = total[3 * rank : 3 * rank + 3]
        got = values["grad"]
        if torch.equal(got, torch.zeros(3)):
            return "`part` is still zero: let the collective that leaves each rank a part of the sum fill it."
        if torch.equal(got, want):
            return "That is the sum over the ranks; the gradient of the whole batch is their mean."
        if torch.equal(got, torch.arange(6.0)[3 * rank : 3 * rank + 3] * (rank + 1)):
            return "That is the part of this rank's own gradient: those of the other ranks are missing."
        if not torch.allclose(got, want / 2):
            return f"Rank {rank} has {got.tolist()} and should have {(want / 2).tolist()}: part {rank} of the mean."
    return None


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
        return what + "It fits, but another one that fits sends less. Must the weights be gathered again in backward?"
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
