"""Muon for matrices and AdamW for the rest on two ranks, as in one process; what a step or an evaluation refuses."""

from dataclasses import astuple
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmfsdp import checkpoint, make_plan, train_step, wrap_fsdp
from mmfsdp.checkpoint.tensors import read_parameter
from mmfsdp.core.even_batches import even_batches
from mmfsdp.core.optimizer_states import changes_elements_alone, gathered_bytes
from mmfsdp.core.several_optimizers import SeveralOptimizers
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.muon import Muon
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.params import FSDPParams, OptimizerKind, ParamError, RunParams, TrainParams
from mmfsdp.predict.wire import CollectiveCount, collectives
from tests.core.test_own_loop import inputs_of, llama
from tests.ranks import on_ranks
from tests.tiny_run import tiny_run

RANKS, FROZEN = 2, "all but layer 1, head and norm"
MATRIX, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
WAYS = {
    "FSDP2": {},
    "FSDP2 keep": {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"},
    "DDP": {"backend": "DDP"},
}
TRAIN = TrainParams(optimizer="muon", lr=0.05, warmup_steps=0, steps=10)


def steps_of(model: nn.Module, optimizer, schedule, ranks: list[int], steps: range) -> list[float]:
    """The losses of some steps. ranks: whose data this process has."""
    losses = []
    for step in steps:
        batches = [inputs_of(10 * step + rank) for rank in ranks]
        losses.append(train_step(model, batches, optimizer, schedule=schedule, max_grad_norm=1.0).loss)
    return losses


def several_of_ranks(folder: str) -> dict:
    """Losses and weights of each way, whole and resumed, and what is said of mistakes."""
    ranks, found = [dist.get_rank()], {}
    for name, fields in WAYS.items():
        whole, resumed = (wrap_fsdp(llama(FROZEN), FSDPParams(**fields), example=inputs_of(0)) for _ in range(2))
        made = build_optimizer(whole, TRAIN)
        losses = steps_of(whole, *made, ranks, range(2))
        saved = checkpoint.save(Path(folder, name), model=whole, optimizer=made[0], schedule=made[1], step=2)
        losses += steps_of(whole, *made, ranks, range(2, 4))
        again = build_optimizer(resumed, TRAIN)
        checkpoint.resume(resumed, again[0], saved, schedule=again[1])
        same = steps_of(resumed, *again, ranks, range(2, 4)) == losses[2:]
        ends = [[read_parameter(model, part) for part in (MATRIX, NORM)] for model in (whole, resumed)]
        same = same and all(map(torch.equal, *ends))
        with Collectives() as counted:
            steps_of(resumed, *again, ranks, range(4, 5))
        found[name] = {"losses": losses, "same": same, "ends": [part.tolist() for part in ends[0]]}
        found[name]["sent"] = [astuple(row) for row in counted.rows()]
    found["words"] = words_of_mistakes()
    return found


class WithUnused(nn.Module):
    """A model with a part that forward does not use."""

    def __init__(self):
        super().__init__()
        self.model = llama(FROZEN)
        self.spare = nn.Linear(2, 2)

    def forward(self, **inputs):
        return self.model(**inputs)


def words_of_mistakes() -> list[str]:
    """Return what is said of flat shards, a list, LBFGS, a part that DDP waits for, and uneven batches."""
    rank = dist.get_rank()
    flat = wrap_fsdp(llama(FROZEN), FSDPParams(backend="FSDP1"), example=inputs_of(0))
    matrices = [p for name, p in flat.named_parameters() if p.requires_grad and "mlp" in name]
    model = wrap_fsdp(llama(FROZEN), FSDPParams(), example=inputs_of(0))
    shards = [p for p in model.parameters() if p.requires_grad]
    spare = wrap_fsdp(WithUnused(), FSDPParams(backend="DDP"))
    of_spare = torch.optim.SGD([p for p in spare.parameters() if p.requires_grad], lr=0.1)
    mistakes = [
        lambda: Muon(matrices),
        lambda: train_step(model, [inputs_of(0)], [torch.optim.SGD(shards, lr=0.1)]),
        lambda: train_step(model, [inputs_of(0)], torch.optim.LBFGS(shards)),
        lambda: train_step(spare, [inputs_of(0)], of_spare),
        lambda: list(even_batches([inputs_of(0)] * (2 + rank))),
        lambda: list(even_batches(iter([inputs_of(0)] * (2 + rank)))),
    ]
    words = []
    for mistake in mistakes:
        with pytest.raises(ParamError) as error:
            mistake()
        words.append(str(error.value))
    assert len(list(even_batches(iter(range(3))))) == len(list(even_batches(range(3)))) == 3
    return words


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(partial(several_of_ranks, str(tmp_path_factory.mktemp("several"))), RANKS)


@pytest.fixture(scope="module")
def one_process() -> tuple:
    """The losses and the weights of torch's own Muon and AdamW."""
    model = llama(FROZEN)
    matrices, others = [], []
    for p in model.parameters():
        if p.requires_grad:
            (matrices if p.ndim == 2 else others).append(p)
    options = {"weight_decay": TRAIN.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr=TRAIN.lr, **options)
    optimizer = SeveralOptimizers(muon, torch.optim.AdamW(others, lr=TRAIN.lr, weight_decay=0.0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TRAIN.steps)
    losses = steps_of(model, optimizer, schedule, list(range(RANKS)), range(4))
    return losses, [model.get_parameter(name).detach() for name in (MATRIX, NORM)]


@pytest.mark.real
@pytest.mark.parametrize("name", WAYS)
def test_muon_and_adamw_on_two_ranks_are_torchs_of_one_process_and_resume_bitwise(two_ranks, one_process, name):
    losses, ends = one_process
    begin = llama(FROZEN).get_parameter(MATRIX)
    for rank in two_ranks:
        assert rank[name]["losses"] == pytest.approx(losses, rel=1e-3)
        for part, expected in zip(rank[name]["ends"], ends, strict=True):
            # A direction is rounded to bf16, so that sums in another order differ by its last digit.
            assert torch.allclose(torch.tensor(part), expected, atol=2e-3)
        assert (torch.tensor(rank[name]["ends"][0]) - begin).norm() > 100 * 2e-3
        assert rank[name]["same"], "resumed from its checkpoint it goes on bit for bit"


@pytest.mark.real
@pytest.mark.parametrize("name", WAYS)
def test_muons_gathers_are_sent_as_predicted(two_ranks, name):
    plan = make_plan(llama(FROZEN), FSDPParams(**WAYS[name]), world_size=RANKS, example=inputs_of(0), train=TRAIN)
    predicted = {(row.kind, row.phase): row for row in collectives(plan, TRAIN)}
    gathers = predicted.get(("all-gather", "optimizer"))
    assert bool(gathers) == (name != "DDP")
    for rank in two_ranks:
        sent = [CollectiveCount(*row) for row in rank[name]["sent"]]
        measured = {(row.kind, row.phase): row for row in sent}
        assert measured.get(("all-gather", "optimizer")) == gathers
        assert sum(row.wire_bytes for row in sent) == sum(row.wire_bytes for row in predicted.values())


def test_what_an_optimizer_gathers_is_what_its_entry_says():
    assert OptimizerKind.MUON.gathers == Muon.gathers == gathered_bytes("mmfsdp.kit.train.muon:muon") == 2
    assert OptimizerKind.ADAMW.gathers == gathered_bytes("torch.optim:SGD") == 0


@pytest.mark.real
def test_mistakes_are_told_at_once_on_all_ranks(two_ranks):
    for number, rank in enumerate(two_ranks):
        flat, several, lbfgs, unused, batches, stream = rank["words"]
        assert "train.optimizer: Muon is for whole matrices" in flat and "wrap with FSDP2 or DDP" in flat
        assert "optimizer: is a list of 1; join them once, before the loop: SeveralOptimizers(*optimizers)" in several
        assert "optimizer: LBFGS needs a closure" in lbfgs
        assert f"DDP has no gradient on rank {number} of spare.weight, spare.bias, and waits for it" in unused
        assert batches.startswith("batches: rank 0 has 2 batches to evaluate, rank 1 3; every rank must evaluate")
        assert stream.startswith("batches: rank 0 has 2 batches to evaluate, rank 1 at least 3; every rank")


ALONE = ("adamw", "torch.optim:SGD", "torch.optim:Adam", "torch.optim:RMSprop")
WHOLE = ("muon", "torch.optim:Muon", "torch.optim:Adafactor")


@pytest.mark.parametrize("name", ALONE + WHOLE)
def test_an_optimizer_that_needs_whole_matrices_is_found_by_a_try(name):
    choice = RunParams().change(**{"train.optimizer": name}).train.optimizer
    assert changes_elements_alone(choice) == (name in ALONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.optimizer": "torch.optim:LBFGS"}, "train.optimizer: torch.optim:LBFGS needs a closure"),
        ({"train.optimizer": "torch.optim:Adafactor"}, "torch.optim:Adafactor changes an element by its whole matrix"),
        ({"train.optimizer": "muon", "fsdp.backend": "FSDP1"}, "muon changes .* FSDP1's shards are flat"),
        ({"train.schedule": "cosinus"}, "train.schedule: 'cosinus' is not allowed; did you mean cosine"),
        ({"train.schedule": "operator:sub"}, r"train.schedule: operator:sub returned -2 for \(0, 2\); return the fac"),
    ],
)
def test_what_cannot_train_is_told_before_any_rank_starts(tmp_path, changes, message):
    with pytest.raises(ParamError, match=message):
        prepare(tiny_run(tmp_path, **{"train.steps": 4, "launch.ranks": 2, **changes}))


def test_a_matrix_that_is_too_large_to_gather_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Muon, "gathers_up_to", 100)
    with pytest.raises(ParamError, match="muon gathers one matrix at a time, of up to 100 elements, and .* has "):
        prepare(tiny_run(tmp_path, **{"train.optimizer": "muon", "launch.ranks": 2}))


def test_optimizers_are_joined_with_groups_states_and_schedule():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd, adam = torch.optim.SGD([first], lr=1.0, momentum=0.9), torch.optim.Adam([second], lr=0.1)
    joined = SeveralOptimizers(sgd, adam)
    schedule = torch.optim.lr_scheduler.ExponentialLR(joined, 0.5)
    for p in (first, second):
        p.grad = torch.ones(2)
    joined.step()
    schedule.step()
    assert [group["lr"] for group in (*sgd.param_groups, *adam.param_groups)] == [0.5, 0.05]
    assert set(joined.state) == {first, second}
    joined.load_state_dict(joined.state_dict())  # torch puts other dicts in their place
    assert [*sgd.param_groups, *adam.param_groups] == joined.param_groups
    assert sgd.state is joined.state and adam.state is joined.state
    with pytest.raises(ParamError, match=r"a parameter of shape \(2,\) is in two of the optimizers"):
        SeveralOptimizers(sgd, torch.optim.SGD([first], lr=1))
