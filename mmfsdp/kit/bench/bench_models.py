"""Build what the benches measure: a model of random weights, batches for it, and the methods to shard it.

The methods of other projects are written here as those have them. OpenFlamingo (its train.py and flamingo.py): FSDP1,
every module wrapped twice, gathered in fp32 and reduced in bf16 under autocast; decoder layers un-frozen and kept from
the optimizer, so that nothing clears their gradients; the whole input embedding trained, but for a mask, and no row of
the head; each module clipped by itself. Cornstarch: FSDP2 per layer, as in its documentation.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from ...core.fake_tensors import copy_with
from ...core.freeze import freeze
from ...core.names import plain_name
from ...core.step import train_step
from ...core.wrap import apply_plan
from ...params import BackboneParams, BackboneSource, FSDPParams, ModelParams
from ...planning import make_plan, plan_on_rank_0
from ...predict.plan_cache import PlanCache
from ..data import Batch
from ..models import TokenIds
from ..models.build import build_model
from ..models.loss_in_head import loss_in_head
from ..models.media_model import MediaModel
from ..train.cpu_memory import CpuMemory, cpu_memory
from ..train.meters import Collectives
from ..train.optimizer import LocalAdamW

CPU = torch.device("cpu")
MAX_NORM = 0.1
"""Below the norm that these models' gradients have, so that every step is clipped."""

LAYERS = ("FlamingoLayer", "ResidualAttentionBlock")
"""Classes of the layers that are wrapped one by one."""
OPENFLAMINGO = "OpenFlamingo's scheme"
CORNSTARCH = "FSDP2 per layer (Cornstarch)"
KEEP_GATHERED = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_dtype": "bf16"}
OURS: dict[str, dict[str, Any]] = {
    "DDP": {"backend": "DDP"},
    "FSDP1 by layer (Oumi, Zeta)": {
        "backend": "FSDP1",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls": ",".join(LAYERS),
    },
    "frozen-aware SHARD": {"frozen_dtype": "bf16"},
    "frozen-aware KEEP": {"frozen_policy": "KEEP", **KEEP_GATHERED},
    "frozen-aware REPLICATE": {"frozen_policy": "REPLICATE", "forward_prefetch": True, **KEEP_GATHERED},
}
if torch.__version__ >= "2.12":  # before, FSDP2 shards no integers
    OURS["frozen-aware SHARD, nf4"] = {"frozen_dtype": "nf4"}
    OURS["frozen-aware REPLICATE, nf4"] = {**OURS["frozen-aware REPLICATE"], "frozen_dtype": "nf4"}
"""FSDP fields by method."""
IN_HEAD = {"frozen-aware SHARD, in head": "frozen-aware SHARD"}
"""Methods of OURS whose model computes its loss in the head (`model.loss_in_head`). All others, and those of other
projects, keep whole logits, so that what each way to shard costs is compared with nothing else changed."""
METHODS = (OPENFLAMINGO, CORNSTARCH, *OURS, *IN_HEAD)
COMPARED = (OPENFLAMINGO, "DDP", "frozen-aware SHARD", "frozen-aware KEEP", "frozen-aware REPLICATE", *IN_HEAD)
"""Methods of `mmfsdp bench wrap`, and of `mmfsdp bench step`."""


WORDS, TOKENS, PICTURE_PIXELS = 10_000, 16, 32
"""Size of the vocabulary, length of a sample, and side of its picture, twice a patch's."""


def model_params(width: int = 512, *, layers: int = 6) -> ModelParams:
    """Return the parameters of a small Flamingo; width: of its language model, 512 makes about 50 M parameters."""
    picture = {"image_size": PICTURE_PIXELS, "patch_size": PICTURE_PIXELS // 2}
    picture |= {"width": width * 3 // 4, "layers": 6, "head_width": width // 8}
    vision = BackboneParams(source=BackboneSource.OPEN_CLIP, config={"embed_dim": width, "vision_cfg": picture})
    text = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": width, "intermediate_size": width * 8 // 3}
    text |= {"num_attention_heads": 8, "num_hidden_layers": layers}
    return ModelParams(
        vision=vision,
        language=BackboneParams(config=text),
        cross_attention_every=2,
        perceiver_depth=2,
        num_latents=8,
        attention_heads=7,
        attention_head_dim=width // 8,
    )


def random_model(params: ModelParams, *, meta: bool = False) -> MediaModel:
    """Return a model with random weights, the same on every rank, that keeps whole logits.

    Its tables are untied, as some methods need them.
    """
    torch.manual_seed(0)
    config = {**params.language.config, "tie_word_embeddings": False}
    language = params.language.change(weights=None, config=config)
    if "model_type" in config:
        language = language.change(name="")  # else its tokenizer would be looked for
    changes = {"vision.weights": None, "language": language, "loss_in_head": False}
    model, _ = build_model(params.change(**changes), meta=meta)
    for name, p in model.named_parameters():
        if name.endswith("_gate"):
            p.data.fill_(0.5)  # at 0 nothing behind them would learn
    freeze(model, params.frozen_patterns)
    return model


def copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on a device; tied tensors stay tied."""

    def moved(_: str, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().to(device, copy=True)
        return nn.Parameter(copied, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied

    return copy_with(model, moved)


def size_text(model: nn.Module) -> str:
    """Return how many parameters a model has, and what share of them trains."""
    numel = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{numel / 1e6:,.1f} M parameters, {trainable / numel:.1%} of them trainable"


def flamingo_batch(*, seed: int) -> Batch:
    """Return two samples of a picture each, for the model of `model_params`."""
    return random_batch(WORDS, TokenIds.after(WORDS).image, (2, TOKENS), PICTURE_PIXELS, seed)


def random_batch(
    words: int, placeholder: int, size: tuple[int, int], side: int, seed: int, placeholders: int = 1
) -> Batch:
    """Return samples of a picture and text each, without padding. size: samples, and tokens of each. side: pixels."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, words, size, generator=g)
    ids[:, :placeholders] = placeholder
    labels = ids.clone()
    labels[:, :placeholders] = -100
    media: dict[str, Any] = {"vision": torch.randn(size[0], 1, 1, 3, side, side, generator=g)}
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, media=media)


@dataclass
class Method:
    """A model wrapped in one way, with its optimizer."""

    model: nn.Module
    optimizer: AdamW
    mask_and_clip: Callable[[], None] | None = None
    """OpenFlamingo's, after each backward. Without it, `train_step` does all."""

    def step(self, batch: Batch, device: torch.device = CPU) -> None:
        """Take one optimizer step."""
        if self.mask_and_clip is None:
            train_step(self.model, [batch], self.optimizer, max_grad_norm=MAX_NORM)
            return
        self.model(**batch.to(device).inputs()).loss.backward()
        self.mask_and_clip()
        self.optimizer.step()
        self.optimizer.zero_grad()


Make = Callable[[str], Method]
"""Wraps a model by the method of this name."""


def wrap_as(
    name: str,
    model: nn.Module,
    example: dict[str, Any],
    *,
    device: torch.device = CPU,
    cache: PlanCache | None = None,
) -> Method:
    """Wrap a Flamingo by the method of this name, in bf16 with fp32 reduction.

    Args:
        name: One of METHODS.
        model: The frozen model.
        example: That of `make_plan`.
        device: Where it is to run.
        cache: Give the same one for each method of one model, and those that differ in the policy alone are traced
            once.

    Returns:
        The wrapped model with its optimizer.
    """
    if name == OPENFLAMINGO:
        return _openflamingo(model, device)
    if name == CORNSTARCH:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Without a mesh, fully_shard takes the GPUs of the machine, whatever the device and the process group are.
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in [m for m in model.modules() if type(m).__name__ in LAYERS]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return Method(model, AdamW(_trainable(model), lr=1e-4, fused=True))
    if name in IN_HEAD:
        reason = loss_in_head(model)
        assert not reason, reason
        name, cache = IN_HEAD[name], None  # its forward is another one
    fsdp = FSDPParams(mixed_precision="bf16", **OURS[name])  # type: ignore[arg-type]
    make = partial(make_plan, model, fsdp, world_size=dist.get_world_size(), example=example, cache=cache)
    plan = plan_on_rank_0(model, make)
    model = apply_plan(model, plan, device=device)  # whatever the lint warns of: that is what is compared
    return Method(model, LocalAdamW(_trainable(model), lr=1e-4, fused=True))


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _openflamingo(model: nn.Module, device: torch.device) -> Method:
    """Wrap each part twice by FSDP1; frozen decoder layers are un-frozen for that and kept from the optimizer."""
    dtypes = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    embedding = "language_model.model.embed_tokens"
    table = f"{embedding}.table.weight"
    model.get_parameter("language_model.lm_head.new_tokens.weight").requires_grad_(False)
    model.get_parameter(table).requires_grad_(True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    decoders = [name for name, m in model.named_modules() if type(m).__name__ == "LlamaDecoderLayer"]
    for name in decoders:
        model.get_submodule(name).requires_grad_(True)
    crossings = [name for name, m in model.named_modules() if type(m).__name__ == "GatedCrossAttention"]
    clipped = [*crossings, "perceiver", embedding]
    for name in [*clipped, *decoders, "language_model.lm_head", "vision_encoder"]:
        module = model.get_submodule(name)
        for _ in range(2):
            module = FullyShardedDataParallel(
                module, mixed_precision=dtypes, device_id=device, use_orig_params=True, forward_prefetch=True
            )
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, module)
    model.to(device)  # what is in no wrapper
    parameters = {plain_name(name, model): p for name, p in model.named_parameters()}

    def mask_and_clip() -> None:
        new_words = parameters[table].grad
        if new_words is not None:
            new_words.zero_()  # its rows are of known words; new words have a table of their own here
        for name in clipped:
            module = model.get_submodule(name)
            assert isinstance(module, FullyShardedDataParallel)
            module.clip_grad_norm_(MAX_NORM)

    optimizer = AdamW([p for name, p in parameters.items() if name in trained], lr=1e-4, weight_decay=0.0)
    return Method(model, optimizer, mask_and_clip)


Report = Callable[[dict[str, Any]], None]
"""Receives the row of a method once it is complete."""


def measure(
    names: Sequence[str],
    make: Make,
    batch: Batch,
    rounds: int,
    device: torch.device = CPU,
    report: Report = lambda row: None,
) -> list[dict[str, Any]]:
    """Measure a step of each method: what it sends, this rank's memory in bytes, and the median seconds of `rounds`.

    On a GPU a method that runs out of memory has a row that says so, if there is one rank.
    """
    # It warns of in-place operations on a unit's output: nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if device.type == "cuda":
        return one_by_one(names, make, batch, rounds, device, report)
    return _in_turn(names, make, batch, rounds, device, report)


def _in_turn(
    names: Sequence[str], make: Make, batch: Batch, rounds: int, device: torch.device, report: Report
) -> list[dict[str, Any]]:
    """Time one step of each method in each round, so that what else this machine does falls on all of them."""
    methods, rows = [], []
    for name in names:
        method, row = measure_step(name, make, batch, device)
        methods.append(method)
        rows.append({"way": name} | row)
    seconds: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds):
        for method, times in zip(methods, seconds, strict=True):
            times.append(time_step(method, batch, device))
    for row, times in zip(rows, seconds, strict=True):
        row["seconds"] = median(times)
        report(row)
    return rows


def one_by_one(
    names: Sequence[str], make: Make, batch: Batch, rounds: int, device: torch.device, report: Report
) -> list[dict[str, Any]]:
    """Measure one method after the other, each with the GPU's memory for itself."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"way": name}
        rows.append(row)
        try:
            row |= measure_alone(name, make, batch, rounds, device)
        except torch.OutOfMemoryError:
            if dist.get_world_size() > 1:
                raise  # the other ranks wait for this one in a collective
            row["failed"] = "out of memory"
        free_memory(device)
        report(row)
    return rows


def measure_alone(name: str, make: Make, batch: Batch, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure one method: the row of `measure_step`, and the median seconds of `rounds`."""
    method, row = measure_step(name, make, batch, device)
    row["seconds"] = median([time_step(method, batch, device) for _ in range(rounds)])
    return row


def free_memory(device: torch.device) -> None:
    """Give back to the driver what no tensor uses any more."""
    gc.collect()  # wrapped models are in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_step(method: Method, batch: Batch, device: torch.device) -> float:
    """Return the seconds of a step, until all ranks have done it."""
    # A step that is not timed comes first: in training, too, a step finds caches and memory as one of its own kind has
    # left them.
    method.step(batch, device)
    _wait_for_ranks(device)
    start = time.perf_counter()
    method.step(batch, device)
    _wait_for_ranks(device)
    return time.perf_counter() - start


def measure_step(name: str, make: Make, batch: Batch, device: torch.device) -> tuple[Method, dict[str, Any]]:
    """Make a wrapped model, take two steps, and measure the third: its traffic, and this rank's memory in bytes."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    with nullcontext(CpuMemory()) if on_gpu else cpu_memory() as memory:
        method = make(name)
        for _ in range(2):
            method.step(batch, device)
        gc.collect()
        memory.mark()
        if on_gpu:
            torch.cuda.empty_cache()  # what wrapping has freed is not reserved by the step
            torch.cuda.reset_peak_memory_stats(device)
        with Collectives() as collectives:
            method.step(batch, device)
            sent = [count for count in collectives.rows() if count.phase != "control"]
    row = {"wire_bytes": sum(count.wire_bytes for count in sent), "collectives": sum(count.count for count in sent)}
    if on_gpu:
        torch.cuda.synchronize(device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    else:
        row |= {"rest_bytes": memory.at_mark, "peak_bytes": memory.peak}
    return method, row


def _wait_for_ranks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
