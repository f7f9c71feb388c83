"""Fine-tune the last two layers of a frozen language model, with activation checkpointing.

torchrun --nproc-per-node 2 03_slower_after_an_upgrade.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LAYERS, STEPS = 100, 96, 10, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def enable_input_require_grads(self):
        """Let the output of the embedding require a gradient, as transformers does for checkpointing."""
        self.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def forward(self, ids):
        """(batch, tokens) -> the loss of the next token."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(x)
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build():
    torch.manual_seed(0)
    model = Model()
    model.requires_grad_(False)
    model.layers[-2:].requires_grad_(True)
    model.enable_input_require_grads()
    return model


def wrap(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def main():
    model = build()
    wrap(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    rows = []
    for step in range(STEPS):
        ids = torch.randint(WORDS, (8, 16), generator=random)
        began = time.perf_counter()
        loss = model(ids)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item()})
        times = f"forward {1e3 * (forward - began):5.0f} ms  backward {1e3 * (backward - forward):5.0f} ms"
        print(f"step {step}  loss {loss.item():.4f}  {times}", flush=True)
    return model, rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
