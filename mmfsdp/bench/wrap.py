"""`mmfsdp bench wrap`: what each way to shard a mostly frozen model sends, holds and takes, in interleaved rounds.

The baselines are written here as their projects have them: OpenFlamingo (FSDP1, every module wrapped twice, gathered
in fp32, reduced in bf16, computed under autocast; decoder un-frozen and kept from the optimizer; each module clipped
by itself), also in our formats; FSDP2 per layer (Cornstarch's documentation).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from ..checkpoint import count_changed, frozen_checksums
from ..data import Batch
from ..freeze import freeze
from ..measure import Collectives, cpu_memory
from ..models import Flamingo, ModalEncoder, MultimodalModel, TokenIds, build_language, build_vision
from ..params import BackboneParams, BackboneSource, FSDPParams, ModelParams
from ..step import train_step
from ..wrap import wrap_fsdp

WORDS, PICTURE, LENGTH = 1000, 32, 16
CLIP = 0.1
LAYERS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
CLASSES = {"flamingo": "FlamingoLayer,ResidualAttentionBlock", "projector": "LlamaDecoderLayer,ResidualAttentionBlock"}
KEPT = {"sharding_strategy": "SHARD_GRAD_OP"}
OURS: dict[str, dict[str, Any]] = {
    "DDP": {"backend": "DDP"},
    "FSDP1 by layer (Oumi, Zeta)": {"backend": "FSDP1", **LAYERS},
    "FSDP2, root only": {"auto_wrap_policy": "NO_WRAP"},
    "frozen-aware SHARD": {},
    "frozen-aware KEEP": {"frozen_policy": "KEEP", **KEPT},
    "frozen-aware REPLICATE": {"frozen_policy": "REPLICATE", **KEPT},
}
THEIRS = ("OpenFlamingo's scheme", "the same in our formats", "FSDP2 per layer (Cornstarch)")


def bench_wrap(
    *, model: str = "flamingo", ranks: int = 2, rounds: int = 5, width: int = 512, accumulation: int = 1
) -> list[dict[str, Any]]:
    """One optimizer step of each way: bytes sent, collectives, memory at rest and at its peak, median seconds, and how
    far gradient and clipped norm are from one process in fp32.

    model: flamingo (a quarter trains) or projector (an encoder-projector-LM model of which only the projector trains).
    width: of the language model; 512 makes about 50 M parameters. accumulation: micro-steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, folder, model, rounds, width, accumulation)
        mp.start_processes(_rank, args, nprocs=ranks, start_method="spawn")
        return json.loads(Path(folder, "rows.json").read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, with ratios to the first."""
    head = f"{'':30}{'sent MB':>10}{'x':>7}{'calls':>7}{'rest MB':>9}{'peak MB':>9}{'x':>6}{'seconds':>9}{'x':>6}"
    naive = next(row["gradient_crc"] for row in rows if row["way"] == THEIRS[2])
    lines = [head + f"{'gradient':>10}{'=':>2}{'clipped':>9}{'frozen':>7}"]
    for row in rows:
        x = {key: row[key] / (rows[0][key] or 1) for key in ("wire_bytes", "peak_bytes", "seconds")}
        lines.append(
            f"{row['way']:30}{row['wire_bytes'] / 1e6:>10.2f}{x['wire_bytes']:>7.3f}{row['collectives']:>7}"
            f"{row['rest_bytes'] / 1e6:>9.1f}{row['peak_bytes'] / 1e6:>9.1f}{x['peak_bytes']:>6.2f}"
            f"{row['seconds']:>9.3f}{x['seconds']:>6.2f}{row['gradient_error']:>10.1e}"
            f"{'=' if row['gradient_crc'] == naive else '':>2}"
            f"{row['clipped_norm'] / CLIP:>8.2f}x{row['frozen_changed']:>7}"
        )
    notes = (
        "sent, rest, peak: of rank 0. gradient: relative error beside one process in fp32; = where its bits are those"
    )
    more = (
        "of FSDP2 per layer. clipped: norm after clipping, over the norm asked for. frozen: frozen parameters changed."
    )
    return "\n".join([*lines, notes, more])


@dataclass
class Way:
    """A wrapped model that trains."""

    name: str
    model: nn.Module
    optimizer: AdamW
    clip: Callable[[], None] | None = None
    """The baseline's own clipping; else `train_step` does all."""

    def step(self, batches: list[Batch]) -> None:
        """One optimizer step."""
        if self.clip is None:
            train_step(self.model, batches, self.optimizer, max_grad_norm=CLIP)
            return
        self.backward(batches)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batches: list[Batch]) -> None:
        """Forward and backward of the mean over this rank's batches."""
        for batch in batches:
            (self.model(**batch.inputs()).loss / len(batches)).backward()


def _rank(rank: int, ranks: int, folder: str, kind: str, rounds: int, width: int, accumulation: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    try:
        batches = [batch_of(kind, seed=10 * i + rank) for i in range(accumulation)]
        true = _true_gradient(kind, width, ranks, accumulation)
        ways, rows = [], []
        for name in (*THEIRS, *OURS):
            way, row = _first_steps(name, kind, width, batches, true)
            ways.append(way)
            rows.append(row)
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                dist.barrier()
                start = time.perf_counter()
                way.step(batches)
                seconds[way.name].append(time.perf_counter() - start)
        for row in rows:
            row |= {"seconds": statistics.median(seconds[row["way"]]), "rounds": seconds[row["way"]]}
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _first_steps(
    name: str, kind: str, width: int, batches: list[Batch], true: dict[str, torch.Tensor]
) -> tuple[Way, dict[str, Any]]:
    """Wrap, take two steps, and look at the second; then at one gradient."""
    with cpu_memory() as memory:
        way = wrapped(name, build(kind, width), kind)
        before = frozen_checksums(way.model)
        error, norm, bits = _gradient(way, batches, true)
        way.step(batches)
        memory.mark()
        with Collectives() as counted:
            way.step(batches)
            rows = counted.rows()
    calls = [r for r in rows if r.phase != "control"]
    return way, {
        "way": name,
        "wire_bytes": sum(r.wire_bytes for r in calls),
        "collectives": sum(r.count for r in calls),
        "rest_bytes": memory.at_mark,
        "peak_bytes": memory.peak,
        "gradient_error": error,
        "gradient_crc": bits,
        "clipped_norm": norm,
        "frozen_changed": count_changed(before, frozen_checksums(way.model)),
    }


def wrapped(name: str, model: nn.Module, kind: str) -> Way:
    """A model wrapped in the way of this name, in bf16 with fp32 reduction."""
    if name in THEIRS[:2]:
        return _openflamingo(name, model)
    if name == THEIRS[2]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        classes = CLASSES[kind].split(",")
        for module in [m for m in model.modules() if type(m).__name__ in classes]:
            fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        by_layer = OURS[name].items() >= LAYERS.items()
        fields = OURS[name] | ({"transformer_layer_cls": CLASSES[kind]} if by_layer else {})
        example = batch_of(kind, seed=0).inputs()
        model = wrap_fsdp(model, FSDPParams(mixed_precision="bf16", **fields), example=example)  # type: ignore[arg-type]
    return Way(name, model, AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True))


def _openflamingo(name: str, model: nn.Module) -> Way:
    """FSDP1 around each part twice; frozen decoder layers are un-frozen for that and kept from the optimizer."""
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    theirs = name == THEIRS[0]
    dtypes = MixedPrecision(
        param_dtype=torch.float32 if theirs else torch.bfloat16,
        reduce_dtype=torch.bfloat16 if theirs else torch.float32,
    )
    if theirs:
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)  # type: ignore[method-assign]

    def twice(path: str) -> None:
        parent, _, key = path.rpartition(".")
        module, cpu = model.get_submodule(path), torch.device("cpu")
        for _ in range(2):
            module = FullyShardedDataParallel(module, mixed_precision=dtypes, device_id=cpu, use_orig_params=True)
        setattr(model.get_submodule(parent), key, module)

    names = [n for n, m in model.named_modules() if type(m).__name__ in ("LlamaDecoderLayer", "GatedCrossAttention")]
    for path in names:
        model.get_submodule(path).requires_grad_(True)
    ends = ["perceiver", "projectors.vision", "language_model.model.embed_tokens", "language_model.lm_head"]
    ends += ["vision_encoder", "encoders.vision"]
    known = dict(model.named_modules())
    clipped = [p for p in [*names, *ends[:3]] if p in known and any(n.startswith(f"{p}.") for n in trains)]
    for path in [p for p in [*names, *ends] if p in known]:
        twice(path)
    optimizer = AdamW(
        [p for n, p in model.named_parameters() if n.replace("_fsdp_wrapped_module.", "") in trains],
        lr=1e-4,
        fused=True,
    )

    def clip() -> None:
        for path in clipped:
            module = model.get_submodule(path)
            assert isinstance(module, FullyShardedDataParallel)
            module.clip_grad_norm_(CLIP)

    return Way(name, model, optimizer, clip)


def _gradient(way: Way, batches: list[Batch], true: dict[str, torch.Tensor]) -> tuple[float, float, int]:
    """(relative error of the gradient, norm of the clipped one, checksum), at the first weights; ours take a step."""
    way.backward(batches)
    whole = _whole_gradients(way.model, true)
    wrong = sum(float((whole[n] - g).square().sum()) for n, g in true.items())
    error = (wrong / sum(float(g.square().sum()) for g in true.values())) ** 0.5
    bits = 0
    for g in whole.values():
        bits = zlib.crc32(g.numpy().tobytes(), bits)
    if way.clip is not None:
        way.clip()
        clipped = _norm(_whole_gradients(way.model, true))
        way.model.zero_grad()
        return error, clipped, bits
    way.model.zero_grad()
    said = train_step(way.model, batches, way.optimizer, max_grad_norm=CLIP).grad_norm
    return error, _norm(whole) * min(1.0, CLIP / said), bits


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return sum(float(g.square().sum()) for g in gradients.values()) ** 0.5


def _whole_gradients(model: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of all ranks' shards put together, in fp32, by the plain names."""
    found: dict[str, torch.Tensor] = {}
    fsdp1 = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
    with (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False) if fsdp1 else nullcontext()
    ):
        for name, p in model.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            if name in wanted and p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                found[name] = grad.detach().float().clone()
    return {name: found.get(name, torch.zeros_like(g)) for name, g in wanted.items()}


def _true_gradient(kind: str, width: int, ranks: int, accumulation: int) -> dict[str, torch.Tensor]:
    """One process over the batches of all ranks, fp32."""
    model = build(kind, width)
    shares = [(rank, i) for rank in range(ranks) for i in range(accumulation)]
    for rank, i in shares:
        (model(**batch_of(kind, seed=10 * i + rank).inputs()).loss / len(shares)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def build(kind: str, width: int) -> nn.Module:
    """A frozen vision encoder and language model, and what trains between them: the same weights each time."""
    torch.manual_seed(0)
    picture = {"image_size": PICTURE, "patch_size": 16, "width": width * 3 // 4, "layers": 6, "head_width": width // 8}
    vision = build_vision(
        BackboneParams(source=BackboneSource.OPEN_CLIP, config={"embed_dim": width, "vision_cfg": picture})
    )
    text = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": 8, "vocab_size": WORDS}
    language = build_language(BackboneParams(config={"model_type": "llama", "num_attention_heads": 8, **text}))
    if kind == "projector":
        model: nn.Module = MultimodalModel({"vision": ModalEncoder(vision)}, language, placeholders={"vision": WORDS})
        freeze(model, ("encoders.*", "language_model.*"))
        return model
    model = Flamingo(
        vision,
        language,
        tokens=TokenIds.after(WORDS),
        cross_attention_every=2,
        num_latents=8,
        perceiver_depth=1,
        attention_heads=6,
        attention_head_dim=width // 8,
    )
    for name, p in model.named_parameters():
        if name.endswith("_gate"):
            p.data.fill_(0.5)  # at 0 nothing behind them would learn
    freeze(model, ModelParams(language=BackboneParams(name="any")).freeze)
    return model


def batch_of(kind: str, *, seed: int) -> Batch:
    """Two samples of a picture each, with as many label tokens on every rank."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (2, LENGTH), generator=g)
    picture = (PICTURE // 16) ** 2 if kind == "projector" else 1
    ids[:, :picture] = WORDS if kind == "projector" else TokenIds.after(WORDS).image
    labels = ids.clone()
    labels[:, :picture] = -100
    media = {"vision": torch.randn(2, 1, 1, 3, PICTURE, PICTURE, generator=g)}
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, media=media)
