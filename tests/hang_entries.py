"""Ways to hang in a loop of one's own, as the ranks of tests run it: a small model that sees, FSDP2, a data loader with
two workers on each rank, which are forks of it and print stacks of their own into its log; or with one of this package.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import mmfsdp
from mmfsdp.kit.data.worker_processes import worker_context
from mmfsdp.kit.run.ranks.hang import STACK_SIGNAL, Heartbeat
from mmfsdp.kit.train.process_group import process_group
from mmfsdp.params import RunParams

RANK = int(os.environ.get("RANK", "0"))
FAULTY_STEP = 3
WIDTH = 32


class Block(nn.Module):
    """A residual layer, (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Sees(nn.Module):
    """Two blocks for pictures, which a batch without a picture does not need; three more of one size; and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Block(2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, numbers, picture=None):
        """(B, WIDTH), (B, WIDTH) -> ()"""
        if picture is not None:
            for block in self.vision:
                picture = block(picture)
            numbers = numbers + picture
        for layer in self.layers:
            numbers = layer(numbers)
        return self.head(numbers).square().mean()


def evaluate(model, batch):
    """Return the loss of a batch."""
    with torch.no_grad():
        return model(**batch).item()


def is_faulty(step: int, rank: int) -> bool:
    return step == FAULTY_STEP and RANK == rank


def wrapped(fault: str) -> nn.Module:
    """Return the model. Where only vision trains, its language layers and its head are whole on every rank."""
    model, fsdp = Sees(), {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Block"}
    if fault == "no_picture":
        mmfsdp.freeze(model, ["layers.*", "head.*"])
        fsdp = {"frozen_policy": "REPLICATE"}
    example = {"numbers": torch.ones(2, WIDTH), "picture": torch.ones(2, WIDTH)}
    return mmfsdp.wrap_fsdp(model, mmfsdp.FSDPParams(**fsdp), example=example)


def collate(samples, *, fault):
    """Return the batch of a step, of which each rank has one sample. In a data worker."""
    step = samples[0] + 1
    if fault.startswith("sleeps") and is_faulty(step, rank=1):
        time.sleep(600)
    batch = {"numbers": torch.full((2, WIDTH), float(step))}
    if not fault.startswith("no_picture") or not is_faulty(step, rank=1):
        batch["picture"] = torch.ones(2, WIDTH)
    return batch


def print_stacks(worker: int, *, fault: str) -> None:
    """Let a data worker print its stack when all processes of a job are asked for theirs; where it sleeps, always."""
    if fault == "sleeps":
        faulthandler.dump_traceback_later(0.2, repeat=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
    faulthandler.register(STACK_SIGNAL)


def batches(fault: str) -> DataLoader:
    """Return the batches of two data workers: forks that print stacks, or as this package has them in its loader."""
    forks = {"multiprocessing_context": "fork", "worker_init_fn": partial(print_stacks, fault=fault)}
    workers = {**forks, "num_workers": 2}
    if fault == "sleeps_in_ours":
        workers = {"multiprocessing_context": worker_context(), "num_workers": 1}  # which imports torch by itself
    return DataLoader(range(6), 1, collate_fn=partial(collate, fault=fault), **workers)


def loop(folder: Path, fault: str) -> None:
    """Train until the faulty step, in which one rank does as the fault says."""
    beat = Heartbeat(folder, RANK)
    with process_group(RunParams.from_yaml(folder / "params.yaml")):
        model = wrapped(fault)
        groups = [dist.new_group(), dist.new_group()]
        assert mmfsdp.name_hang(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step, batch in enumerate(batches(fault), start=1):
            beat(f"step {step} compute")
            if fault == "stops" and is_faulty(step, rank=1):
                os.kill(os.getpid(), signal.SIGSTOP)
            loss = model(**batch)
            if loss.requires_grad and (fault != "skips_backward" or not is_faulty(step, rank=1)):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "evaluates" and is_faulty(step, rank=0):
                evaluate(model, batch)
            if fault == "logs" and is_faulty(step, rank=1):
                dist.all_reduce(torch.ones(77))
            if fault == "crosses" and step == FAULTY_STEP:
                for group in groups if RANK == 0 else reversed(groups):
                    dist.all_reduce(torch.ones(9), group=group)
            dist.all_reduce(loss.detach())


FAULTS = (
    *("sleeps", "sleeps_in_ours", "no_picture", "no_picture_in_gloo", "stops", "skips_backward", "evaluates", "logs"),
    "crosses",
)
"""A data worker sleeps: a fork, or one of this package's loader. gloo fails, rather than waits, where one rank gathers
another unit, of another size: `no_picture_in_gloo`; or where one sums more numbers than the others: `logs`."""


def __getattr__(fault: str) -> Callable[[Path], None]:
    if fault not in FAULTS:
        raise AttributeError(fault)
    return partial(loop, fault=fault)
