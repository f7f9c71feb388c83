"""run(folder): one training run, the same on every rank."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from .. import checkpoint, runs
from ..build import build_model, open_model
from ..data.processor import Processor
from ..freeze import freeze
from ..loading import collector_paused
from ..models import MediaModel, Weights
from ..params import GENERATED, Device, ParamError, RunParams
from ..preview import cost_of, plan_for
from ..wrap import apply_plan
from .features import FeatureCache
from .loop import train
from .machine import machine_here, versions


def run(folder: Path) -> None:
    """Train what `folder`/params.yaml says, on every rank that torch.distributed's environment variables name.

    Goes on from the newest complete checkpoint in the folder, if it has one. Writes a metrics line per rank and step,
    checkpoints, and on rank 0 plan.json and result.json.
    """
    quiet()
    beat = runs.Beat(folder, int(os.environ["RANK"]))
    beat("starting")
    params = RunParams.from_yaml(folder / "params.yaml")
    params.fsdp.check_machine()
    if GENERATED in (params.model.vision.weights, params.model.language.weights):
        from ..pretrain import ensure_backbones

        ensure_backbones(params, progress=lambda label, done: beat(f"starting: {label} {done:.0%}"))
    beat("joining")
    with joined_ranks(params) as device:
        beat("building")
        with collector_paused(for_good=True):
            built, processor, weights = build(params)
            plan, cost = plan_for(built, params)
        plan.check()
        beat("measuring")
        dtype = params.fsdp.mixed_precision.to_torch() if params.fsdp.mixed_precision else torch.float32
        machine = machine_here(params.launch, device, dtype=dtype, plan=plan)
        if dist.get_rank() == 0:
            for finding in plan.lint:
                print(f"{finding.level}: {finding.message}")
            estimate = cost_of(plan, params, machine=machine).to_dict() | {"device": device.type}
            found = {"plan": plan.to_dict(), "estimate": estimate, "versions": versions()}
            runs.write_json(folder / "plan.json", found)
        features = FeatureCache.open(params, built, device, weights.read if weights else None)
        beat("wrapping")
        loaded = [checkpoint.frozen_checksums(built)]
        model = apply_plan(built, plan, device=device, weights=weights)
        if weights is not None:
            loaded = [{p.name: weights.checksums[p.name] for p in plan.params if not p.trainable}]
        dist.broadcast_object_list(loaded)
        before = checkpoint.frozen_checksums(model)
        measured, skipped = train(folder, params, model, processor, device, loaded[0], beat, features)
        print(f"rank {dist.get_rank()}: done")
        changed = checkpoint.count_changed(before, checkpoint.frozen_checksums(model))
        if dist.get_rank() == 0:
            result = {
                "wire_bytes_predicted": cost.wire_bytes,
                **measured,
                "frozen_parameters_changed": changed,
                "world_size": dist.get_world_size(),
                "skipped": skipped,
            }
            runs.write_json(folder / "result.json", result)


def build(params: RunParams) -> tuple[MediaModel, Processor, Weights | None]:
    """The frozen model, on the meta device: rank 0 has its weights handed out, others receive them. Where that cannot
    be, rank 0 holds the model whole until it is sharded.

    Raises ParamError if it has no tokenizer.
    """
    torch.manual_seed(params.train.seed)
    model, processor, weights = open_model(params.model, read=dist.get_rank() == 0)
    freeze(model, params.model.freeze)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    on_rank0 = dist.get_rank() == 0 and (weights is None or weights.made & frozen)
    if on_rank0 or not params.fsdp.sync_module_states:
        torch.manual_seed(params.train.seed)  # frozen random weights are no checkpoint's: they come back from the seed
        weights = None
        model, processor = build_model(params.model)
        freeze(model, params.model.freeze)
    if processor is None:
        raise ParamError("model.language", "has neither name nor weights, so no tokenizer; set language.weights")
    return model, processor, weights


def quiet() -> None:
    """Keep what says nothing about the run out of the ranks' logs."""
    transformers.utils.logging.disable_progress_bar()
    # It warns of in-place operations on a unit's output: nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # its successor is not yet there


@contextmanager
def joined_ranks(params: RunParams) -> Iterator[torch.device]:
    """Join the process group and give this rank's device: nccl on CUDA, gloo on the CPU."""
    device = pick_device(params.train.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {device}, process {os.getpid()} on {socket.gethostname()}"
    )
    try:
        yield device
        dist.barrier()
    except runs.Preempted:
        dist.destroy_process_group()
        raise
    # Not after a failure: the others would be heard complaining of this rank before it has told its own cause.
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
