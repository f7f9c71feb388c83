"""Train a regression with DDP. A batch whose loss is not a number is left out.

torchrun --nproc-per-node 2 04_last_step_never_ends.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS = 16, 8
BATCH_NORM = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if BATCH_NORM else nn.Identity()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        """(batch, WIDTH) -> (batch, 1)."""
        return self.head(torch.tanh(self.norm(self.first(x))))


def build():
    torch.manual_seed(0)
    return Model()


def batch_of(step, rank):
    """Return the inputs and the targets of a batch. One row of the data set is damaged."""
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, WIDTH, generator=random)
    y = x[:, :1] - x[:, 1:2] + 1
    if (step, rank) == (3, 1):
        y[5] = float("nan")
    return x, y


def main():
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for step in range(STEPS):
        x, y = batch_of(step, rank)
        loss = (model(x) - y).square().mean()
        if not torch.isfinite(loss):
            print(f"step {step}  the loss is {loss.item()}: left out", flush=True)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append({"step": step, "loss": loss.item()})
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
