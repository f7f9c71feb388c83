"""FSDPParams: how a model is sharded. The fields that torch's FSDP has mean what torch says they mean."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from .check import ParamError, at_least, coerce, need
from .enums import AutoWrapPolicy, Backend, BackwardPrefetch, FrozenPolicy, Precision, ShardingStrategy, StateDictType

_PARTLY = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


@dataclass(frozen=True, kw_only=True)
class FSDPParams:
    """How a model is grouped into units, sharded, gathered and saved."""

    enable_fsdp: bool = True
    """Shard at all. False means DDP whatever `backend` and `sharding_strategy` say. Backends: all. Default true."""

    backend: Backend = Backend.FSDP2
    """Which of torch's wrappers runs the plan: DDP, FSDP1 or FSDP2. Default FSDP2."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """What is sharded: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (which is DDP), HYBRID_SHARD, HYBRID_SHARD_ZERO2. Frozen
    units follow `frozen_policy` instead. Backends: FSDP1, FSDP2; DDP shards nothing. Default FULL_SHARD."""

    auto_wrap_policy: AutoWrapPolicy = AutoWrapPolicy.FROZEN_AWARE
    """How modules are grouped into units: NO_WRAP, SIZE_BASED_WRAP, TRANSFORMER_BASED_WRAP, FROZEN_AWARE.
    Backends: FSDP1, FSDP2; in DDP it only says what `activation_checkpointing` and `compile_units` take for one.
    Default FROZEN_AWARE."""

    min_num_params: int | None = None
    """Parameters a module must hold to become a unit; a count, needed by and only for SIZE_BASED_WRAP.
    Backends: FSDP1, FSDP2. Default unset (100,000 with SIZE_BASED_WRAP)."""

    transformer_layer_cls: str | None = None
    """Class names of the layers that become units, separated by commas (LlamaDecoderLayer,CLIPEncoderLayer);
    needed by and only for TRANSFORMER_BASED_WRAP. Backends: FSDP1, FSDP2. Default unset."""

    frozen_policy: FrozenPolicy = FrozenPolicy.SHARD
    """What is done with frozen units' weights, whatever `sharding_strategy` says of the others: SHARD, KEEP,
    REPLICATE, or AUTO within `memory_budget_gib`. Backends: FSDP2 all; FSDP1 SHARD, KEEP and REPLICATE. DDP always
    replicates. Default SHARD."""

    memory_budget_gib: float | None = None
    """Memory one rank may use, in GiB (2**30 bytes), activations included; needed by and only for `frozen_policy` AUTO.
    Backends: FSDP2. Default unset."""

    mixed_precision: Precision | None = None
    """Format of the gathered weights and of compute: bf16, fp16 (its loss scale is found as training goes, and steps
    that overflow are skipped), fp32, or unset for the weights' own. Backends: FSDP1, FSDP2; DDP by autocast.
    Default unset."""

    reduce_dtype: Precision = Precision.FP32
    """Format in which gradients are summed over ranks: fp32, bf16, fp16. Backends: FSDP1, FSDP2. Default fp32."""

    frozen_dtype: Precision | None = None
    """Format of frozen weights at rest; bf16 halves what they take. What trains rests in fp32 wherever
    `mixed_precision` is set. Backends: all. Default unset (as loaded)."""

    buffer_dtype: Precision | None = None
    """Format of floating-point buffers, in memory and in checkpoints: fp32, bf16, fp16. The frequencies of rotary
    embeddings and the statistics of batch norms are buffers, and lose digits in 16 bits. Backends: all. Default unset
    (as loaded)."""

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    """When backward gathers the next unit: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH.
    Backends: FSDP1 all; FSDP2 BACKWARD_PRE and NO_PREFETCH. Default BACKWARD_PRE."""

    forward_prefetch: bool = False
    """Gather the next unit before the current one's forward; with FSDP2, what stays gathered until backward as the
    model's forward begins. Backends: FSDP1, FSDP2. Default false."""

    cpu_offload: bool = False
    """Keep shards, gradients and optimizer states in CPU memory. Backends: FSDP2 everywhere; FSDP1 with CUDA only.
    Default false."""

    use_orig_params: bool | None = None
    """FSDP1's constructor argument: keep the parameters' own names. False forbids units that mix frozen and trainable
    parameters, and gives a whole unit weight decay if any of it has. Unset: true. Backends: FSDP1. Default unset."""

    sync_module_states: bool = True
    """Start every rank from rank 0's weights and buffers. Backends: all. Default true."""

    state_dict_type: StateDictType = StateDictType.SHARDED_STATE_DICT
    """Layout of checkpoints: FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT (FSDP1 only).
    Backends: all. Default SHARDED_STATE_DICT."""

    activation_checkpointing: str = "none"
    """Recompute activations in backward (non-reentrant): none, all (every unit), every:N (every N-th unit), or a
    name pattern such as language_model.*.layers.*. Backends: all. Default none."""

    compile_units: bool = False
    """Compile each unit by itself with torch.compile; needs a C++ compiler, and minutes at first. Backends: DDP, FSDP2;
    FSDP1 unless `use_orig_params` is false. Default false."""

    dp_replicate: int | None = None
    """Ranks along the replicate axis of the mesh; a count. Backends: FSDP1, FSDP2, with a HYBRID strategy.
    Default unset (one replica per node)."""

    dp_shard: int | None = None
    """Ranks along the shard axis of the mesh; a count; times `dp_replicate` it must be the world size.
    Backends: FSDP1, FSDP2, with a HYBRID strategy. Default unset (the ranks of a node)."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "min_num_params", "dp_replicate", "dp_shard")
        self._check_policy()
        self._check_backend()
        self._check_checkpointing()

    def _check_policy(self) -> None:
        size, layers = AutoWrapPolicy.SIZE_BASED_WRAP, AutoWrapPolicy.TRANSFORMER_BASED_WRAP
        policy = self.auto_wrap_policy
        if self.min_num_params is not None and policy is not size:
            raise ParamError(
                "min_num_params",
                f"{self.min_num_params} has no effect with auto_wrap_policy {policy}; "
                "set auto_wrap_policy to SIZE_BASED_WRAP or remove min_num_params",
            )
        if self.transformer_layer_cls is not None and policy is not layers:
            raise ParamError(
                "transformer_layer_cls",
                f"{self.transformer_layer_cls!r} has no effect with auto_wrap_policy {policy}; "
                "set auto_wrap_policy to TRANSFORMER_BASED_WRAP or remove transformer_layer_cls",
            )
        if policy is layers and not self.layer_classes:
            raise ParamError(
                "transformer_layer_cls",
                "TRANSFORMER_BASED_WRAP needs the class name of a layer, such as LlamaDecoderLayer; "
                "set transformer_layer_cls or choose another auto_wrap_policy",
            )
        auto = self.frozen_policy is FrozenPolicy.AUTO
        if auto and self.memory_budget_gib is None:
            raise ParamError("memory_budget_gib", "frozen_policy AUTO needs a budget; set memory_budget_gib, e.g. 16")
        if self.memory_budget_gib is not None:
            need(auto, "memory_budget_gib", f"{self.memory_budget_gib} has no effect unless frozen_policy is AUTO")
            need(self.memory_budget_gib > 0, "memory_budget_gib", f"{self.memory_budget_gib} must be above 0")

    def _check_backend(self) -> None:
        backend = self.effective_backend
        if self.state_dict_type is StateDictType.LOCAL_STATE_DICT and backend is not Backend.FSDP1:
            raise ParamError(
                "state_dict_type",
                f"LOCAL_STATE_DICT exists only with backend FSDP1, not {backend}; "
                "choose SHARDED_STATE_DICT or FULL_STATE_DICT, or set backend to FSDP1",
            )
        if self.use_orig_params is not None and backend is not Backend.FSDP1:
            raise ParamError(
                "use_orig_params",
                f"{self.use_orig_params} has a meaning only with backend FSDP1, not {backend}; remove it",
            )
        if self.compile_units and self.use_orig_params is False:
            raise ParamError("compile_units", "true needs the original parameters; remove use_orig_params")
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST and backend is Backend.FSDP2:
            raise ParamError(
                "backward_prefetch",
                "BACKWARD_POST does not exist in FSDP2; choose BACKWARD_PRE or NO_PREFETCH, or set backend to FSDP1",
            )
        if self.frozen_policy is FrozenPolicy.AUTO and backend is not Backend.FSDP2:
            raise ParamError(
                "frozen_policy",
                f"AUTO needs backend FSDP2, not {backend}; choose SHARD, KEEP or REPLICATE, or set backend to FSDP2",
            )
        if backend is Backend.DDP and self.frozen_policy is FrozenPolicy.KEEP:
            raise ParamError(
                "frozen_policy", "KEEP cannot be honored by DDP, which replicates; choose REPLICATE or backend FSDP2"
            )
        if self.enable_fsdp and self.backend is Backend.DDP and self.sharding_strategy in _PARTLY:
            raise ParamError(
                "sharding_strategy",
                f"{self.sharding_strategy} cannot be honored by DDP; remove it or set backend to FSDP1 or FSDP2",
            )
        defaults = {"cpu_offload": False, "forward_prefetch": False, "reduce_dtype": Precision.FP32}
        for name, default in (defaults | {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}).items():
            value = getattr(self, name)
            if backend is Backend.DDP and value != default:
                raise ParamError(name, f"{value} cannot be honored by DDP; leave it {default} or choose backend FSDP2")
        for name in ("dp_replicate", "dp_shard"):
            if getattr(self, name) is not None and not (self.sharding_strategy.hybrid and backend is not Backend.DDP):
                raise ParamError(
                    name,
                    f"{getattr(self, name)} needs sharding_strategy HYBRID_SHARD or HYBRID_SHARD_ZERO2 and "
                    f"backend FSDP1 or FSDP2, not {self.sharding_strategy} with {backend}; remove it or change those",
                )

    def _check_checkpointing(self) -> None:
        value = self.activation_checkpointing
        ok = bool(value)
        if value.startswith("every:"):
            ok = value[6:].isdecimal() and int(value[6:]) > 0
        need(ok, "activation_checkpointing", f"{value!r} is not none, all, every:N (N from 1) or a name pattern")

    def check_machine(self) -> None:
        """Raise ParamError for what this machine lacks; to be called where the ranks will be."""
        compiler = os.environ.get("CXX", "g++")
        if self.compile_units and not shutil.which(compiler):
            raise ParamError(
                "compile_units",
                f"true needs a C++ compiler, and {compiler} is not on PATH; install g++, set CXX to yours, or set "
                "compile_units to false",
            )

    @property
    def effective_backend(self) -> Backend:
        """The backend that really runs: DDP when sharding is off or the strategy is NO_SHARD."""
        if not self.enable_fsdp or self.sharding_strategy is ShardingStrategy.NO_SHARD:
            return Backend.DDP
        return self.backend

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """`transformer_layer_cls` as a tuple of class names."""
        return tuple(c.strip() for c in (self.transformer_layer_cls or "").split(",") if c.strip())
