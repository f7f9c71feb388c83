"""Train with FSDP1, and clip the gradient to a norm of 0.5.

torchrun --nproc-per-node 2 06_norm_differs_between_ranks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH, STEPS, LIMIT = 16, 6, 0.5


class Layer(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)

    def forward(self, x):
        return self.linear(torch.tanh(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH), Layer(WIDTH), Layer(1)])

    def forward(self, x):
        """(batch, WIDTH) -> (batch, 1)."""
        for layer in self.layers:
            x = layer(x)
        return x


def build():
    torch.manual_seed(0)
    return Model()


def wrap(model):
    policy = ModuleWrapPolicy({Layer})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def batch_of(step, rank):
    """Return the inputs and the targets of a batch."""
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, WIDTH, generator=random)
    return x, x[:, :1] - x[:, 1:2] + 3


def main():
    rank = dist.get_rank()
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for step in range(STEPS):
        x, y = batch_of(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        rows.append({"loss": loss.item(), "norm": norm.item()})
        print(f"step {step}  loss {loss.item():.4f}  norm before clipping {norm.item():.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
