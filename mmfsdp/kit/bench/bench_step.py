"""`mmfsdp bench step`: how near a training step is to what its device can do, compared with other methods to wrap
the model.

On GPUs: one rank each, nccl, the model of OpenFlamingo's size; on the CPU: two ranks, gloo, the demo's.
"""

from __future__ import annotations

import os
import sys
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from ...core.collectives import group_device
from ...params import FSDPParams, ParamError, Precision, RunParams, load
from ...planning import make_plan
from ...predict.batch_work import parameters_of
from ...predict.cards import peak_of
from ...predict.plan_cache import PlanCache
from ..data import Batch
from ..models import Flamingo
from ..models.media_model import MediaModel
from ..run.state import text_table
from ..spawn_ranks import on_ranks
from .bench_models import COMPARED, Method, copy_to, measure, random_batch, random_model, size_text, wrap_as

LARGE: dict[str, Any] = {
    "model.vision.source": "open_clip",
    "model.vision.name": "ViT-L-14",
    "model.vision.weights": None,
    "model.vision.config": {},
    "model.cross_attention_every": 1,
    "data.max_length": 512,
    "launch.name": "ViT-L-14_Llama-3.2-1B",
}
"""Run that is measured on a GPU, as changes of the preset clip_llama_1b."""
COLUMNS = ("seconds", "samples/s", "of rate", "peak MB", "sent MB")
COLUMNS_OF_CARD = ("seconds", "samples/s", "MFU", "HFU", "peak MB", "sent MB")
"""Columns that are shown where the card's peak is known."""


def bench_step(*, ranks: int | None = None, rounds: int = 7, samples: int | None = None) -> dict[str, Any]:
    """Measure one optimizer step of each method in bf16: median seconds in interleaved rounds, samples per second,
    MFU and HFU, or where the card is unknown the share of its measured matrix rate, and peak memory. FLOPs are those
    that the mix of frozen and trainable needs.

    The model is ViT-L/14 with the layout of Llama-3.2-1B on GPUs, and the preset tiny's on the CPU, with random
    weights. On GPUs the methods are measured one after the other, and each is printed as soon as it is known.
    ranks: unset, all GPUs, or 2. samples: of a rank; unset, as in the preset. Raises ParamError for more ranks than
    GPUs.
    """
    gpus = torch.cuda.device_count()
    if gpus and ranks and ranks > gpus:
        raise ParamError("ranks", f"{ranks} need a GPU each, and this machine has {gpus}; set it to at most {gpus}")
    params = load("clip_llama_1b").change(**LARGE) if gpus else load("tiny")
    if samples:
        params = params.change(**{"train.batch_size": samples})
    backend = "nccl" if gpus else "gloo"
    return on_ranks(_measure, ranks or gpus or 2, params, rounds, method="spawn", backend=backend)[0]


def _measure(params: RunParams, rounds: int) -> dict[str, Any]:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), group_device()
    on_gpu = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    if on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    model = random_model(params.model)
    batch = batch_for(params, model, rank)
    if on_gpu:
        batch = batch.pin_memory()  # as the loader does
    flops = matrix_rate(device)
    peak = peak_of(device_name, fp32=False)
    cache = PlanCache()
    # Each method needs the FLOPs of this plan.
    fsdp = FSDPParams(mixed_precision=Precision.BF16)
    plan = make_plan(model, fsdp, world_size=ranks, example=batch.inputs(), cache=cache)
    flops_6n = 6 * parameters_of(plan) * batch.input_ids.numel()

    def make(name: str) -> Method:
        return wrap_as(name, copy_to(model, device), batch.inputs(), device=device, cache=cache)

    def complete(row: dict[str, Any]) -> None:
        if "failed" not in row:
            row["samples_per_s"] = batch.size * ranks / row["seconds"]
            row["utilization"] = plan.flops / row["seconds"] / flops
            row["hardware_utilization"] = plan.hardware_flops / row["seconds"] / flops
            if peak:
                row["mfu"] = plan.flops / row["seconds"] / peak
                row["hfu"] = plan.hardware_flops / row["seconds"] / peak
                row["mfu_6n"] = flops_6n / row["seconds"] / peak
        if on_gpu and rank == 0:  # the table comes minutes later
            print(f"  {row['way']}: {', '.join(_cells(row))}", file=sys.stderr, flush=True)

    rows = measure(COMPARED, make, batch, rounds, device, complete)
    title = (
        f"{params.launch.name}, {size_text(model)}; {ranks} x {device_name}; {batch.size} samples of a picture and "
        f"{params.data.max_length} tokens a rank; bf16, in which products reach {flops / 1e12:,.2f} TFLOP/s here"
    )
    if peak:
        title += f" of {peak / 1e12:,.0f}; 6 N would say {flops_6n / plan.flops:.2f} times the MFU"
    dist.barrier()
    figures = {"flops": plan.flops, "flops_6n": flops_6n, "matrix_flops": flops, "peak_flops": peak}
    return {"title": title, "rounds": rounds, **figures, "rows": rows}


def matrix_rate(device: torch.device) -> float:
    """Return the FLOPs per second that this rank reaches in products of large matrices in bf16."""
    width = 4096 if device.type == "cuda" else 256
    # Random numbers: a GPU draws less power for constant ones, and runs at a higher clock.
    variables = {"matrix": torch.randn(width, width, device=device, dtype=torch.bfloat16)}
    seconds = []
    # The layouts of a linear layer: its forward, its input's gradient, its weight's. A CPU that emulates bf16 takes
    # forty times as long for one as for another.
    for product in ("matrix @ matrix.T", "matrix @ matrix", "matrix.T @ matrix"):
        timer = Timer(product, globals=variables, num_threads=torch.get_num_threads())
        seconds.append(timer.blocked_autorange().median)
    return 2 * width**3 / min(seconds)


def batch_for(params: RunParams, model: MediaModel, rank: int) -> Batch:
    """Return a rank's batch of the sizes that the parameters and the model ask for."""
    assert isinstance(model, Flamingo), "config: names no Flamingo"
    size = (params.train.batch_size, params.data.max_length)
    side = model.vision_encoder.item_shape[-1]
    return random_batch(model.tokens.known, model.tokens.image, size, side, seed=rank)


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    columns = COLUMNS_OF_CARD if any("mfu" in row for row in result["rows"]) else COLUMNS
    lines = [("", *columns)]
    for row in result["rows"]:
        cells = _cells(row)
        lines.append((row["way"], *cells, *[""] * (len(columns) - len(cells))))
    return "\n".join([fill(result["title"], 80), text_table(lines)])


def _cells(row: dict[str, Any]) -> list[str]:
    """Return the texts of the columns, or the reason why there are none."""
    if "failed" in row:
        return [row["failed"]]
    rates = [f"{row['seconds']:.4f}", f"{row['samples_per_s']:.2f}"]
    shares = [f"{row['utilization']:.1%}"]
    if "mfu" in row:
        shares = [f"{row['mfu']:.1%}", f"{row['hfu']:.1%}"]
    return [*rates, *shares, f"{row['peak_bytes'] / 1e6:.1f}", f"{row['wire_bytes'] / 1e6:.2f}"]
