"""`mmfsdp bench step`: how near a training step is to what its device can do, beside other methods to wrap the model.

On GPUs: one rank each, nccl, the model of OpenFlamingo's size; on the CPU: two ranks, gloo, the demo's.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ..core.planner import make_plan, with_memory_events
from ..data import Batch
from ..estimate import estimate, step_time
from ..models import Flamingo
from ..models.media_model import MediaModel
from ..params import Device, FSDPParams, Precision, RunParams, TrainParams, load
from ..run.state import text_table
from ..train.meters import input_bytes
from ..train.profile import machine_here
from .bench_models import COMPARED, OURS, Method, measure, random_batch, random_model, wrap_as
from .spawn_ranks import on_ranks

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


def bench_step(*, ranks: int | None = None, rounds: int = 7, samples: int | None = None) -> dict[str, Any]:
    """Measure one optimizer step of each method in bf16: median seconds in interleaved rounds, samples per second,
    share of the device's own matrix rate (counted over what the mix of frozen and trainable needs), peak memory, and
    the predicted peak, and on GPUs the predicted seconds.

    The model is ViT-L/14 with the layout of Llama-3.2-1B on GPUs, and that of the preset tiny on the CPU, with random
    weights. ranks: unset, all GPUs, or 2. samples: of a batch; unset, the configuration's.
    """
    gpus = torch.cuda.device_count()
    params = configuration(on_gpu=gpus > 0)
    if samples:
        params = params.change(**{"train.batch_size": samples})
    backend = "nccl" if gpus else "gloo"
    return on_ranks(_measure, ranks or gpus or 2, params, rounds, method="spawn", backend=backend)[0]


def configuration(*, on_gpu: bool) -> RunParams:
    """Return what is measured."""
    return load("clip_llama_1b").change(**LARGE) if on_gpu else load("tiny")


def _measure(params: RunParams, rounds: int) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, device_name = torch.device("cpu"), "CPU"
    if torch.cuda.is_available():
        device, device_name = torch.device("cuda", rank), torch.cuda.get_device_name(rank)
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    batch = batch_for(params, random_model(params.model, meta=True), rank)
    machine = machine_here(params.launch, device, dtype=torch.bfloat16)

    def make(name: str) -> Method:
        return wrap_as(name, random_model(params.model), batch.inputs(), device=device)

    rows = measure(COMPARED, make, batch, rounds, device)
    for row in rows:
        # For another project's method, the default plan counts the FLOPs.
        model = random_model(params.model, meta=True)
        fsdp = FSDPParams(mixed_precision=Precision.BF16, **OURS.get(row["way"], {}))
        plan = make_plan(model, fsdp, world_size=ranks, example=batch.inputs())
        plan = with_memory_events(model, plan, batch.inputs())
        if device.type == "cpu":  # the batch was made before memory was watched
            row["peak_bytes"] += input_bytes(batch.inputs())
        row["predicted_peak"] = row["predicted_seconds"] = None
        if row["way"] in OURS:
            train = TrainParams(device=Device(device.type))
            row["predicted_peak"] = estimate(plan, train).peak_bytes
            if device.type == "cuda":
                row["predicted_seconds"] = step_time(plan, train, machine=machine).overlapped
        row["flops"] = plan.flops
        row["samples_per_s"] = batch.size * ranks / row["seconds"]
        row["utilization"] = row["flops"] / row["seconds"] / machine.flops
    numel = sum(unit.numel for unit in plan.units)
    trainable = sum(unit.trainable_numel for unit in plan.units)
    title = (
        f"{params.launch.name}, {numel / 1e6:,.1f} M parameters, {trainable / numel:.1%} of them trainable; {ranks} x "
        f"{device_name}; {batch.size} samples of a picture and {params.data.max_length} tokens a rank; bf16"
    )
    dist.barrier()
    return {"title": title, "rounds": rounds, "rates": asdict(machine), "rows": rows}


def batch_for(params: RunParams, model: MediaModel, rank: int) -> Batch:
    """Return a rank's batch of the sizes that the parameters and the model ask for."""
    assert isinstance(model, Flamingo), "config: names no Flamingo"
    size = (params.train.batch_size, params.data.max_length)
    side = model.vision_encoder.item_shape[-1]
    return random_batch(model.tokens.known, model.tokens.image, size, side, seed=rank)


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    machine = result["rates"]
    measured = (
        f"measured here: {machine['flops'] / 1e12:,.2f} TFLOP/s in bf16, {machine['memory'] / 1e9:,.1f} GB/s memory, "
        f"{machine['bandwidth'] / 1e9:,.2f} GB/s between ranks"
    )
    lines = [("", "seconds", "predicted", "samples/s", "of rate", "peak MB", "predicted", "sent MB")]
    for row in result["rows"]:
        seconds, peak = row["seconds"], row["peak_bytes"]
        times = (f"{seconds:.4f}", _difference(row["predicted_seconds"], seconds))
        rates = (f"{row['samples_per_s']:.2f}", f"{row['utilization']:.1%}")
        sizes = (f"{peak / 1e6:.1f}", _difference(row["predicted_peak"], peak), f"{row['wire_bytes'] / 1e6:.2f}")
        lines.append((row["way"], *times, *rates, *sizes))
    return "\n".join([result["title"], measured, text_table(lines), "predicted: beside measured"])


def _difference(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{predicted / measured - 1:+.1%}"
