"""Train, save a checkpoint, and go on from it as a new process would.

torchrun --nproc-per-node 2 12_loss_jumps_after_a_resume.py
"""

import copy
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, STEPS, STOP_AT = 16, 8, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        """(batch, WIDTH) and (batch, 1) -> the loss."""
        return (self.head(torch.tanh(self.first(x))) - y).square().mean()


def start(seed):
    """Return a model and its optimizer, as a process has them at its start."""
    torch.manual_seed(seed)
    model = Model()
    fully_shard(model.first)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def batch_of(step, rank):
    """Return the inputs and the targets of a batch."""
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, WIDTH, generator=random)
    return x, x[:, :1] - x[:, 1:2] + 1


def state_of(model, optimizer):
    """Return what a checkpoint has, as a copy: training may go on while it is written."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    return copy.deepcopy({"model": weights, "optimizer": optimizer_state})


def train(model, optimizer, steps):
    """Train, and return a row for each step."""
    rows = []
    for step in steps:
        loss = model(*batch_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item()})
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return rows


def main():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = start(seed=0)
    rows = train(model, optimizer, range(STOP_AT))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder[0])
    print("saved", flush=True)

    model, optimizer = start(seed=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder[0])
    print("loaded", flush=True)
    rows += train(model, optimizer, range(STOP_AT, STEPS))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
