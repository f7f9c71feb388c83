"""Ranks that use different parts of a model in one step are told, and none of them changes its weights."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.core.same_parts import STEPS_AHEAD, PartsWatch, UsedParts, balanced, difference, digest
from mmfsdp.core.step import train_step
from mmfsdp.params import FSDPParams, ParamError
from mmfsdp.planning import wrap_fsdp

pytestmark = pytest.mark.filterwarnings("ignore:.*the batch has no labels")
STEPS = 3
TOLD = "model: ranks used different parts of the model in one step: "


class Heads(nn.Module):
    """A body, and heads of which a batch names those that it uses."""

    def __init__(self, sizes=(4, 4)):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({name: nn.Linear(6, size) for name, size in zip("ab", sizes, strict=True)})

    def forward(self, x, use, nothing_of=""):
        x = self.body(x)
        loss = 0.0
        for name, head in self.heads.items():  # in the same order on every rank
            if name in use:
                loss = loss + head(x).square().mean()
            elif name in nothing_of:
                loss = loss + 0 * head(x).sum()
        return loss


class Layer(nn.Module):
    """A frozen matrix with adapters, one a task, and experts, to which a batch may send no token."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.adapters = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, use, tokens_to):
        x = x + self.base(x) + self.adapters[use](x)
        for number in tokens_to:
            x = x + self.experts[number](x)
        return x


class Layers(nn.Module):
    """Layers, of which a batch may drop some; and a frozen encoder that is for some batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, use="a", drop=(), tokens_to=(0, 1), encode=True):
        if encode:
            x = self.encoder(x)
        for number, layer in enumerate(self.layers):
            if number not in drop:
                x = layer(x, use, tokens_to)
        return x.square().mean()


def planned(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: wrap_fsdp(model, FSDPParams(**fields))


def by_layer(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    fields |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Layer,Sequential"}
    return planned(**fields)


def unit_a_head(model: nn.Module) -> nn.Module:
    """The model, wrapped by hand with FSDP2: each head is a unit."""
    for head in model.heads.values():
        fully_shard(head)
    return fully_shard(model)


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_unit_a_head(model: nn.Module) -> nn.Module:
    """The model, wrapped by hand with FSDP1: each head is a unit."""
    for name in list(model.heads):
        model.heads[name] = fsdp1(model.heads[name])
    return fsdp1(model)


def ddp_of_some(model: nn.Module) -> nn.Module:
    """The model in a DDP that allows gradients on some ranks only, and reduces all."""
    return DistributedDataParallel(model, find_unused_parameters=True)


KEEP = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_policy": "KEEP"}
DDP = {"backend": "DDP", "sharding_strategy": "NO_SHARD"}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2, "dp_shard": 2}
UNIT_A_HEAD = {
    "by size": planned(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=20),
    "by hand, a unit a head": unit_a_head,
}
HEADS = {
    "FSDP2": planned(),
    "FSDP2 keep": planned(**KEEP),
    "by hand": fully_shard,
    **UNIT_A_HEAD,
}
LAYERS = {
    "FSDP2": by_layer(),
    "FSDP2 keep": by_layer(**KEEP),
    "FSDP2 replicate": by_layer(frozen_policy="REPLICATE"),
    "FSDP2 recomputed": by_layer(activation_checkpointing="all"),
}


class Case(NamedTuple):
    """A model, and what each rank gives it in a step, one mapping a micro-batch."""

    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    of_ranks: tuple[list[dict], ...]
    told: str = ""
    """Is said to every rank; "" if ranks may do so."""


def use(*heads: str, **others: Any) -> list[dict]:
    return [{"use": names} | others for names in heads]


def equal() -> nn.Module:
    return Heads((4, 4))


def unequal() -> nn.Module:
    return Heads((4, 8))


def cases_of_two() -> dict[str, Case]:
    """Cases on two ranks."""
    gradient_a = "only rank 0 has the gradient of heads.a.weight, heads.a.bias"
    gradient_b = "only rank 1 has the gradient of heads.b.weight, heads.b.bias"
    cases = {}
    for way, wrap in HEADS.items():
        cases[f"{way}, a head each"] = Case(equal, wrap, (use("a"), use("b")), f"{gradient_a}; {gradient_b}")
        cases[f"{way}, both"] = Case(unequal, wrap, (use("ab"), use("ab")))
        cases[f"{way}, the other times 0"] = Case(unequal, wrap, (use("a", nothing_of="b"), use("b", nothing_of="a")))
        cases[f"{way}, in turn"] = Case(unequal, wrap, (use("a", "b"), use("a", "b")))
        cases[f"{way}, no rank uses b"] = Case(unequal, wrap, (use("a"), use("a")))
        if way not in UNIT_A_HEAD:
            # Heads in one unit: its zeros have the size of gradients, so ranks reach the end of the step.
            cases[f"{way}, unequal, a head each"] = Case(unequal, wrap, (use("a"), use("b")), gradient_a)
            cases[f"{way}, one head more"] = Case(unequal, wrap, (use("a"), use("ab")), gradient_b)
            # Such a unit is reduced once, after the last micro-batch.
            cases[f"{way}, in other micro-batches"] = Case(unequal, wrap, (use("a", "b"), use("b", "a")))
    for way, wrap in UNIT_A_HEAD.items():
        other_order = "where rank 0 has the all-gather of heads.a, rank 1 has the all-gather of heads.b"
        cases[f"{way}, in other micro-batches"] = Case(equal, wrap, (use("a", "b"), use("b", "a")), other_order)
    # FSDP1 reduces a unit whole, with zeros.
    for way, wrap in (("FSDP1", planned(backend="FSDP1")), ("FSDP1 by hand", fsdp1), ("DDP of some", ddp_of_some)):
        cases[f"{way}, a head each"] = Case(unequal, wrap, (use("a"), use("b")))
        cases[f"{way}, one head more"] = Case(unequal, wrap, (use("a"), use("ab")))
        cases[f"{way}, in other micro-batches"] = Case(unequal, wrap, (use("a", "b"), use("b", "a")))
    units = "only rank 0 has the gradient of heads.a; only rank 1 has the gradient of heads.b"
    cases["FSDP1, a unit a head, a head each"] = Case(equal, fsdp1_unit_a_head, (use("a"), use("b")), units)
    cases["FSDP1, a unit a head, both"] = Case(unequal, fsdp1_unit_a_head, (use("ab"), use("ab")))
    cases["FSDP1, a unit a head, no rank uses b"] = Case(unequal, fsdp1_unit_a_head, (use("a"), use("a")))
    waits = "DDP has no gradient on rank"
    cases["DDP, a head each"] = Case(unequal, planned(**DDP), (use("a"), use("b")), waits)
    cases["DDP, both"] = Case(unequal, planned(**DDP), (use("ab"), use("ab")))
    for way, wrap in LAYERS.items():
        cases |= cases_of_layers(way, wrap)
    cases["FSDP1, other layers dropped"] = Case(
        Layers,
        by_layer(backend="FSDP1"),
        ([{"drop": [0]}], [{"drop": [1]}]),
        "only rank 0 has the gradient of layers.1",
    )
    # All adapters and experts of a layer are one flat gradient.
    cases["FSDP1, adapters by task"] = Case(Layers, by_layer(backend="FSDP1"), (use("a"), use("b")))
    return cases


def cases_of_layers(way: str, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Case]:
    """Cases of adapters, experts and dropped layers on two ranks."""
    experts = ([{"tokens_to": [0]}], [{"tokens_to": [1]}])
    return {
        f"{way}, all layers": Case(Layers, wrap, ([{}], [{}])),
        f"{way}, adapters by task": Case(Layers, wrap, (use("a"), use("b")), "adapters.a.weight"),
        f"{way}, adapters in turn": Case(Layers, wrap, (use("a", "b"), use("b", "a"))),
        f"{way}, experts without a token": Case(Layers, wrap, experts, "experts"),
        f"{way}, an expert without a token on all ranks": Case(Layers, wrap, (experts[0], experts[0])),
        f"{way}, other layers dropped": Case(Layers, wrap, ([{"drop": [0]}], [{"drop": [1]}]), "layers.1"),
        f"{way}, one layer dropped": Case(Layers, wrap, ([{"drop": [1]}], [{"drop": [1]}])),
    }


def cases_of_four() -> dict[str, Case]:
    """Cases on the four ranks of a hybrid mesh, whose replicas are ranks 0 and 1, and ranks 2 and 3."""
    cases = {}
    for way, wrap in (("FSDP2", by_layer(**HYBRID)), ("FSDP1", by_layer(backend="FSDP1", **HYBRID))):
        a, b, plain = [{"drop": [0]}], [{"drop": [1]}], [{"encode": False}]
        cases[f"{way}, all layers"] = Case(Layers, wrap, ([{}],) * 4)
        cases[f"{way}, within replicas"] = Case(Layers, wrap, (a, b, a, b), "only rank 0 has")
        cases[f"{way}, within replicas, in opposite order"] = Case(Layers, wrap, (a, b, b, a), "only rank 0 has")
        cases[f"{way}, between replicas"] = Case(Layers, wrap, (a, a, b, b), "only rank 2 has")
        # A replica gathers a frozen unit by itself.
        cases[f"{way}, an encoder in one replica"] = Case(Layers, wrap, ([{}], [{}], plain, plain))
    return cases


def batches_of(case: Case, rank: int) -> list[dict]:
    x = torch.arange(12.0).view(2, 6) / (10 + rank)
    return [{"x": x} | inputs for inputs in case.of_ranks[rank]]


def train(model: nn.Module, batches: list[dict]) -> str:
    """What `train_step` raises in some steps, or the last one's figures."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    try:
        for _ in range(STEPS):
            metrics = train_step(model, batches, optimizer)
    except ParamError as error:
        return str(error)
    return f"{metrics.loss:.4f} {metrics.grad_norm:.4f}"


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of the parameters."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in local]


def train_cases(cases: Callable[[], dict[str, Case]]) -> dict[str, str]:
    """Return what was said to this rank, by case."""
    said = {}
    for name, case in cases().items():
        model = case.wrap(case.make())
        before = parts_of(model)
        said[name] = train(model, batches_of(case, dist.get_rank()))
        changed = any(not torch.equal(*pair) for pair in zip(before, parts_of(model), strict=True))
        if changed == bool(case.told):
            said[name] = f"weights {'changed' if changed else 'did not change'}: {said[name]}"
    return said


def check_cases(cases: Callable[[], dict[str, Case]], ranks: int) -> None:
    """Check that ranks are told, or do what one process does with all their batches."""
    of_ranks = on_ranks(train_cases, ranks, cases)
    for name, case in cases().items():
        answers = [said[name] for said in of_ranks]
        if not case.told:
            together = [batch for rank in range(ranks) for batch in batches_of(case, rank)]
            assert answers == [train(case.make(), together)] * ranks, name
            continue
        for answer in answers:
            ddp_waits = name.startswith("DDP") and answer.startswith("model: DDP has no gradient")
            assert (answer.startswith(TOLD) or ddp_waits) and case.told in answer, (name, answer)


@pytest.mark.real
def test_two_ranks_that_use_different_parts_are_told_and_others_train_like_one_process():
    check_cases(cases_of_two, 2)


@pytest.mark.real
def test_ranks_of_a_hybrid_mesh_that_use_different_parts_are_told_and_others_train_like_one_process():
    check_cases(cases_of_four, 4)


def test_a_step_on_a_gpu_is_checked_in_a_later_one_and_at_once_where_the_host_has_waited():
    watch = PartsWatch(nn.Linear(2, 2))
    checked = []
    for step in range(STEPS_AHEAD + 2):
        watch.begin()
        assert checked == list(range(step - STEPS_AHEAD + 1))
        watch.check_later(lambda step=step: checked.append(step), waited=False)
    watch.check_later(lambda: checked.append("waited"), waited=True)
    assert checked == [*range(STEPS_AHEAD + 2), "waited"]


def test_figures_that_were_read_keep_no_names_of_parts():
    model = Heads()
    metrics = train_step(model, [{"x": torch.ones(2, 6), "use": "a"}], torch.optim.SGD(model.parameters(), lr=0.1))
    assert metrics.loss > 0 and metrics.used == UsedParts()


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
    assert "only rank 0 has the all-gather of a; only rank 2 has the all-gather of b" in said
    other.replica = 1  # another replica may gather other units
    assert "a rank called another collective" in difference([usual, usual, other])
    other = copy.deepcopy(usual)
    other.reduced.reverse()
    assert "where rank 0 has the reduction of a, rank 1 has the reduction of (root)" in difference([usual, other])
    other = copy.deepcopy(usual)
    other.gathered.append("a")
    assert "rank 1 has the all-gather of some parts more often than rank 0" in difference([usual, other])
