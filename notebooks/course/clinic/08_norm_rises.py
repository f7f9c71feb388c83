"""Train the cross-attention of a small Flamingo. The layers of its language model are not to change.

torchrun --nproc-per-node 2 08_norm_rises.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, STEPS, LIMIT = 16, 10, 0.8


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, media):
        return x + torch.tanh(self.mix(media))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross_attention = nn.ModuleList(CrossAttention() for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))

    def forward(self, x, media, y):
        """(batch, WIDTH), (batch, WIDTH) and (batch, WIDTH) -> the loss."""
        for i, layer in enumerate(self.decoder):
            x = layer(self.cross_attention[i](x, media))
        return (x - y).square().mean()


def build():
    torch.manual_seed(0)
    return Model()


def wrap(model):
    for module in (*model.cross_attention, *model.decoder):
        fully_shard(module)
    fully_shard(model)


def batch_of(rank):
    """Return the inputs and the targets of this rank, the same in each step."""
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(8, WIDTH, generator=random) for _ in range(3)]


def main():
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD(model.cross_attention.parameters(), lr=0.2)
    batch = batch_of(dist.get_rank())
    rows = []
    for step in range(STEPS):
        loss = model(*batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item(), "norm": norm.item()})
        print(f"step {step}  loss {loss.item():.4f}  norm before clipping {norm.item():.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
