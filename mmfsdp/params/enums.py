"""Every choice a person can make in a run, as string enums. `to_torch()` imports torch; this module does not."""

from __future__ import annotations

import math
from enum import Enum
from importlib import import_module
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed.fsdp as torch_fsdp


def imported(path: str) -> Any:
    """Import and return what a path such as `package.module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


class Choice(str, Enum):
    """A string enum whose members have a description, and print as their value: so do YAML, JSON and flags.

    A class that annotates further attributes has their values, in order, behind the code of each member.
    """

    description: str
    """The meaning of the choice in one sentence, for the form, the help and the reference pages."""
    code: str
    """Import path of its code, such as `mmfsdp.kit.shapes.shapes_source:open_shapes`; empty where it needs none."""

    def __new__(cls, value: str, description: str = "", code: str = "", *more: Any) -> Choice:
        """Return a member that equals its value. more: values of the attributes that its class adds."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.description, member.code = description, code
        added = get_annotations(cls) if more else {}
        for name, item in zip(added, more, strict=True):
            setattr(member, name, item)
        return member

    def load(self) -> Any:
        """Import the code of this choice, and return it."""
        return imported(self.code)

    def __str__(self) -> str:
        return str(self.value)


class Backend(Choice):
    """torch's data-parallel wrapper that runs the plan. `load` returns its `Wrapper`; see core/wrapper.py."""

    rules_path: str
    """Import path of its `UnitRules`, for which no torch is imported; see core/unit_rules.py."""

    DDP = (
        "DDP",
        "DistributedDataParallel: every rank holds everything, gradients are all-reduced.",
        "mmfsdp.backends.ddp:WRAPPER",
        "mmfsdp.backends.rules:WHOLE",
    )
    FSDP1 = (
        "FSDP1",
        "FullyShardedDataParallel: one flat parameter per unit, sharded over the ranks.",
        "mmfsdp.backends.fsdp1:WRAPPER",
        "mmfsdp.backends.rules:FLAT",
    )
    FSDP2 = (
        "FSDP2",
        "fully_shard: each parameter sharded on its first dim; frozen and trainable may share a unit.",
        "mmfsdp.core.fsdp2:WRAPPER",
        "mmfsdp.core.unit_rules:BY_PARAMETER",
    )

    @property
    def rules(self) -> Any:
        """Return its rules for a unit."""
        return imported(self.rules_path)


class ShardingStrategy(Choice):
    """The tensors that are sharded, with torch's names and meanings (torch.distributed.fsdp.ShardingStrategy)."""

    FULL_SHARD = "FULL_SHARD", "All is sharded; units are gathered in forward and again in backward."
    SHARD_GRAD_OP = "SHARD_GRAD_OP", "As FULL_SHARD, but a unit stays gathered from forward until its backward is over."
    NO_SHARD = "NO_SHARD", "Nothing is sharded; gradients are all-reduced (this is DDP)."
    HYBRID_SHARD = "HYBRID_SHARD", "FULL_SHARD over `dp_shard` ranks, replicated over `dp_replicate` groups."
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2", "As HYBRID_SHARD, with SHARD_GRAD_OP in each group."

    def to_torch(self) -> torch_fsdp.ShardingStrategy:
        """Return the torch enum member. HYBRID_SHARD_ZERO2 is torch's `_HYBRID_SHARD_ZERO2`."""
        from torch.distributed.fsdp import ShardingStrategy as Torch

        return Torch._HYBRID_SHARD_ZERO2 if self is ShardingStrategy.HYBRID_SHARD_ZERO2 else Torch[self.value]

    @property
    def reshard_after_forward(self) -> bool:
        """Return true when a unit's gathered parameters are freed between its forward and its backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class StateDictType(Choice):
    """The layout of a checkpoint, with torch's names (torch.distributed.fsdp.StateDictType)."""

    FULL_STATE_DICT = "FULL_STATE_DICT", "Whole tensors under their own names, as without FSDP."
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT", "Each rank writes its shards; loads on another number of ranks, too."
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT", "Each rank writes its flat shards; FSDP1 only, same number of ranks only."

    def to_torch(self) -> torch_fsdp.StateDictType:
        """Return the torch enum member of the same name."""
        from torch.distributed.fsdp import StateDictType as Torch

        return Torch[self.value]


class BackwardPrefetch(Choice):
    """The moment when backward starts to gather the next unit (torch.distributed.fsdp.BackwardPrefetch)."""

    BACKWARD_PRE = "BACKWARD_PRE", "Before the current unit's gradients: most overlap, one more unit in memory."
    BACKWARD_POST = "BACKWARD_POST", "After the current unit's gradients are computed: less overlap, less memory."
    NO_PREFETCH = "NO_PREFETCH", "Never ahead of need."

    def to_torch(self) -> torch_fsdp.BackwardPrefetch | None:
        """Return the torch enum member, or None for NO_PREFETCH, which is how torch says it."""
        from torch.distributed.fsdp import BackwardPrefetch as Torch

        return None if self is BackwardPrefetch.NO_PREFETCH else Torch[self.value]


class AutoWrapPolicy(Choice):
    """The rule that groups modules into units."""

    NO_WRAP = "NO_WRAP", "The whole model is one unit."
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP", "A unit is a module with `min_num_params` parameters not yet in a unit."
    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP", "A unit is a module of a class in `transformer_layer_cls`."
    FROZEN_AWARE = "FROZEN_AWARE", "Units follow the layers, and mix frozen and trainable parameters only if they must."


class FrozenPolicy(Choice):
    """The treatment of a frozen unit's weights."""

    SHARD = "SHARD", "Sharded; gathered each time it is needed: least memory, most traffic."
    KEEP = "KEEP", "Sharded; gathered once in forward and kept until backward is over."
    REPLICATE = "REPLICATE", "Every rank holds it whole: no traffic at all."
    AUTO = "AUTO", "Chosen per unit so that the step sends least within `memory_budget_gib`."


class Precision(Choice):
    """A floating-point format."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def torch_name(self) -> str:
        """Return torch's name for it."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.value]

    def to_torch(self) -> torch.dtype:
        """Return the torch dtype."""
        import torch

        return getattr(torch, self.torch_name)


class FrozenDtype(Choice):
    """The format of frozen weights. One with codes and scales is a line here and a file; see core/quantize.py."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = (
        "int8",
        "8 bits for each weight of a frozen matrix, and a scale for each of its rows.",
        "mmfsdp.quantized.int8:FORMAT",
    )
    NF4 = (
        "nf4",
        "4 bits for each weight of a frozen matrix, and a scale for every 64 in a row (QLoRA).",
        "mmfsdp.quantized.nf4:FORMAT",
    )

    @property
    def quantizes(self) -> bool:
        """Return true for codes and scales instead of floating-point numbers."""
        return bool(self.code)


class BackboneSource(Choice):
    """The library that builds a backbone."""

    OPEN_CLIP = "open_clip", "An open_clip CLIP; its vision encoder is used."
    TRANSFORMERS = "transformers", "A transformers vision model or causal language model."


class ProjectorKind(Choice):
    """The module that carries an encoder's tokens into the language model."""

    LINEAR = "linear", "One matrix."
    MLP = "mlp", "Two matrices around a GELU, as in LLaVA 1.5."


class Schedule(Choice):
    """Shape of the learning rate after the warm-up. A new one is a line here, and its formula below."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"

    def factor(self, done: int, steps: int) -> float:
        """Return the factor of the peak learning rate after `done` of `steps` steps since the warm-up."""
        share = min(1.0, done / max(1, steps))
        if self is Schedule.CONSTANT:
            return 1.0
        if self is Schedule.LINEAR:
            return 1 - share
        if self is Schedule.COSINE:
            return 0.5 * (1 + math.cos(math.pi * share))  # Loshchilov and Hutter 2017, without restarts
        raise NotImplementedError(f"Schedule.factor has no formula of {self}")


class StartAdapters(Choice):
    """The treatment of the LoRA adapters of the run that another one starts from."""

    KEEP = "keep", "They are trained on, or frozen, as the new run says: it has adapters of the same rank."
    MERGE = "merge", "They are added to their matrices; the new run has no adapters, or new ones."


class Device(Choice):
    """The device of the ranks."""

    AUTO = "auto", "CUDA with nccl when a GPU is there for every rank of the node, else the CPU with gloo."
    CPU = "cpu"
    CUDA = "cuda"


class TrackerKind(Choice):
    """A program that shows the metrics of runs. A new one is an entry here and a class; see kit/run/trackers/track.py.

    Its value is the name of the package that it needs.
    """

    view: str
    """The command that shows what it has of a folder, which stands for `{folder}`."""

    TENSORBOARD = (
        "tensorboard",
        "Event files in the run folder: tensorboard --logdir runs.",
        "mmfsdp.kit.run.trackers.tensorboard_tracker:open_tensorboard",
        "tensorboard --logdir {folder}",
    )
    WANDB = (
        "wandb",
        "Weights & Biases, offline in the run folder unless WANDB_MODE says otherwise.",
        "mmfsdp.kit.run.trackers.wandb_tracker:open_wandb",
        "wandb sync {folder}/wandb/*",
    )

    @property
    def package(self) -> str:
        """Return the package that it needs."""
        return self.value


LAYOUTS = ("from_pretrained", "adapter", "open_flamingo")
"""The layouts of an export."""

FIT_FOR = ("batch", "length", "pictures", "picture", "gpus", "policy")
"""Answers of `mmfsdp fit`: the largest batch, length, pictures of a sample or size of a picture; the fewest GPUs;
the frozen policy, with recomputation of activations, that sends least."""


class Executor(Choice):
    """The launcher of the ranks. A new one is an entry here and a class in run/launchers (launcher.py there)."""

    LOCAL = "local", "Processes on this machine.", "mmfsdp.kit.run.launchers.local_launcher:Local"
    SLURM = "slurm", "A job of a Slurm cluster.", "mmfsdp.kit.run.launchers.slurm_launcher:Slurm"
    SRUN = (
        "srun",
        "A step of the Slurm job that this process is in, such as a hub's notebook.",
        "mmfsdp.kit.run.launchers.srun_launcher:Srun",
    )


class GpusAs(Choice):
    """The option of Slurm by which a job asks for GPUs."""

    GPUS_PER_NODE = "gpus-per-node", "`--gpus-per-node=4`."
    GRES = "gres", "`--gres=gpu:4`, joined with `launch.gres`."
    GPUS_PER_TASK = "gpus-per-task", "`--gpus-per-task=1`: each rank sees its own GPU only."
    NONE = "none", "Not at all: whole nodes, whose GPUs Slurm does not manage, or `launch.gres` names them."
