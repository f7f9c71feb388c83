"""Train a regression on two ranks, and evaluate it on held-out data every second step.

torchrun --nproc-per-node 2 02_other_losses_with_evaluation.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, STEPS, EVALUATE_EVERY = 16, 8, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        """(batch, WIDTH) and (batch, 1) -> the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.head(x) - y).square().mean()


def build():
    torch.manual_seed(0)
    return Model()


def wrap(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch_of(step, rank, *, held_out=False):
    """Return the inputs and the targets of a batch."""
    random = torch.Generator().manual_seed(1000 * held_out + 100 * step + rank)
    x = torch.randn(8, WIDTH, generator=random)
    return {"x": x, "y": x[:, :1] - x[:, 1:2] + 1}


def evaluate(model):
    """Return the loss of the held-out data, the mean over the ranks."""
    model.eval()
    with torch.no_grad():
        loss = model(**batch_of(0, dist.get_rank(), held_out=True))
    dist.all_reduce(loss)
    model.train()
    return loss.item() / dist.get_world_size()


def train_step(model, optimizer, batch, *, with_evaluation=True):
    loss = model(**batch)
    loss.backward()
    figures = {"loss": loss.item()}
    if with_evaluation:  # before the step or after it
        figures["held_out"] = evaluate(model)
    optimizer.step()
    optimizer.zero_grad()
    return figures


def main():
    model = build()
    wrap(model)
    optimizer = make_optimizer(model)
    rows = []
    for step in range(STEPS):
        batch = batch_of(step, dist.get_rank())
        with_evaluation = EVALUATE_EVERY > 0 and step % EVALUATE_EVERY == 0
        figures = train_step(model, optimizer, batch, with_evaluation=with_evaluation)
        rows.append(figures)
        print(f"step {step}  " + "  ".join(f"{name} {value:.5f}" for name, value in figures.items()), flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
