"""The ways to shard that `mmfsdp bench wrap` compares.

The baselines are written here as their projects have them. OpenFlamingo (its train.py and flamingo.py): FSDP1, every
module wrapped twice, gathered in fp32 and reduced in bf16 under autocast; decoder layers un-frozen and kept from the
optimizer, so that nothing clears their gradients; the whole input embedding trained, but for a mask, and no row of the
head; each module clipped by itself. The same in our formats. FSDP2 per layer, as in Cornstarch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from ..data import Batch
from ..models import Flamingo
from ..params import FSDPParams
from ..plan import make_plan
from ..step import LocalAdamW, train_step
from ..wrap import apply_plan
from .models import batch_of

CLIP = 0.1
CPU = torch.device("cpu")
LAYERS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
CLASSES = {"flamingo": "FlamingoLayer,ResidualAttentionBlock", "projector": "LlamaDecoderLayer,ResidualAttentionBlock"}
KEPT = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_dtype": "bf16"}
OURS: dict[str, dict[str, Any]] = {
    "DDP": {"backend": "DDP"},
    "FSDP1 by layer (Oumi, Zeta)": {"backend": "FSDP1", **LAYERS},
    "FSDP2, root only": {"auto_wrap_policy": "NO_WRAP"},
    "frozen-aware SHARD": {"frozen_dtype": "bf16"},
    "frozen-aware KEEP": {"frozen_policy": "KEEP", **KEPT},
    "frozen-aware REPLICATE": {"frozen_policy": "REPLICATE", "forward_prefetch": True, **KEPT},
}
OURS["frozen-aware REPLICATE, compiled"] = OURS["frozen-aware REPLICATE"] | {"compile_units": True}
THEIRS = ("OpenFlamingo's scheme", "the same in our formats", "FSDP2 per layer (Cornstarch)")
WAYS = (*THEIRS, *(name for name in OURS if not name.endswith("compiled")))


@dataclass
class Way:
    """A wrapped model that trains."""

    name: str
    model: nn.Module
    optimizer: AdamW
    mask: Callable[[], None] | None = None
    """The baseline's own masking and clipping after each backward; without, `train_step` does all."""
    left_frozen: tuple[str, ...] = ()
    """Parameters that train in other ways and not in this."""

    def step(self, batches: list[Batch]) -> None:
        """One optimizer step."""
        if self.mask is None:
            train_step(self.model, batches, self.optimizer, max_grad_norm=CLIP)
            return
        self.backward(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batches: list[Batch]) -> None:
        """Forward and backward of the mean over this rank's batches."""
        for batch in batches:
            (self.model(**batch.inputs()).loss / len(batches)).backward()
            if self.mask is not None:
                self.mask()


def wrapped(
    name: str,
    model: nn.Module,
    kind: str,
    *,
    example: dict[str, Any] | None = None,
    device: torch.device = CPU,
) -> Way:
    """A model wrapped in the way of this name, in bf16 with fp32 reduction. example: of `wrap_fsdp`."""
    if name in THEIRS[:2]:
        return _openflamingo(name, model, device)
    if name == THEIRS[2]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        classes = CLASSES[kind].split(",")
        for module in [m for m in model.modules() if type(m).__name__ in classes]:
            fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        by_layer = OURS[name].items() >= LAYERS.items()
        fields = OURS[name] | ({"transformer_layer_cls": CLASSES[kind]} if by_layer else {})
        example = example or batch_of(kind, seed=0).inputs()
        fsdp = FSDPParams(mixed_precision="bf16", **fields)  # type: ignore[arg-type]
        plan = make_plan(model, fsdp, world_size=dist.get_world_size(), example=example)
        model = apply_plan(model, plan, device=device)  # what it warns of is what is compared
    kind_of = AdamW if name in THEIRS else LocalAdamW
    return Way(name, model, kind_of([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True))


def _openflamingo(name: str, model: nn.Module, device: torch.device) -> Way:
    """FSDP1 around each part twice; frozen decoder layers are un-frozen for that and kept from the optimizer."""
    theirs = name == THEIRS[0]
    dtypes = MixedPrecision(
        param_dtype=torch.float32 if theirs else torch.bfloat16,
        reduce_dtype=torch.bfloat16 if theirs else torch.float32,
    )
    if theirs:
        model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)  # type: ignore[method-assign]

    def twice(path: str) -> None:
        parent, _, key = path.rpartition(".")
        module = model.get_submodule(path)
        for _ in range(2):
            module = FullyShardedDataParallel(
                module, mixed_precision=dtypes, device_id=device, use_orig_params=True, forward_prefetch=True
            )
        setattr(model.get_submodule(parent), key, module)

    embedding = "language_model.model.embed_tokens"
    table = f"{embedding}.table.weight"
    head = ("language_model.lm_head.new_tokens.weight",) if isinstance(model, Flamingo) else ()
    if head:
        model.get_parameter(head[0]).requires_grad_(False)
        model.get_parameter(table).requires_grad_(True)
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    layers = [n for n, m in model.named_modules() if type(m).__name__ in ("LlamaDecoderLayer", "GatedCrossAttention")]
    for path in layers:
        model.get_submodule(path).requires_grad_(True)
    ends = ["perceiver", "projectors.vision", embedding, "language_model.lm_head", "vision_encoder", "encoders.vision"]
    known = dict(model.named_modules())
    clipped = [p for p in [*layers, *ends[:3]] if p in known and any(n.startswith(f"{p}.") for n in trains)]
    for path in [p for p in [*layers, *ends] if p in known]:
        twice(path)
    model.to(device)  # what is in no wrapper
    known_as = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}

    def mask() -> None:
        if table in trains and (grad := known_as[table].grad) is not None:
            grad.zero_()  # its rows are of known words; those of new ones are a table of their own here
        for path in clipped:
            module = model.get_submodule(path)
            assert isinstance(module, FullyShardedDataParallel)
            module.clip_grad_norm_(CLIP)

    optimizer = AdamW([p for n, p in known_as.items() if n in trains], lr=1e-4, weight_decay=0.0)
    return Way(name, model, optimizer, mask, head)
