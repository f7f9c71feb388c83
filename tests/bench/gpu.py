"""The parts of `tests/bench/gpu.sh`: `python -m tests.bench.gpu PART --json FILE`. Each prints a table."""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers

from mmfsdp.cli.bench_models import wrap_as
from mmfsdp.cli.bench_step import matrix_rate
from mmfsdp.cli.spawn_ranks import on_ranks
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.data.batch import Batch
from mmfsdp.estimate import estimate, machine_of, step_time
from mmfsdp.estimate.make_plan import make_plan
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.run.folder import read_json
from mmfsdp.train.meters import Collectives, cpu_memory
from mmfsdp.train.optimizer import build_optimizer, build_scaler
from tests import families
from tests.bench import peaks
from tests.tiny import Mapping

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BACKEND = "nccl" if ON_GPU else "gloo"
KEEP = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
WRAPS: dict[str, dict[str, Any]] = {
    "DDP": {"backend": "DDP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 KEEP": {"backend": "FSDP1", **KEEP},
    "FSDP1 REPLICATE": {"backend": "FSDP1", "frozen_policy": "REPLICATE"},
    "FSDP2": {},
    "FSDP2 KEEP": KEEP,
    "FSDP2 REPLICATE": {"frozen_policy": "REPLICATE"},
}
MORE: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": "all", "mixed_precision": "bf16"},
    "offloaded": {"cpu_offload": True, "mixed_precision": "bf16"},
    "compiled": {"compile_units": True, "mixed_precision": "bf16"},
    "int8": {"frozen_dtype": "int8", "mixed_precision": "bf16"},
    "nf4": {"frozen_dtype": "nf4", "mixed_precision": "bf16"},
}
QWEN_3B = {
    "text_config": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
    "tie_word_embeddings": True,
}
"""Qwen2.5-VL-3B-Instruct's sizes: huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct, config.json."""


def machine() -> list[dict[str, Any]]:
    """Return what this machine is, and the rate of matrix products that it reaches."""
    name = torch.cuda.get_device_name(DEVICE) if ON_GPU else "CPU"
    row = {"device": name, "count": torch.cuda.device_count(), "cuda": str(torch.version.cuda)}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return [row | {"matrix FLOP/s": matrix_rate(DEVICE)}]


def works() -> list[dict[str, Any]]:
    """Return, for each way to wrap in bf16 and fp16, predicted beside measured traffic and memory of a step."""
    cases = {f"{name} {form}": {**f, "mixed_precision": form} for form in ("bf16", "fp16") for name, f in WRAPS.items()}
    cases |= MORE
    if not ON_GPU:  # fewer; and a compiler's own memory would be counted
        cases = {name: fields for name, fields in cases.items() if "fp16" not in name and name != "compiled"}
    return on_ranks(_works, torch.cuda.device_count() or 2, cases, method="spawn", backend=BACKEND)[0]


def _works(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, fields in cases.items():
        row: dict[str, Any] = {"way": name}
        rows.append(row)
        try:
            row |= _one_way(fields)
        except Exception as error:  # the others are measured all the same, and the part fails
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return rows


def _one_way(fields: dict[str, Any]) -> dict[str, Any]:
    case = peaks.Case("flamingo", fields)
    plan = case.plan(dist.get_world_size())
    gc.collect()  # wrapped models are in cycles: the one before would be freed, and counted, while this one is measured
    peak, model, optimizer, wire, losses = 0, None, None, [], []

    def steps(mark: Callable[[], None]) -> None:
        nonlocal model, optimizer, wire
        built, batches = case.make()
        model = apply_plan(built, plan, device=DEVICE)
        optimizer, _ = build_optimizer(model, TrainParams())
        scaler = build_scaler(model)
        for number in range(4):
            if number == 3:  # AdamW's states exist then, and DDP has made its buckets anew
                mark()
            with Collectives() as collectives:
                losses.append(train_step(model, batches, optimizer, max_grad_norm=1.0, scaler=scaler).loss)
                wire = collectives.rows()

    if ON_GPU:
        torch.randn(64, 64, device=DEVICE).matmul(torch.randn(64, 64, device=DEVICE))  # cuBLAS takes its workspace
        before = torch.cuda.memory_allocated(DEVICE)
        steps(lambda: torch.cuda.reset_peak_memory_stats(DEVICE))
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
    else:
        with cpu_memory() as memory:
            steps(memory.mark)
        peak = memory.peak
    cost = estimate(plan, TrainParams(device=DEVICE.type))
    sent = sum(row.wire_bytes for row in wire)
    return {
        "sent": sent,
        "sent as predicted": sent == cost.wire_bytes,
        "peak MB": peak / 1e6,
        "predicted / measured": (cost.peak_bytes or 0) / peak,
        "loss falls": losses[-1] < losses[0],
    }


def demo(folder: Path) -> list[dict[str, Any]]:
    """Run the demo here; then a run that begins on the CPU and goes on here."""
    options = ["--launch.folder", str(folder), "--launch.replace", "--train.eval-samples", "200" if ON_GPU else "8"]
    options += ["--launch.ranks", "1"] + ([] if ON_GPU else ["--train.steps", "20", "--train.warmup-steps", "5"])
    _mmfsdp("run", "--config", "tiny", "--launch.name", "demo", *options)
    half = ["--launch.folder", str(folder), "--launch.replace", "--launch.ranks", "1", "--launch.name", "half"]
    half += ["--train.steps", "60", "--train.warmup-steps", "5", "--train.save-every", "10", "--train.async-save"]
    half += ["--train.batch-size", "8"]
    _mmfsdp("launch", "--config", "tiny", "--train.device", "cpu", *half)
    run = folder / "half"
    until = time.monotonic() + 100
    while not list(run.glob("checkpoints/step_*/complete.json")) and time.monotonic() < until:
        time.sleep(0.2)
    _mmfsdp("cancel", str(run))
    params = run / "params.yaml"
    params.write_text(params.read_text().replace("device: cpu", f"device: {DEVICE.type}"))
    _mmfsdp("resume", str(run))
    rows = []
    for name in ("demo", "half"):
        result = read_json(folder / name / "result.json") or {}
        keys = ("heldout_exact_match", "frozen_parameters_changed", "wire_bytes_measured", "wire_bytes_predicted")
        row = {"run": name} | {key: result.get(key) for key in keys}
        rows.append(row if result else row | {"failed": "it left no result"})
    return rows


def _mmfsdp(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "mmfsdp", *words], check=True)


def step() -> list[dict[str, Any]]:
    """Return `mmfsdp bench step` at the largest batch that fits every method."""
    samples, rows, until = (8, [], time.monotonic() + 80) if ON_GPU else (2, [], 0.0)
    while True:
        words = ["bench", "step", "--rounds", "3", "--samples", str(samples)]
        done = subprocess.run([sys.executable, "-m", "mmfsdp", *words], capture_output=True, text=True)
        print(done.stdout, done.stderr[-500:], flush=True)
        if done.returncode:
            return rows or [{"samples": samples, "failed": done.stderr.strip().splitlines()[-1]}]
        written = Path("bench_step.json")
        rows = [{"samples": samples} | row for row in json.loads(written.read_text())["rows"]]
        written.unlink()
        samples *= 2
        if time.monotonic() > until:
            return rows


def vlm() -> list[dict[str, Any]]:
    """Return one step of a model of transformers with random weights, by format, at the largest batch that fits."""
    return on_ranks(_vlm, 1, method="spawn", backend=BACKEND)[0]


def _vlm() -> list[dict[str, Any]]:
    flops = matrix_rate(DEVICE)
    rows = []
    for name, fields in {"SHARD": {}, "SHARD nf4": {"frozen_dtype": "nf4"}}.items():
        samples, row = 2, {}
        while samples <= (256 if ON_GPU else 2):
            try:
                row = {"way": name, "samples": samples} | _vlm_step(samples, fields, flops)
            except torch.OutOfMemoryError:
                break
            samples *= 2
        rows.append(row)
    return rows


def _vlm_step(samples: int, fields: dict[str, Any], flops: float) -> dict[str, Any]:
    if ON_GPU:
        config = transformers.CONFIG_MAPPING["qwen2_5_vl"](**QWEN_3B)
        with DEVICE:
            model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        ids = torch.randint(1000, (samples, 512))
        ids[:, :64] = config.image_token_id  # a picture of 16 x 16 patches, four of which make a token
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 1000, -100)}
        inputs |= {"pixel_values": torch.randn(samples * 256, 1176), "mm_token_type_ids": (ids > 1000).long()}
        inputs["image_grid_thw"] = torch.tensor([[1, 16, 16]] * samples)
    else:
        model, inputs = families.build("qwen2_5_vl"), families.Inputs("qwen2_5_vl").inputs()
    for name, p in model.named_parameters():
        p.requires_grad_("merger" in name)
    fsdp = FSDPParams(mixed_precision="bf16", activation_checkpointing="all", **fields)
    plan = make_plan(model, fsdp, world_size=1, example=inputs)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    model = apply_plan(model, plan, device=DEVICE)
    optimizer, _ = build_optimizer(model, TrainParams())
    times = []
    for _ in range(4):
        start = time.perf_counter()
        train_step(model, [Mapping(inputs)], optimizer)  # type: ignore[list-item]
        times.append(time.perf_counter() - start)
    seconds = median(times[1:])
    row = {"samples/s": samples / seconds, "MFU": plan.flops / seconds / flops}
    row["HFU"] = plan.hardware_flops / seconds / flops
    if ON_GPU:
        train = TrainParams(device="cuda")
        peak = torch.cuda.max_memory_allocated(DEVICE)
        row |= {"peak GB": peak / 1e9, "predicted peak": (estimate(plan, train).peak_bytes or 0) / peak}
        # One GPU sends nothing; the rate of matrix products is the measured one.
        here = machine_of("h100-nvlink", {"flops": flops, "products": 1.0, "attention": 0.35 * 989e12 / flops})
        row["predicted seconds"] = step_time(plan, train, machine=here).overlapped / seconds
    return row


def traces(folder: Path) -> list[dict[str, Any]]:
    """Write a trace, and on a GPU a snapshot of the memory, of a step with SHARD and one with REPLICATE."""
    return on_ranks(_traces, max(1, torch.cuda.device_count()), str(folder), method="spawn", backend=BACKEND)[0]


def _traces(folder: str) -> list[dict[str, Any]]:
    rows = []
    for policy in ("SHARD", "REPLICATE"):
        batch: Batch = peaks.batch_of("flamingo")
        name = f"frozen-aware {policy}"
        method = wrap_as(name, peaks.build("flamingo"), batch.inputs(), device=DEVICE)
        for _ in range(2):
            method.step(batch, DEVICE)
        path = Path(folder, f"trace_{policy}_{dist.get_rank()}.json")
        if ON_GPU:
            torch.cuda.memory._record_memory_history(max_entries=20_000)
        with torch.profiler.profile() as profile:
            method.step(batch, DEVICE)
        row: dict[str, Any] = {"policy": policy}
        if ON_GPU:
            snapshot = path.with_name(f"memory_{policy}_{dist.get_rank()}.pickle")
            snapshot.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
            torch.cuda.memory._record_memory_history(enabled=None)
            row["snapshot bytes"] = snapshot.stat().st_size
        profile.export_chrome_trace(str(path))
        packed = path.with_suffix(".json.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        rows.append(row | {"trace": packed.name, "trace bytes": packed.stat().st_size})
    return rows


PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "machine": machine,
    "works": works,
    "demo": demo,
    "step": step,
    "vlm": vlm,
    "traces": traces,
}


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of any keys as lines."""
    lines = []
    for row in rows:
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
        lines.append(", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Run one part; exit with 1 if a row of it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path)
    choices = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = PARTS[choices.part](*filter(None, [choices.folder]))
    choices.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
