"""Train a regression with fully_shard.

torchrun --nproc-per-node 2 07_loss_does_not_move.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, STEPS = 16, 6


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


def wrap(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def decay_groups(model):
    """Return the parameters in two groups: biases have no weight decay."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]


def build():
    """Return the model and its optimizer."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    return model, optimizer


def batch_of(rank):
    """Return the inputs and the targets of this rank, the same in each step."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(8, WIDTH, generator=random)
    return x, x[:, :1] - x[:, 1:2] + 1


def main():
    model, optimizer = build()
    wrap(model)
    x, y = batch_of(dist.get_rank())
    rows = []
    for step in range(STEPS):
        loss = model(x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0).full_tensor()
        optimizer.step()
        model.zero_grad()
        rows.append({"loss": loss.item(), "norm": norm.item()})
        print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
