"""Train a regression over some epochs of 21 rows, in global batches of 8.

torchrun --nproc-per-node 2 11_fine_on_one_rank.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, EPOCHS, ROWS, BATCH = 8, 4, 21, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        """(batch, WIDTH) -> (batch, 1)."""
        return self.head(torch.tanh(self.first(x)))


def build():
    torch.manual_seed(0)
    return Model()


def wrap(model):
    fully_shard(model.first)
    fully_shard(model)


def dataset():
    """Return the inputs, (ROWS, WIDTH), and the targets, (ROWS, 1)."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=random)
    return x, x[:, :1] - x[:, 1:2] + torch.arange(ROWS)[:, None] / ROWS


def part_of(batch):
    """Return this rank's rows of a global batch, by their numbers."""
    each = BATCH // dist.get_world_size()
    return batch[dist.get_rank() * each :][:each]


def train_epoch(model, optimizer, x, y):
    """Train on all rows once. Return the sum of the squared errors of this rank's rows."""
    total = 0.0
    for batch in torch.arange(ROWS).split(BATCH):
        mine = part_of(batch)
        errors = (model(x[mine]) - y[mine]).square()
        loss = errors.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += errors.sum().item()
    return total


def main():
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = dataset()
    rows = []
    for epoch in range(EPOCHS):
        total = torch.tensor(train_epoch(model, optimizer, x, y))
        dist.all_reduce(total)
        rows.append({"loss": total.item() / ROWS})
        print(f"epoch {epoch}  loss {total.item() / ROWS:.5f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
