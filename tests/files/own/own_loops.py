"""Loops of one's own with plain fully_shard, right ones and wrong ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Captioner(nn.Module):
    """Pictures (B, 6) and words (B, 6) -> the loss: a frozen encoder, a projector, layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU())
        self.projector = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.words = nn.Linear(6, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, words: torch.Tensor, pictures: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(words)
        if pictures is not None:
            x = x + self.projector(self.encoder(pictures))
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (self.head(x) - words).square().mean()}


def build() -> nn.Module:
    torch.manual_seed(0)
    model = Captioner()
    model.encoder.requires_grad_(False)
    return model


def build_unseeded() -> nn.Module:
    """Return a model that each rank draws from a seed of its own."""
    model = build()
    with torch.no_grad():
        model.head.weight += torch.distributed.get_rank()
    return model


def wrap(model: nn.Module) -> None:
    for layer in (model.encoder, model.projector, *model.layers):
        fully_shard(layer)
    fully_shard(model)


def wrap_with_switch(model: nn.Module) -> None:
    """Leave the projector in the root, and let torch reduce what a batch does not use."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=set(model.encoder.parameters()))
    model.set_reduce_scatter_unused_params(True)


def wrap_in_bf16(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model.encoder, model.projector, *model.layers):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def optimizer_of_all(model: nn.Module) -> torch.optim.Optimizer:
    """Return one that also has what is frozen."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> torch.Tensor:
    loss = model(**batch)["loss"]
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    evaluate(model, batch)
    return norm


def step_with_early_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    """Evaluate between backward and the optimizer's step."""
    model(**batch)["loss"].backward()
    evaluate(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def step_with_local_norm(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    """Clip each rank's shards by their own norm."""
    model(**batch)["loss"].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    norm = torch.stack([grad.norm() for grad in local]).norm()
    for grad in local:
        grad.mul_(min(1.0, 0.01 / float(norm)))
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batch: dict) -> float:
    return float(model(**batch)["loss"])


def batch(rank: int, pictures: bool = True) -> dict:
    generator = torch.Generator().manual_seed(rank)
    batch = {"words": torch.randn(3, 6, generator=generator)}
    if pictures:
        batch["pictures"] = torch.randn(3, 6, generator=generator)
    return batch
