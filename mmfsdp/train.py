"""run(folder): one training run, the same on every rank. The only place where all parts meet."""

from __future__ import annotations

import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn

from . import checkpoint, runs
from .build import build_model
from .data.loader import batches
from .data.processor import Processor
from .freeze import freeze
from .measure import Collectives, memory_bytes
from .params import Device, ParamError, RunParams
from .pretrain import ensure_backbones
from .preview import plan_for
from .step import build_optimizer, train_step
from .wrap import apply_plan


def run(folder: Path) -> None:
    """Train what `folder`/params.yaml says, on every rank that torch.distributed's environment variables name.

    Writes a metrics line per rank and step, checkpoints, and on rank 0 plan.json and result.json.
    """
    quiet()
    params = RunParams.from_yaml(folder / "params.yaml")
    ensure_backbones(params)
    with joined_ranks(params) as device:
        torch.manual_seed(params.train.seed)
        model, processor = build_model(params.model)
        freeze(model, params.model.freeze)
        plan, cost = plan_for(model, params)
        plan.check()
        if dist.get_rank() == 0:
            runs.write_json(folder / "plan.json", {"plan": plan.to_dict(), "estimate": cost.to_dict()})
        model = apply_plan(model, plan, device=device)
        before = frozen_fingerprints(model)
        measured = train(folder, params, model, processor, device)
        changed = count_changed(before, frozen_fingerprints(model))
        if dist.get_rank() == 0:
            result = {
                "wire_bytes_predicted": cost.wire_bytes,
                "wire_bytes_measured": measured,
                "frozen_parameters_changed": changed,
                "world_size": dist.get_world_size(),
            }
            runs.write_json(folder / "result.json", result)


def quiet() -> None:
    """Keep what says nothing about the run out of the ranks' logs."""
    transformers.utils.logging.disable_progress_bar()
    # It warns of in-place operations on a unit's output: nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def joined_ranks(params: RunParams) -> Iterator[torch.device]:
    """Join the process group and give this rank's device: nccl on CUDA, gloo on the CPU."""
    device = pick_device(params.train.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def pick_device(wanted: Device) -> torch.device:
    """The device of this rank. Raises ParamError if CUDA is wanted and the node has too few GPUs."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if wanted is not Device.CPU else 0
    if wanted is Device.CUDA and gpus < local_ranks:
        raise ParamError(
            "train.device",
            f"cuda needs a GPU per rank: this node has {gpus} for {local_ranks} ranks; "
            "set launch.ranks lower, or train.device to cpu or auto",
        )
    return torch.device("cuda", local_rank) if gpus >= local_ranks else torch.device("cpu")


def train(folder: Path, params: RunParams, model: nn.Module, processor: Processor, device: torch.device) -> int:
    """The loop. Returns the bytes that this rank sent in the last step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = params.train
    optimizer, schedule = build_optimizer(model, settings)
    loader = batches(
        params.data, processor, batch_size=settings.batch_size, rank=rank, world_size=world, seed=settings.seed
    )
    metrics = runs.MetricsWriter(folder, rank)
    model.train()
    sent = 0
    with Collectives() as collectives:
        for step in range(1, settings.steps + 1):
            start = time.perf_counter()
            micro_batches = [next(loader).to(device) for _ in range(settings.accumulation)]
            data_s = time.perf_counter() - start
            collectives.reset()
            row = train_step(model, micro_batches, optimizer, schedule=schedule, max_grad_norm=settings.max_grad_norm)
            sent = collectives.wire_bytes
            step_s = time.perf_counter() - start
            metrics.write(
                {"step": step, "time": time.time(), **row.to_dict(), "data_s": data_s, "step_s": step_s}
                | {"samples_per_s": row.samples / step_s, "tokens_per_s": row.tokens / step_s}
                | {"memory_bytes": memory_bytes(device), "wire_bytes": sent}
            )
            if rank == 0 and (step == 1 or step % max(1, settings.steps // 40) == 0 or step == settings.steps):
                print(
                    f"step {step}/{settings.steps}  loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}  {step_s:.3f} s"
                )
            if step == settings.steps or (settings.save_every and step % settings.save_every == 0):
                save(folder, params, model, step)
    return sent


def save(folder: Path, params: RunParams, model: nn.Module, step: int) -> None:
    path = checkpoint.save(
        folder / "checkpoints",
        model=model,
        step=step,
        kind=params.fsdp.state_dict_type,
        keep_last=params.train.keep_last,
    )
    if dist.get_rank() == 0:
        print(f"saved {path.name}")


def frozen_fingerprints(model: nn.Module) -> dict[str, int]:
    """A checksum of this rank's bytes of every frozen parameter."""
    return {name: _checksum(p) for name, p in model.named_parameters() if not p.requires_grad}


def _checksum(parameter: nn.Parameter) -> int:
    tensor = parameter.detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return zlib.crc32(local.contiguous().view(-1).view(torch.uint8).cpu().numpy())


def count_changed(before: dict[str, int], after: dict[str, int]) -> int:
    """How many frozen parameters changed on any rank. Every rank must call it."""
    changed = {name for name in before if after.get(name) != before[name]}
    everywhere: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, changed)
    return len(set().union(*everywhere))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
