"""`mmfsdp bench step`: how near a training step is to what its device can do, beside other ways to wrap the model.

On GPUs: one rank each, nccl, the model of OpenFlamingo's size; on the CPU: two ranks, gloo, the demo's.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import runs
from ..build import build_model
from ..data import Batch
from ..estimate import estimate, step_time
from ..freeze import freeze
from ..measure import Collectives, cpu_memory
from ..models import Flamingo
from ..params import Device, FSDPParams, ModelParams, Precision, RunParams, TrainParams, load
from ..plan import make_plan, with_moments
from ..step import train_step
from ..train.machine import machine_here
from ..train.place import Place
from ..train.record import Record
from .models import open_gates
from .ranks import on_ranks
from .ways import OURS, THEIRS, WAYS, Way, wrapped

COMPARED = (THEIRS[0], "DDP", *(name for name in WAYS if name.startswith("frozen-aware")))
COMPILED = f"{COMPARED[-1]}, compiled"
LARGE: dict[str, Any] = {"model.vision.source": "open_clip", "model.vision.name": "ViT-L-14"}
LARGE |= {"model.vision.weights": None, "model.vision.config": {}, "model.cross_attention_every": 1}
LARGE |= {"data.max_length": 512, "launch.name": "ViT-L-14_Llama-3.2-1B"}
"""What is put on a GPU, as changes of the preset clip_llama_1b."""


def bench_step(
    *,
    config: str | None = None,
    ranks: int | None = None,
    rounds: int = 7,
    samples: int | None = None,
    length: int | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """One optimizer step of each way in bf16: median seconds in interleaved rounds, samples per second, share of the
    device's own matrix rate (counted over what the mix of frozen and trainable needs), peak memory, and both predicted.

    config: preset or YAML file of a Flamingo, whose weights are drawn at random; unset, on GPUs ViT-L/14 and the layout
    of Llama-3.2-1B, and tiny on the CPU. ranks: unset, all GPUs, or 2. samples, length: of a batch; unset, the
    configuration's. compiled: REPLICATE once more, its units compiled.
    """
    gpus = torch.cuda.device_count()
    params = load(config) if config else configuration(on_gpu=gpus > 0)
    params = params.change(**{"train.batch_size": samples or params.train.batch_size})
    params = params.change(**{"data.max_length": length or params.data.max_length, "fsdp.mixed_precision": "bf16"})
    ranks = ranks or gpus or 2
    backend = "nccl" if gpus else "gloo"
    return on_ranks(_measure, ranks, params, rounds, compiled, method="spawn", backend=backend)[0]


def configuration(*, on_gpu: bool) -> RunParams:
    """What is measured where no configuration is named."""
    return load("clip_llama_1b").change(**LARGE) if on_gpu else load("tiny")


def _measure(params: RunParams, rounds: int, compiled: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    batch = batch_for(params, random_model(params.model, meta=True), rank)
    machine = machine_here(params.launch, device, dtype=torch.bfloat16)
    ways, rows = [], []
    for name in (*COMPARED, COMPILED)[: len(COMPARED) + compiled]:
        way, row = _first(name, params, batch, device)
        ways.append(way)
        rows.append(row)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            _timed(way, batch, device)  # in training, too, a step finds memory as one of its own kind has left it
            seconds[way.name].append(_timed(way, batch, device))
    for row in rows:
        mine, first = seconds[row["way"]], seconds[COMPARED[0]]
        row["seconds"] = median(mine)
        row["ratio"] = median(a / b for a, b in zip(mine, first, strict=True))
        row["to_ddp"] = median(a / b for a, b in zip(mine, seconds["DDP"], strict=True))
        row["samples_per_s"] = batch.size * ranks / row["seconds"]
        row["utilization"] = row["flops"] / row["seconds"] / machine.flops
    found = {"title": _title(params, ways[-1].model, ranks, device), "rounds": rounds, "rates": asdict(machine)}
    found["metrics_s"] = _metrics(params, ways[-1], batch, device)
    dist.barrier()
    return found | {"rows": rows}


def _first(name: str, params: RunParams, batch: Batch, device: torch.device) -> tuple[Way, dict[str, Any]]:
    """Wrap, take two steps, and look at the memory of the second; what was predicted of it."""
    model = random_model(params.model, meta=True)
    fsdp = FSDPParams(mixed_precision=Precision.BF16, **OURS.get(name, {}))  # as `wrapped` has it
    plan = make_plan(model, fsdp, world_size=dist.get_world_size(), example=batch.inputs())
    plan = with_moments(model, plan, batch.inputs())
    row: dict[str, Any] = {"way": name, "flops": plan.flops, "predicted_peak": None, "predicted_seconds": None}
    if name in OURS:
        train = TrainParams(device=Device(device.type))
        machine = machine_here(params.launch, device, dtype=torch.bfloat16, plan=plan)
        row["predicted_peak"] = estimate(plan, train).peak_bytes
        row["predicted_seconds"] = step_time(plan, train, machine=machine).overlapped

    def steps(mark: Callable[[], None]) -> Way:
        way = wrapped(name, random_model(params.model), "flamingo", example=batch.inputs(), device=device)
        for _ in range(2):
            way.step([_given(way, batch, device)])
        gc.collect()
        mark()
        with Collectives() as counted:
            way.step([_given(way, batch, device)])
            row["wire_bytes"] = counted.wire_bytes
        return way

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        way = steps(lambda: torch.cuda.reset_peak_memory_stats(device))
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    else:
        with cpu_memory() as memory:
            way = steps(memory.mark)
        there = [batch.input_ids, batch.attention_mask, batch.labels, *batch.media.values()]  # before it was counted
        row["peak_bytes"] = memory.peak + sum(tensor.nbytes for tensor in there if tensor is not None)
    return way, row


def random_model(params: ModelParams, *, meta: bool = False) -> Flamingo:
    """The model with random weights, the same on every rank; its tables not tied, for those who cannot wrap such."""
    torch.manual_seed(0)
    config = {**params.language.config, "tie_word_embeddings": False}
    language = replace(params.language, weights=None, config=config)
    if "model_type" in config:
        language = replace(language, name="")  # else its tokenizer would be looked for
    model, _ = build_model(replace(params, vision=replace(params.vision, weights=None), language=language), meta=meta)
    assert isinstance(model, Flamingo), "config: names no Flamingo"
    open_gates(model)
    freeze(model, params.freeze)
    return model


def batch_for(params: RunParams, model: Flamingo, rank: int) -> Batch:
    """Samples of a picture and text each, without padding."""
    g = torch.Generator().manual_seed(rank)
    size, length = params.train.batch_size, params.data.max_length
    ids = torch.randint(0, model.tokens.known, (size, length), generator=g)
    ids[:, 0] = model.tokens.image
    labels = ids.clone()
    labels[:, 0] = -100
    pictures = torch.randn(size, 1, *model.vision_encoder.item_shape, generator=g)
    media = {"vision": pictures if pictures.ndim == 6 else pictures[:, :, None]}
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, media=media)


def _metrics(params: RunParams, way: Way, batch: Batch, device: torch.device) -> float:
    """Seconds that writing down a step takes a rank."""
    row = train_step(way.model, [batch], way.optimizer)
    with tempfile.TemporaryDirectory() as name:
        folder, place, often = Path(name), Place(step=2), 200
        beat = runs.Beat(folder, 1)
        record = Record(folder, params.train, device, place, runs.MetricsWriter(folder, 1))
        with redirect_stdout(Path(name, "log").open("w")):
            began = time.perf_counter()
            for _ in range(often):
                beat("step 2 data")
                beat("step 2 compute")
                row._read.clear()
                record.add(row, [batch], step_s=1.0, data_s=0.0, wire_bytes=0, memory_bytes=0)
            return (time.perf_counter() - began) / often


def _timed(way: Way, batch: Batch, device: torch.device) -> float:
    dist.barrier()
    began = time.perf_counter()
    way.step([_given(way, batch, device)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _given(way: Way, batch: Batch, device: torch.device) -> Batch:
    """As a loader gives it: `train_step` counts label tokens on the host and moves the batch itself."""
    if way.mask is not None:
        return batch.to(device)
    return batch.pin_memory() if device.type == "cuda" else batch


def _title(params: RunParams, model: nn.Module, ranks: int, device: torch.device) -> str:
    plan: Any = model.mmfsdp_plan
    numel, trains = sum(u.numel for u in plan.units), sum(u.trainable_numel for u in plan.units)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return (
        f"{params.launch.name}, {numel / 1e6:,.1f} M parameters, {trains / numel:.1%} of them trainable; {ranks} x "
        f"{name}; {params.train.batch_size} samples of a picture and {params.data.max_length} tokens a rank; bf16"
    )


def table(found: dict[str, Any]) -> str:
    """The rows as text."""
    rates = found["rates"]
    lines = [
        found["title"],
        f"measured here: {rates['flops'] / 1e12:,.2f} TFLOP/s in bf16, {rates['memory'] / 1e9:,.1f} GB/s memory, "
        f"{rates['bandwidth'] / 1e9:,.2f} GB/s between ranks",
        f"{'':26}{'seconds':>9}{'x':>7}{'x DDP':>7}{'predicted':>10}{'samples/s':>11}{'of rate':>8}{'peak MB':>10}"
        f"{'x':>7}{'predicted':>10}{'sent MB':>10}",
    ]
    for row in found["rows"]:
        apart = _apart(row["predicted_seconds"], row["seconds"]), _apart(row["predicted_peak"], row["peak_bytes"])
        lines.append(
            f"{row['way']:26}{row['seconds']:>9.4f}{row['ratio']:>7.3f}{row['to_ddp']:>7.3f}"
            f"{apart[0]:>10}"
            f"{row['samples_per_s']:>11.2f}{row['utilization']:>8.1%}{row['peak_bytes'] / 1e6:>10.1f}"
            f"{row['peak_bytes'] / found['rows'][0]['peak_bytes']:>7.3f}"
            f"{apart[1]:>10}{row['wire_bytes'] / 1e6:>10.2f}"
        )
    lines.append("x: to the first row, medians over rounds of the round's ratio; predicted: beside measured")
    ours = found["rows"][len(COMPARED) - 1]
    share = found["metrics_s"] / ours["seconds"]
    lines.append(f"A row of metrics takes {found['metrics_s'] * 1e6:.0f} microseconds, {share:.3%} of a step.")
    return "\n".join(lines)


def _apart(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{predicted / measured - 1:+.1%}"
