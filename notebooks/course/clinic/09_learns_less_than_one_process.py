"""Train a projector and a language layer on pictures and texts. Some ranks have texts without a picture.

torchrun --nproc-per-node 2 09_learns_less_than_one_process.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, STEPS = 16, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.language = nn.Linear(WIDTH, WIDTH)

    def forward(self, text, picture, y):
        """(batch, WIDTH), (batch, WIDTH) or None, and (batch, WIDTH) -> the loss."""
        x = text
        if picture is not None:
            x = x + self.projector(self.encoder(picture))
        return (self.language(x) - y).square().mean()


def build():
    torch.manual_seed(0)
    model = Model()
    model.encoder.requires_grad_(False)
    return model


def wrap(model):
    fully_shard(model.language)
    fully_shard(model, ignored_params=set(model.encoder.parameters()))  # replicated: the encoder is small
    for module in (model.language, model):
        module.set_reduce_scatter_unused_params(True)


def make_optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def batch_of(step, rank):
    """Return a batch. The pictures of rank 1 are missing."""
    random = torch.Generator().manual_seed(rank)
    text, picture, y = [torch.randn(4, WIDTH, generator=random) for _ in range(3)]
    return {"text": text, "picture": picture if rank == 0 else None, "y": y}


def loss_of(model, batch):
    return model(**batch)


def train_step(model, optimizer, batch):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.item()}


def main():
    model = build()
    wrap(model)
    optimizer = make_optimizer(model)
    rows = []
    for step in range(STEPS):
        figures = train_step(model, optimizer, batch_of(step, dist.get_rank()))
        rows.append(figures)
        print(f"step {step}  loss {figures['loss']:.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
