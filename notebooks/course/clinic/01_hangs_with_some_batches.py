"""Train a model that describes pictures: a frozen encoder, a projector, and layers of a language model.

torchrun --nproc-per-node 2 01_hangs_with_some_batches.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

WORDS, WIDTH, STEPS = 50, 32, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, picture):
        """(batch, tokens) and (batch, WIDTH) or None -> the loss of the next token."""
        x = self.embedding(ids)
        if picture is not None:
            features = self.projector(self.encoder(picture))
            x = x + features[:, None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build():
    torch.manual_seed(0)
    model = Model()
    model.encoder.requires_grad_(False)
    return model


def wrap(model):
    fully_shard(model.encoder)
    fully_shard(model.projector)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def batch_of(step, rank):
    """Return the tokens and the picture of a batch. About every sixth batch of the data set is text only."""
    random = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(WORDS, (4, 9), generator=random)
    picture = torch.randn(4, WIDTH, generator=random)
    text_only = (step, rank) in {(2, 1), (4, 0)}
    return ids, None if text_only else picture


def main():
    rank = dist.get_rank()
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rows = []
    for step in range(STEPS):
        ids, picture = batch_of(step, rank)
        loss = model(ids, picture)
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
