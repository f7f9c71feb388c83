"""fsdp(): Zeta's one-line way in, with its meanings and defaults."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..params import AutoWrapPolicy, Backend, FSDPParams, ParamError, Precision, ShardingStrategy
from . import wrap_fsdp

MODES = {"bf16": Precision.BF16, "fp16": Precision.FP16, "fp32": None}
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

    auto_wrap: each TransformerBlock is sharded by itself, rather than the model as a whole. mp: bf16, fp16 or fp32,
    in which the model computes, buffers are and gradients are summed (fp16 wants torch's ShardedGradScaler in the
    caller's loop, or `build_scaler` with `train_step`). shard_strat: SHARD_GRAD (gradients and optimizer states are
    sharded; weights between steps), FULL_SHARD (all is, at all times), NO_SHARD (nothing is). Returns torch's
    FullyShardedDataParallel, or with NO_SHARD, as torch asks, DistributedDataParallel.

    Raises ParamError for another `mp` or `shard_strat`, and if `auto_wrap` has no TransformerBlock to wrap.
    """
    for name, value, choices in (("mp", mp, MODES), ("shard_strat", shard_strat, STRATEGIES)):
        if not isinstance(value, str) or value not in choices:
            raise ParamError(name, f"{value!r} is not one of {', '.join(choices)}")
    if auto_wrap and not isinstance(TransformerBlock, type):
        raise ParamError("TransformerBlock", f"is {TransformerBlock!r}; auto_wrap needs the class of the layers")
    if not dist.is_initialized():
        raise ParamError("fsdp", "has no process group; call torch.distributed.init_process_group() first")
    sharded = shard_strat != "NO_SHARD"
    layers = None
    if auto_wrap and TransformerBlock and sharded:
        kinds = {type(m).__name__ for m in model.modules() if isinstance(m, TransformerBlock)}
        layers = ",".join(sorted(kinds)) or TransformerBlock.__name__
    params = FSDPParams(
        backend=Backend.FSDP1,
        sharding_strategy=STRATEGIES[shard_strat],
        auto_wrap_policy=AutoWrapPolicy.TRANSFORMER_BASED_WRAP if layers else AutoWrapPolicy.NO_WRAP,
        transformer_layer_cls=layers,
        mixed_precision=MODES[mp],
        buffer_dtype=MODES[mp],
        reduce_dtype=(MODES[mp] if sharded else None) or Precision.FP32,
    )
    return wrap_fsdp(model, params)
