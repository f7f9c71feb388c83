"""Ranks that use different parts of a model in one step are told, and none of them changes its weights."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from mmfsdp.core.make_plan import wrap_fsdp
from mmfsdp.core.same_parts import UsedParts, balanced, difference, digest
from mmfsdp.core.step import train_step
from mmfsdp.params import FSDPParams, ParamError

pytestmark = pytest.mark.filterwarnings("ignore:.*the batch has no labels")


class Parts(nn.Module):
    """A body, and parts of which a batch names those that it uses."""

    def __init__(self, sizes=(4, 4)):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.parts = nn.ModuleDict({name: nn.Linear(6, size) for name, size in zip("ab", sizes, strict=True)})

    def forward(self, x, use, nothing_of=""):
        x = self.body(x)
        loss = 0.0
        for name, part in self.parts.items():  # in the same order on every rank
            if name in use:
                loss = loss + part(x).square().mean()
            elif name in nothing_of:
                loss = loss + 0 * part(x).sum()
        return loss


def each_alone(model: nn.Module) -> nn.Module:
    """The model, wrapped by hand: each part is a unit."""
    for part in model.parts.values():
        fully_shard(part)
    return fully_shard(model)


WAYS = {
    "FSDP2": lambda model: wrap_fsdp(model, FSDPParams()),
    "FSDP2 keep": lambda model: wrap_fsdp(model, FSDPParams(sharding_strategy="SHARD_GRAD_OP", frozen_policy="KEEP")),
    "by hand": fully_shard,
    "by hand, a unit a part": each_alone,
    "DDP": lambda model: wrap_fsdp(model, FSDPParams(backend="DDP", sharding_strategy="NO_SHARD")),
}
SIZES = {"equal": (4, 4), "unequal": (4, 8)}
OTHER_PARTS = {
    "a head each": (["a"], ["b"]),
    "a branch on one rank": (["ab"], ["a"]),
    "in other micro-batches": (["a", "b"], ["b", "a"]),
}


def steps(model: nn.Module, uses: list[str], *, nothing_of: str = "", number: int = 1) -> str:
    """What `train_step` says of batches that use these parts; with its figures if it says nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(12.0).view(2, 6) / (10 + dist.get_rank())
    try:
        for _ in range(number):
            metrics = train_step(model, [{"x": x, "use": use, "nothing_of": nothing_of} for use in uses], optimizer)
    except ParamError as error:
        return str(error)
    return f"{metrics.loss:.5f} {metrics.grad_norm:.5f}"


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def told_cases() -> dict[str, str]:
    """What ranks say that use different parts, by case."""
    told = {}
    for way, wrap in WAYS.items():
        for size, sizes in SIZES.items():
            for case, uses in OTHER_PARTS.items():
                by_part = wrap is each_alone or way == "DDP"
                if case == "a branch on one rank" and by_part:
                    continue  # the other rank waits in a collective, until this one ends
                if case == "in other micro-batches" and not by_part:
                    continue  # right: the unit is reduced once, after both (see right_cases)
                if size == "unequal" and way not in ("FSDP2", "by hand"):
                    continue
                model = wrap(Parts(sizes))
                before = whole(model)
                said = steps(model, uses[dist.get_rank()])
                same = all(torch.equal(*pair) for pair in zip(before, whole(model), strict=True))
                told[f"{way}, {size}, {case}"] = said if same else f"weights changed: {said}"
    return told


def right_cases() -> dict[str, list[str]]:
    """Figures of ranks that use the same parts, and of one process with all their data, by case."""
    figures = {}
    for way, wrap in WAYS.items():
        for case, uses, nothing_of in (("both", "ab", ""), ("the other times 0", "ab"[dist.get_rank()], "ab")):
            figures[f"{way}, {case}"] = steps(wrap(Parts((4, 8))), [uses], nothing_of=nothing_of, number=3)
        if way != "DDP":  # which waits for each gradient
            in_turn = ["b", "a"] if dist.get_rank() and wrap is not each_alone else ["a", "b"]
            figures[f"{way}, in turn"] = steps(wrap(Parts((4, 8))), in_turn, number=3)
            model = wrap(Parts((4, 8)))
            before = whole(model)[-2:]
            figures[f"{way}, no rank uses b"] = steps(model, ["a"], number=3)
            assert all(torch.equal(*pair) for pair in zip(before, whole(model)[-2:], strict=True))
    return figures


def work() -> list[dict]:
    return [told_cases(), right_cases()]


@pytest.mark.real
def test_ranks_that_use_different_parts_are_told_and_others_train_on():
    (told, figures), (told_on_1, figures_on_1) = on_ranks(work, 2)
    assert figures == figures_on_1
    for case, said in (*told.items(), *told_on_1.items()):
        assert said.startswith("model: ranks used different parts of the model in one step: ") or (
            case.startswith("DDP") and "and waits for it; no rank changed its weights" in said
        ), (case, said)
    assert "only rank 0 has the gradient of parts.a.weight, parts.a.bias" in told["FSDP2, unequal, a head each"]
    for case in ("both", "the other times 0", "in turn", "no rank uses b"):
        alike = {said for name, said in figures.items() if name.endswith(f", {case}")}
        assert len(alike) == 1 and not alike.pop().startswith("model"), figures


def test_a_digest_differs_by_names_and_by_their_order():
    parts = [["a", "b"], ["b", "a"], ["a"], [], ["ab"]]
    assert len({digest(names) for names in parts}) == len(parts)


def test_the_numbers_of_ranks_add_up_to_0_only_if_all_are_alike():
    largest = 2**32 - 1
    for ranks in (1, 2, 3, 8, 4096):
        assert sum(balanced(largest, place, ranks) for place in range(ranks)) == 0
        assert sum(balanced(largest - (place == 1), place, ranks) for place in range(ranks)) == (ranks > 1)


def test_the_difference_is_named_by_rank_and_part():
    usual = UsedParts(gathered=["(root)", "a"], reduced=["a", "(root)"], with_gradient=["a.weight", "body.weight"])
    other = copy.deepcopy(usual)
    other.gathered = ["(root)", "b"]
    said = difference([usual, usual, other])
    assert "only rank 0 has the unit a; only rank 2 has the unit b" in said
    other = copy.deepcopy(usual)
    other.reduced.reverse()
    assert "rank 0 and rank 1 used the same parts" in difference([usual, other])
