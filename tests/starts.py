"""How wrapped models start, and what people call on them, for tests on two ranks."""

import pytest
import torch
from tiny import tiny_batch, tiny_flamingo
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.core.step import train_step
from mmfsdp.core.weights import take_weights
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan, wrap_fsdp

BACKENDS = ("DDP", "FSDP1", "FSDP2")
BF16 = {"mixed_precision": "bf16"}
GENERATE = [{"backend": "DDP"}, {"backend": "FSDP1"}, {"backend": "FSDP1", **BF16}, {}, BF16]


def generated(fields: dict) -> list:
    """What is said, and whether an optimizer made right after it has shards, and steps go on as without."""
    model, prompt = wrap_fsdp(tiny_flamingo(), FSDPParams(**fields)), tiny_batch()
    said = model.generate(prompt.input_ids, media=prompt.media, max_new_tokens=4).tolist()
    stepped = [
        (build_optimizer(m, TrainParams(lr=1e-2))[0], m)
        for m in (model, wrap_fsdp(tiny_flamingo(), FSDPParams(**fields)))
    ]
    losses = [[train_step(m, [prompt], o).loss for _ in range(2)] for o, m in stepped]
    return [said, losses[0] == losses[1]]


NORMALIZE = [
    {"backend": backend, **BF16, **more}
    for backend in BACKENDS
    for more in ({}, {"frozen_dtype": "bf16"}, {"backend": "FSDP1", "use_orig_params": False})
]


class Shared(nn.Module):
    """A batch norm, and a buffer that several modules have."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.head = nn.Conv1d(4, 2, 1)
        for module in (self, self.body, self.head):
            module.register_buffer("shift", torch.arange(4.0)[:, None] if module is self else self.shift)

    def forward(self, x):
        return self.head(self.body(x + self.shift) + self.head.shift)


def shared() -> nn.Module:
    torch.manual_seed(0)
    model = Shared()
    freeze(model, ["body.*"])
    return model


def normalized(fields: dict) -> bool:
    """With weights in 16 bits and statistics in 32, as near to fp32 as that allows."""
    x = torch.ones(2, 4, 3)
    return torch.allclose(wrap_fsdp(shared(), FSDPParams(**fields))(x).float(), shared()(x), atol=0.05)


def start(backend: str) -> list:
    """From a dict on rank 0; and what is said on each rank when that does not fit."""
    x, model = torch.ones(2, 4, 3), shared()
    weights = model.state_dict(keep_vars=True) | {"extra": torch.ones(1)}
    plan, wanted = make_plan(model, FSDPParams(backend=backend), world_size=2), model(x).detach()
    take_weights(model)
    said = []
    for wrong in ({}, {**weights, "head.weight": torch.ones(3, 1)}, None):
        with pytest.raises(ValueError, match="^(weights|model): ") as error:
            apply_plan(model, plan, weights=wrong)
        said.append(str(error.value))
    return [torch.equal(apply_plan(model, plan, weights=dict(weights))(x), wanted), *said]
