"""fsdp(): Zeta's one-line way in, with its meanings and defaults (github.com/kyegomez/zeta, zeta.training.fsdp)."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...params import AutoWrapPolicy, Backend, FSDPParams, ParamError, Precision, ShardingStrategy
from ...planning import wrap_fsdp

PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16, "fp32": None}
STRATEGIES = {
    "SHARD_GRAD": ShardingStrategy.SHARD_GRAD_OP,
    "FULL_SHARD": ShardingStrategy.FULL_SHARD,
    "NO_SHARD": ShardingStrategy.NO_SHARD,
}


def fsdp(
    model: nn.Module,
    auto_wrap: bool = False,
    mp: str = "fp32",
    shard_strat: str = "NO_SHARD",
    TransformerBlock: type[nn.Module] | None = None,  # noqa: N803  # the name is Zeta's
) -> nn.Module:
    """Wrap a model for data-parallel training, as zeta.training.fsdp does. Every rank must call it.

    Args:
        model: The plain model.
        auto_wrap: Shard each TransformerBlock by itself instead of the model as one unit.
        mp: The precision of computation, buffers and gradient sums: bf16, fp16 or fp32. fp16 needs torch's
            ShardedGradScaler in the caller's loop, or `build_scaler` with `train_step`.
        shard_strat: SHARD_GRAD (gradients and optimizer states are sharded; weights between steps), FULL_SHARD (all
            are, always), or NO_SHARD (nothing is).
        TransformerBlock: The class of the layers, for `auto_wrap`.

    Returns:
        torch's FullyShardedDataParallel, or with NO_SHARD, as torch recommends, DistributedDataParallel.

    Raises:
        ParamError: For another `mp` or `shard_strat`, and for `auto_wrap` without a TransformerBlock.
    """
    for name, value, choices in (("mp", mp, PRECISIONS), ("shard_strat", shard_strat, STRATEGIES)):
        if not isinstance(value, str) or value not in choices:
            raise ParamError(name, f"{value!r} is not one of {', '.join(choices)}")
    if auto_wrap and not isinstance(TransformerBlock, type):
        raise ParamError("TransformerBlock", f"is {TransformerBlock!r}; auto_wrap needs the class of the layers")
    is_sharded = shard_strat != "NO_SHARD"
    reduce_dtype = PRECISIONS[mp] if is_sharded else None
    params: dict[str, Any] = {
        "backend": Backend.FSDP1,
        "sharding_strategy": STRATEGIES[shard_strat],
        "auto_wrap_policy": AutoWrapPolicy.NO_WRAP,
        "mixed_precision": PRECISIONS[mp],
        "buffer_dtype": PRECISIONS[mp],
        "reduce_dtype": reduce_dtype or Precision.FP32,
        "forward_prefetch": is_sharded,  # as in Zeta
    }
    if auto_wrap and TransformerBlock and is_sharded:
        names = {type(module).__name__ for module in model.modules() if isinstance(module, TransformerBlock)}
        params["auto_wrap_policy"] = AutoWrapPolicy.TRANSFORMER_BASED_WRAP
        params["transformer_layer_cls"] = ",".join(sorted(names)) or TransformerBlock.__name__
    return wrap_fsdp(model, FSDPParams(**params))
