"""The three examples of Zeta's page on fsdp(), its stubs filled in, on two real ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from mmfsdp import ParamError, fsdp
from tests.ranks import on_ranks


class TransformerBlock(nn.Module):
    def __init__(self, dim: int = 256):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Below(TransformerBlock):
    pass


class TwoBlocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(TransformerBlock(), TransformerBlock())


def small(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 256), middle, nn.Linear(256, 10))


def learns(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, scaled: bool = False) -> list[float]:
    """Losses of three steps of SGD, with torch's own gradient scaler where `scaled`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", enabled=scaled)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


EXAMPLES = {
    "basic": (nn.ReLU, {}),
    "auto-wrap": (TransformerBlock, {"auto_wrap": True, "TransformerBlock": TransformerBlock}),
    "SHARD_GRAD": (
        TransformerBlock,
        {"auto_wrap": True, "TransformerBlock": TransformerBlock, "shard_strat": "SHARD_GRAD"},
    ),
    "FULL_SHARD": (TwoBlocks, {"auto_wrap": True, "TransformerBlock": TransformerBlock, "shard_strat": "FULL_SHARD"}),
    "a block, but no auto_wrap": (
        TransformerBlock,
        {"TransformerBlock": TransformerBlock, "shard_strat": "FULL_SHARD"},
    ),
    "advanced": (nn.ReLU, {"mp": "bf16", "shard_strat": "FULL_SHARD"}),
    "fp16": (nn.ReLU, {"mp": "fp16", "shard_strat": "SHARD_GRAD"}),
    "fp16, NO_SHARD": (nn.ReLU, {"mp": "fp16"}),
}


def run_the_examples() -> dict:
    found = {}
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 3, 784, generator=g), torch.randint(0, 10, (4, 3), generator=g)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for name, (middle, arguments) in EXAMPLES.items():
        model = small(middle())
        single = learns(copy.deepcopy(model), x, y)
        wrapped = fsdp(model, **arguments)
        seen: dict = {"wrapper": type(wrapped).__name__, "single": single}
        units = FSDP.fsdp_modules(wrapped) if isinstance(wrapped, FSDP) else []
        seen["units"] = sorted(type(unit.module).__name__ for unit in units)
        seen["strategies"] = [u.sharding_strategy.name for u in units if isinstance(u.module, TransformerBlock)]
        seen["compute"] = sorted({str(unit.mixed_precision.param_dtype) for unit in units})
        seen["reduce"] = sorted({str(unit.mixed_precision.reduce_dtype) for unit in units})
        seen["prefetch"] = sorted({unit.forward_prefetch for unit in units})
        seen["held"] = sum(p.numel() for p in wrapped.parameters())
        losses = torch.tensor(learns(wrapped, x[mine], y[mine], scaled="fp16" in name))
        dist.all_reduce(losses)
        found[name] = seen | {"losses": (losses / 2).tolist()}
    found["of a class above"] = [
        type(u.module).__name__
        for u in FSDP.fsdp_modules(fsdp(small(Below()), True, "fp32", "FULL_SHARD", TransformerBlock))
    ]
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(run_the_examples, 2)[0]


@pytest.mark.real
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_train_as_one_process_does(found, name):
    tolerance = 1e-4 if EXAMPLES[name][1].get("mp", "fp32") == "fp32" else 0.02
    assert found[name]["losses"] == pytest.approx(found[name]["single"], rel=tolerance)
    assert found[name]["losses"][2] < found[name]["losses"][0]


@pytest.mark.real
def test_the_arguments_mean_what_the_page_says(found):
    whole = 784 * 256 + 256 + 256 * 10 + 10
    assert found["basic"]["wrapper"] == DDP.__name__ and found["basic"]["held"] == whole
    assert found["a block, but no auto_wrap"]["units"] == ["Sequential"]
    advanced = found["advanced"]
    assert advanced["wrapper"] == FSDP.__name__ and advanced["units"] == ["Sequential"]
    assert advanced["prefetch"] == found["SHARD_GRAD"]["prefetch"] == [True]
    assert advanced["compute"] == advanced["reduce"] == ["torch.bfloat16"]
    assert whole / 2 <= advanced["held"] < whole / 2 + 100
    assert found["fp16"]["compute"] == found["fp16"]["reduce"] == ["torch.float16"]
    assert found["SHARD_GRAD"]["units"] == ["Sequential", "TransformerBlock"]
    assert found["SHARD_GRAD"]["strategies"] == ["SHARD_GRAD_OP"]
    assert found["of a class above"] == ["Sequential", "Below"]
    assert found["FULL_SHARD"]["units"] == ["Sequential", "TransformerBlock", "TransformerBlock"]
    # what is last in forward is first in backward: to free it in between would only cost
    assert found["FULL_SHARD"]["strategies"] == ["FULL_SHARD", "SHARD_GRAD_OP"]


WRONG = [
    ({"mp": "fp8"}, "mp: 'fp8' is not one of bf16, fp16, fp32"),
    ({"mp": ["bf16"]}, "mp: ['bf16'] is not one of bf16, fp16, fp32"),
    ({"shard_strat": "SHARD"}, "shard_strat: 'SHARD' is not one of SHARD_GRAD, FULL_SHARD, NO_SHARD"),
    ({"auto_wrap": True}, "TransformerBlock: is None; auto_wrap needs the class"),
    ({"auto_wrap": True, "TransformerBlock": "A"}, "TransformerBlock: is 'A'; auto_wrap needs the class"),
]


@pytest.mark.parametrize("arguments, words", WRONG)
def test_a_mistake_says_what_it_is(arguments, words):
    with pytest.raises(ParamError) as error:
        fsdp(nn.Linear(2, 2), **arguments)
    assert str(error.value).startswith(words)
