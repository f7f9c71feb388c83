"""Train a small language model whose head is tied to its embedding.

torchrun --nproc-per-node 2 10_error_after_an_upgrade.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

WORDS, WIDTH, STEPS = 31, 16, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        """(batch, tokens) -> the loss of the next token."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build():
    torch.manual_seed(0)
    return Model()


def wrap(model):
    fully_shard(model.embedding)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model.head)
    fully_shard(model)


def texts(step, rank):
    """Return a batch of texts as token ids, (4, 9)."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (4, 9), generator=random)


def main():
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for step in range(STEPS):
        loss = model(texts(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item()})
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
