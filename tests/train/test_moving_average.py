"""The moving average of shards on two ranks is that of one process, under each backend, and sends nothing."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmfsdp import checkpoint, train_step, wrap_fsdp
from mmfsdp.checkpoint.tensors import read_parameter
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.moving_average import MovingAverage
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.params import FSDPParams, ParamError, RunParams
from mmfsdp.predict.memory import memory_at_rest
from tests.core.test_own_loop import inputs_of, llama
from tests.ranks import on_ranks
from tests.tiny_run import tiny_run

DECAY, RANKS = 0.75, 2
FROZEN = "all but layer 1, head and norm"
BACKENDS = {
    "FSDP2": {},
    "FSDP2 keep": {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"},
    "FSDP1": {"backend": "FSDP1"},
    "DDP": {"backend": "DDP"},
}
TRAINED = "model.layers.1.mlp.up_proj.weight"


def trained(model: nn.Module, ranks: list[int]) -> tuple[MovingAverage, list[float]]:
    """Three steps, and the losses of the averages after each. ranks: whose data this process has."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    average = MovingAverage(model, DECAY)
    losses = []
    for step in range(3):
        train_step(model, [inputs_of(10 * step + rank) for rank in ranks], optimizer)
        average.update()
        with average.in_model(), torch.no_grad():
            losses.append(model(**inputs_of(99)).loss.item())
        with torch.no_grad():
            losses.append(model(**inputs_of(99)).loss.item())
    return average, losses


def averages_of_ranks(folder: str) -> dict:
    """What each backend has after three steps, and after its averages were saved and loaded into another model."""
    found = {}
    for name, fields in BACKENDS.items():
        model = wrap_fsdp(llama(FROZEN), FSDPParams(**fields), example=inputs_of(0))
        average, losses = trained(model, [dist.get_rank()])
        with Collectives() as counted:
            average.update()
        place = Path(folder, name)
        saved = checkpoint.save(place, model=model, step=3, more={"ema": average.tensors()})
        with average.in_model():
            whole = read_parameter(model, TRAINED)
        other = wrap_fsdp(llama(FROZEN), FSDPParams(**fields), example=inputs_of(0))
        checkpoint.load(other, saved)
        resumed = MovingAverage(other, DECAY)
        resumed.load(saved)
        same = torch.equal(read_parameter(other, TRAINED), read_parameter(model, TRAINED))
        with resumed.in_model():
            same = same and torch.equal(read_parameter(other, TRAINED), whole)
        found[name] = {"losses": losses, "sent": counted.wire_bytes, "same": same, "whole": whole.tolist()}
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(partial(averages_of_ranks, str(tmp_path_factory.mktemp("averages"))), RANKS)


@pytest.fixture(scope="module")
def one_process() -> tuple[torch.Tensor, list[float]]:
    model = llama(FROZEN)
    average, losses = trained(model, list(range(RANKS)))
    average.update()
    with average.in_model():
        return model.get_parameter(TRAINED).detach().clone(), losses


@pytest.mark.real
@pytest.mark.parametrize("name", BACKENDS)
def test_the_average_of_two_ranks_is_that_of_one_process(two_ranks, one_process, name):
    whole, losses = one_process
    assert len(set(losses)) == len(losses), "the weights change in each step, and the average is another"
    for rank in two_ranks:
        assert rank[name]["losses"] == pytest.approx(losses, rel=1e-5)
        assert torch.allclose(torch.tensor(rank[name]["whole"]), whole, rtol=1e-5, atol=1e-7)
        assert rank[name]["sent"] == 0
        assert rank[name]["same"], "a checkpoint has the weights and their average"


def test_an_average_by_hand_and_the_weights_afterwards():
    model = nn.Linear(2, 1)
    average = MovingAverage(model, DECAY)
    begin = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 4
    average.update()
    with average.in_model():
        assert torch.allclose(model.weight, begin + 1)
    assert torch.equal(model.weight, begin + 4)


def test_what_is_at_rest_in_16_bits_has_no_average():
    with pytest.raises(ParamError, match="train.ema: the weights that train are bfloat16 at rest"):
        MovingAverage(nn.Linear(2, 1).bfloat16(), DECAY)


def test_the_memory_of_an_average_is_predicted(tmp_path):
    plain, averaged = (prepare(tiny_run(tmp_path, **{"launch.ranks": 2, "train.ema": ema})).plan for ema in (None, 0.9))
    trained_bytes = memory_at_rest(plain).gradients
    assert memory_at_rest(averaged).optimizer - memory_at_rest(plain).optimizer == trained_bytes > 0


def test_an_average_is_refused_with_local_checkpoints():
    changes = {"train.ema": 0.9, "fsdp.backend": "FSDP1", "fsdp.state_dict_type": "LOCAL_STATE_DICT"}
    with pytest.raises(ParamError, match="train.ema: 0.9 cannot be saved with fsdp.state_dict_type LOCAL_STATE_DICT"):
        RunParams().change(**changes)
