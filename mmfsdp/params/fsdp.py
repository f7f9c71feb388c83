"""FSDPParams: how a model is sharded, and what each backend can honor. torch's own fields mean what torch says."""

from __future__ import annotations

import os
import shutil
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from .base import ANY_OTHER, ParamError, Params
from .enums import (
    AutoWrapPolicy,
    Backend,
    BackwardPrefetch,
    FrozenDtype,
    FrozenPolicy,
    Precision,
    ShardingStrategy,
    StateDictType,
)

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class BackendLimit(NamedTuple):
    """Values of a field that some backends cannot honor."""

    field: str
    backends: tuple[Backend, ...]
    values: tuple[Any, ...]
    """Empty: every value but the field's default."""


QUANTIZED = tuple(form for form in FrozenDtype if form.quantizes)
BACKEND_LIMITS = (
    BackendLimit("state_dict_type", (Backend.DDP, Backend.FSDP2), (StateDictType.LOCAL_STATE_DICT,)),
    # DDP and FSDP2 always keep the original parameters.
    BackendLimit("use_orig_params", (Backend.DDP, Backend.FSDP2), (False,)),
    BackendLimit("backward_prefetch", (Backend.FSDP2,), (BackwardPrefetch.BACKWARD_POST,)),
    BackendLimit("frozen_policy", (Backend.DDP, Backend.FSDP1), (FrozenPolicy.AUTO,)),
    # FSDP1 shards no integers.
    BackendLimit("frozen_dtype", (Backend.FSDP1,), QUANTIZED),
    BackendLimit("frozen_policy", (Backend.DDP,), (FrozenPolicy.KEEP,)),
    BackendLimit("sharding_strategy", (Backend.DDP,), (ShardingStrategy.SHARD_GRAD_OP, *HYBRID)),
    BackendLimit("frozen_unit_mib", (Backend.DDP, Backend.FSDP1), ()),
    BackendLimit("reduce_dtype", (Backend.DDP,), ()),
    BackendLimit("backward_prefetch", (Backend.DDP,), ()),
    BackendLimit("forward_prefetch", (Backend.DDP,), ()),
    BackendLimit("cpu_offload", (Backend.DDP,), ()),
    BackendLimit("dp_replicate", (Backend.DDP,), ()),
    BackendLimit("dp_shard", (Backend.DDP,), ()),
)
"""All that a backend cannot honor. The check of FSDPParams and the form both read it, through `unavailable`."""


EMULATED = "has no units for bf16 and emulates it, several times slower than fp16"
"""Words of the lint and of `mmfsdp check` about a GPU whose run computes in bf16."""
LEAST_RECOMPUTATION = "auto"
"""The value of `activation_checkpointing` with which a plan chooses it."""


class FSDPParams(Params):
    """Grouping of a model into units, sharding, gathering and saving."""

    enable_fsdp: bool = True
    """Shard the model. False means DDP whatever `backend` and `sharding_strategy` say. Backends: all. Default true."""

    backend: Backend = Backend.FSDP2
    """Wrapper of torch that runs the plan: DDP, FSDP1 or FSDP2. Default FSDP2."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """Sharding of parameters, gradients and optimizer states: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (which is DDP),
    HYBRID_SHARD, HYBRID_SHARD_ZERO2 (over `dp_shard` ranks, and replicas of these). Frozen units follow
    `frozen_policy` instead. Backends: FSDP1, FSDP2; DDP shards nothing. Default FULL_SHARD."""

    auto_wrap_policy: AutoWrapPolicy = AutoWrapPolicy.FROZEN_AWARE
    """Grouping of modules into units: NO_WRAP, SIZE_BASED_WRAP, TRANSFORMER_BASED_WRAP, FROZEN_AWARE.
    Backends: FSDP1, FSDP2; in DDP it only says what `compile_units` takes for one.
    Default FROZEN_AWARE."""

    min_num_params: int = Field(100_000, ge=1)
    """Parameters a module must hold to become a unit; a count, only for SIZE_BASED_WRAP. With another policy of Oumi's
    it has no effect, and the plan says so. Backends: FSDP1, FSDP2. Default 100,000, as in Oumi."""

    transformer_layer_cls: str | None = None
    """Class names of the layers that become units, separated by commas (LlamaDecoderLayer,CLIPEncoderLayer), also with
    their module before a dot; only for TRANSFORMER_BASED_WRAP. With another policy of Oumi's they have no effect, and
    the plan says so. Backends: FSDP1, FSDP2. Default unset: the classes in the model's lists of layers, which the
    plan names."""

    frozen_policy: FrozenPolicy = FrozenPolicy.SHARD
    """Sharding of frozen units, whatever `sharding_strategy` says of the others: SHARD, KEEP,
    REPLICATE, or AUTO within `memory_budget_gib`. With one rank along the shard axis they are replicated, and the plan
    says so, unless `cpu_offload` is set or they compute in another format than they rest in. Backends: FSDP2 all; FSDP1
    SHARD, KEEP and REPLICATE. DDP always replicates. Default SHARD."""

    memory_budget_gib: float | None = Field(None, gt=0)
    """Memory one rank may use, in GiB (2**30 bytes), activations included; needed by and only for `frozen_policy` AUTO.
    Backends: FSDP2. Default unset."""

    frozen_unit_mib: int | None = Field(None, ge=1)
    """Most MiB (2**20 bytes, gathered) of a unit that is made of several frozen layers, such as those of a frozen
    encoder: one all-gather instead of several. Layers are merged if they follow each other, if backward does not need
    them, and if an example shows that the predicted peak does not grow; the plan says how many. The first unit of a
    step is gathered while nothing computes, so a step waits longer for a larger one. Backends: FSDP2; FSDP1 wraps one
    module at a time. Default unset (each layer is a unit)."""

    mixed_precision: Precision | None = None
    """Format of the gathered weights and of compute: bf16, fp16 (its loss scale is found as training goes, and steps
    that overflow are skipped), fp32, or unset for the weights' own. Backends: FSDP1, FSDP2; DDP by autocast.
    Default unset."""

    reduce_dtype: Precision = Precision.FP32
    """Format in which gradients are summed over ranks: fp32, bf16, fp16. Backends: FSDP1, FSDP2. Default fp32."""

    frozen_dtype: FrozenDtype | None = None
    """Format of frozen weights at rest; bf16 halves what they take. int8 and nf4 quantize the frozen matrices (of
    linear layers and attention; neither heads nor tied ones), which are gathered in 8 or 4 bits then; other frozen
    weights rest as `mixed_precision` says. What trains rests in fp32 wherever `mixed_precision` is set. Backends: all;
    int8 and nf4 DDP, and FSDP2 from torch 2.12 on. Default unset (as loaded)."""

    not_quantized: tuple[str, ...] = ()
    """Name patterns of the matrices that `frozen_dtype` int8 or nf4 leaves as loaded (language_model.*.down_proj.*).
    Backends: DDP, FSDP2. Default none."""

    buffer_dtype: Precision | None = None
    """Format of floating-point buffers, in memory and in checkpoints: fp32, bf16, fp16. The frequencies of rotary
    embeddings and the statistics of batch norms are buffers, and lose digits in 16 bits. Backends: all. Default unset
    (as loaded)."""

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    """Time at which backward gathers the next unit: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH.
    Backends: FSDP1 all; FSDP2 BACKWARD_PRE and NO_PREFETCH. Default BACKWARD_PRE."""

    forward_prefetch: bool = False
    """Gather the next unit before the current one's forward. Backends: FSDP1, FSDP2. Default false."""

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
    """Recompute activations in backward (non-reentrant): none, all (every layer of the model's lists of layers),
    every:N (every N-th of them), a name pattern such as language_model.*.layers.*, or auto, with `frozen_policy` AUTO:
    as little of none, every:4, every:2 and all as fits `memory_budget_gib`. Backends: all. Default none."""

    compile_units: bool = False
    """Compile each unit by itself with torch.compile; needs a C++ and a C compiler, and minutes at first. Backends:
    DDP, FSDP2; FSDP1 unless `use_orig_params` is false. Default false."""

    dp_replicate: int | None = Field(None, ge=1)
    """Ranks along the replicate axis of the mesh; a count. Backends: FSDP1, FSDP2, with a HYBRID strategy.
    Default unset: the ranks divided by `dp_shard`."""

    dp_shard: int | None = Field(None, ge=1)
    """Ranks along the shard axis of the mesh; a count; times `dp_replicate` it must be the world size.
    Backends: FSDP1, FSDP2, with a HYBRID strategy. Default unset: the ranks divided by `dp_replicate`; if that is unset
    as well, the ranks of a node, one replica per node (a run has them from `launch.nodes`, wrap_fsdp from torchrun's
    LOCAL_WORLD_SIZE; make_plan needs one of the two)."""

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "min_num_params": ("auto_wrap_policy", (AutoWrapPolicy.SIZE_BASED_WRAP,)),
        "transformer_layer_cls": ("auto_wrap_policy", (AutoWrapPolicy.TRANSFORMER_BASED_WRAP,)),
        "memory_budget_gib": ("frozen_policy", (FrozenPolicy.AUTO,)),
        "not_quantized": ("frozen_dtype", QUANTIZED),
        "dp_replicate": ("sharding_strategy", HYBRID),
        "dp_shard": ("sharding_strategy", HYBRID),
    }

    def why_unavailable(self, name: str, value: Any = ANY_OTHER) -> tuple[str, str]:
        """Return why the field cannot have this value with the backend and the other fields, and what to change."""
        reason = super().why_unavailable(name, value)
        if any(reason) or value == type(self).model_fields[name].default:
            return reason
        backend = self.effective_backend
        if name == "sharding_strategy":  # which decides on the effective backend itself
            if not self.enable_fsdp:
                return "", ""
            backend = self.backend
        for limit in BACKEND_LIMITS:
            if limit.field == name and backend in limit.backends and (not limit.values or value in limit.values):
                if not self.enable_fsdp:
                    fix = "enable_fsdp to true"
                elif backend is not self.backend:
                    fix = "sharding_strategy to FULL_SHARD"
                else:
                    fix = f"backend to {max(set(Backend) - set(limit.backends))}"
                return f"cannot be honored by {backend}", f"remove it, or set {fix}"
        return "", ""

    def why_idle(self, name: str) -> str:
        """Return why no value of the field changes the plan beside the other fields; "" if one does."""
        if name == "backend" and not self.enable_fsdp:
            return "has no effect while enable_fsdp is false, which is DDP"
        if name == "backend" and self.sharding_strategy is ShardingStrategy.NO_SHARD:
            return "has no effect with sharding_strategy NO_SHARD, which is DDP"
        backend = self.effective_backend
        if name == "sharding_strategy" and self.enable_fsdp:  # which decides on the effective backend itself
            backend = self.backend
        reason = backend.rules.ignores.get(name, "")
        return f"has no effect with {backend}: {reason}" if reason else super().why_idle(name)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the fields of a wrap policy that are set with another of Oumi's policies, which has no use for them.

        Oumi takes all its fields together, so such files exist. FROZEN_AWARE is not Oumi's: with it they are refused.
        """
        if self.auto_wrap_policy is AutoWrapPolicy.FROZEN_AWARE:
            return ()
        fields = ("min_num_params", "transformer_layer_cls")
        return tuple(name for name in fields if self.unavailable(name, getattr(self, name)))

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        chosen = self.activation_checkpointing
        every = chosen.removeprefix("every:")
        if not chosen or (every != chosen and not (every.isdecimal() and int(every) > 0)):
            words = f"{chosen!r} is not none, all, every:N (N from 1), auto or a name pattern"
            raise ParamError("activation_checkpointing", words)
        if chosen == LEAST_RECOMPUTATION and self.frozen_policy is not FrozenPolicy.AUTO:
            words = "auto keeps a rank within memory_budget_gib, which is for frozen_policy AUTO; set both, or choose "
            raise ParamError("activation_checkpointing", words + "none, all or every:N")
        if self.frozen_policy is FrozenPolicy.AUTO and self.memory_budget_gib is None:
            raise ParamError("memory_budget_gib", "frozen_policy AUTO needs a budget; set memory_budget_gib, e.g. 16")
        if self.compile_units and self.use_orig_params is False:
            raise ParamError("compile_units", "true needs the original parameters; remove use_orig_params")
        return self

    @property
    def without_auto(self) -> dict[str, Any]:
        """Return the changes, by field, that come with another frozen policy than AUTO: what is for AUTO alone."""
        changes: dict[str, Any] = {"memory_budget_gib": None}
        if self.activation_checkpointing == LEAST_RECOMPUTATION:
            changes["activation_checkpointing"] = "none"
        return changes

    def with_node_size(self, ranks: int) -> Self:
        """Return the parameters with one replica per node of so many ranks, if a HYBRID strategy has no sizes."""
        unset = self.dp_replicate is None and self.dp_shard is None
        if unset and self.sharding_strategy in HYBRID and self.effective_backend is not Backend.DDP:
            return self.change(dp_shard=ranks)
        return self

    def check_machine(self) -> None:
        """Raise ParamError if this machine cannot honor an option; called where the ranks run."""
        if self.compile_units:
            _check_compiler("C++", variable="CXX", usual=("g++",))  # torch's own code, for the CPU
            # Triton compiles for GPUs, and builds its launchers in C (triton/runtime/build.py).
            _check_compiler("C", variable="CC", usual=("gcc", "clang"))

    @property
    def effective_backend(self) -> Backend:
        """Return the backend that runs: DDP when sharding is off or the strategy is NO_SHARD."""
        if not self.enable_fsdp or self.sharding_strategy is ShardingStrategy.NO_SHARD:
            return Backend.DDP
        return self.backend

    @property
    def autocast_precision(self) -> Precision | None:
        """Return the format that autocast computes in: with DDP, for mixed precision in 16 bits; else None."""
        if self.effective_backend is not Backend.DDP or self.mixed_precision is Precision.FP32:
            return None
        return self.mixed_precision

    @property
    def frozen_precision(self) -> Precision | None:
        """Return the format of frozen weights at rest that are not quantized; None as loaded."""
        if self.frozen_dtype is None:
            return None
        if self.frozen_dtype.quantizes:
            return self.mixed_precision  # in which they are gathered anyway
        return Precision(self.frozen_dtype.value)

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """Return `transformer_layer_cls` as a tuple of class names, without their modules."""
        names = [name.strip().rpartition(".")[2] for name in (self.transformer_layer_cls or "").split(",")]
        return tuple(name for name in names if name)


def _check_compiler(language: str, *, variable: str, usual: tuple[str, ...]) -> None:
    """Raise ParamError if this machine has no compiler of a language: what the variable names, or a usual one."""
    commands = (os.environ[variable],) if variable in os.environ else usual
    for command in commands:
        if shutil.which(command.partition(" ")[0]):  # options may follow
            return
    missing = " or ".join(commands)
    words = f"true needs a {language} compiler, and {missing} is not on PATH; install {usual[0]}, or set {variable}"
    raise ParamError("compile_units", f"{words} to yours")
