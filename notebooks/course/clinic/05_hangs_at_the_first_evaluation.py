"""Train a small language model, and evaluate it every third step.

torchrun --nproc-per-node 2 05_hangs_at_the_first_evaluation.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

WORDS, WIDTH, STEPS, EVALUATE_EVERY = 40, 32, 6, 3


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
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

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
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)


def texts(seed):
    """Return a batch of texts as token ids, (4, 9)."""
    return torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(seed))


def evaluate(model):
    """Return the mean loss over the held-out texts, which are the same on all ranks."""
    with torch.no_grad():
        losses = [model(texts(1000 + i)) for i in range(2)]
    return sum(losses).item() / len(losses)


def main():
    rank = dist.get_rank()
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for step in range(STEPS):
        loss = model(texts(100 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": step, "loss": loss.item()}
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if rank == 0 and (step + 1) % EVALUATE_EVERY == 0:
            row["held_out"] = evaluate(model)
            print(f"step {step}  held-out loss {row['held_out']:.4f}", flush=True)
        rows.append(row)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
