"""fp16 on real ranks: an overflow on one of them is a skip on all, the scale backs off and grows again, and goes on
after a restart."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tiny import tiny_batch, tiny_flamingo
from torch import nn

from mmfsdp.core.names import plain_name
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.optimizer import Scaler, build_optimizer, build_scaler
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import wrap_fsdp
from tests.parity import local

CASES = {
    "DDP": {"backend": "DDP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP2": {},
    "FSDP2 replicate": {"frozen_policy": "REPLICATE"},
}
STEPS, BAD, INTERVAL, FIRST = 6, 2, 3, 2.0**12


def overflow_once(model: nn.Module) -> None:
    """One element of a gradient becomes infinite, here only; the loss stays what it is."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.flatten()[0] = float("inf")
        return grad

    def hook(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        handle.remove()
        out.register_hook(spoil)

    perceiver = next(m for n, m in model.named_modules() if plain_name(n, model).endswith("perceiver"))
    handle = perceiver.register_forward_hook(hook)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def train_through_an_overflow() -> dict:
    found = {}
    for case, fields in CASES.items():
        model = wrap_fsdp(tiny_flamingo(), FSDPParams(mixed_precision="fp16", **fields))
        optimizer, _ = build_optimizer(model, TrainParams(steps=STEPS, lr=1e-2, warmup_steps=1))
        with pytest.raises(ValueError, match="build_scaler"):
            train_step(model, [tiny_batch()], optimizer)
        assert build_scaler(model).scale == 2.0**16
        scaler, rows, moved = Scaler(scale=FIRST, interval=INTERVAL), [], []
        model.train()
        for step in range(STEPS):
            if step == BAD and dist.get_rank() == 1:
                overflow_once(model)
            before = weights(model)
            rows.append(train_step(model, [tiny_batch()], optimizer, max_grad_norm=0.5, scaler=scaler).to_dict())
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)))
            again = Scaler(scale=1.0, interval=INTERVAL)
            again.load_state_dict(scaler.state_dict())  # every step goes on from what a checkpoint would hold
            scaler = again
        found[case] = {"rows": rows, "moved": moved}
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(train_through_an_overflow, 2)


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_an_overflow_on_one_rank_is_a_skip_on_all(found, case):
    for rank in found:
        rows = rank[case]["rows"]
        good = [step != BAD for step in range(STEPS)]
        assert [not row["skipped"] for row in rows] == good == rank[case]["moved"]
        assert [row["loss_scale"] for row in rows] == [FIRST] * 3 + [FIRST / 2] * 3
        losses = [row["loss"] for row in rows]
        assert all(
            after < before for before, after in pairwise(loss for loss, ok in zip(losses, good, strict=True) if ok)
        )
        assert losses == [row["loss"] for row in found[0][case]["rows"]]


def test_the_scale_grows_after_an_interval_without_overflow():
    scaler, seen = Scaler(scale=4.0, interval=2), []
    for finite in (True, True, False, True, True):
        scaler.update(torch.tensor(finite))
        seen.append(scaler.scale.item())
    assert seen == [4.0, 8.0, 4.0, 4.0, 8.0]
