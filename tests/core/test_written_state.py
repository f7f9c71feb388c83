"""State that forward writes: what FSDP would drop, or what would differ between ranks, is told in the first step."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import fake_group, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from mmfsdp.core.freeze import freeze, train_mode
from mmfsdp.core.reshard import parameter_groups
from mmfsdp.core.step import train_step
from mmfsdp.core.written_state import digests_of_group, watch_state
from mmfsdp.params import FSDPParams, ParamError
from mmfsdp.planning import wrap_fsdp

WAYS = {
    "SHARD": {"frozen_policy": "SHARD"},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "FSDP1": {"backend": "FSDP1"},
    "DDP": {"backend": "DDP", "sharding_strategy": "NO_SHARD"},
}
WHOLE = ("REPLICATE", "DDP")
"""Each rank holds all of a frozen parameter."""


class Codes(nn.Module):
    """A codebook that its forward updates as a moving average."""

    def __init__(self, form: str, summed: bool):
        super().__init__()
        self.summed = summed
        if form == "parameter":
            self.codes = nn.Parameter(torch.ones(4, 6), requires_grad=False)
        else:
            self.register_buffer("codes", torch.ones(4, 6), persistent=form == "buffer")

    def forward(self, x):
        mean = x.detach().mean(dim=0)
        if self.summed:
            dist.all_reduce(mean)
        self.codes.data.mul_(0.9).add_(0.1 * mean)
        return x + self.codes.mean(dim=0).detach()


class Caches(nn.Module):
    """State that differs between ranks and harms nobody."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.zeros(4, dtype=torch.long))
        self.register_buffer("random_state", torch.zeros(8, dtype=torch.uint8))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.zeros(0))
        self.register_buffer("frequencies", torch.ones(6), persistent=False)

    def forward(self, x):
        self.position_ids += dist.get_rank()
        self.random_state.random_(generator=torch.Generator().manual_seed(dist.get_rank()))
        self.seen += dist.get_rank()
        if not len(self.table):
            self.table = x.detach().flatten()
        self.frequencies = self.frequencies * (1 + dist.get_rank())
        return x


class Layers(nn.Module):
    def __init__(self, middle: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        frozen = nn.Sequential(nn.Linear(6, 6), middle).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(6, 6), frozen, nn.Linear(6, 6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Clamped(nn.Linear):
    """A layer that keeps its weights small."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1 + 0.1 * float(x.detach().abs().mean()))
        return super().forward(x)


class WithHead(nn.Module):
    def __init__(self, *, freezes: bool, head: type[nn.Linear] = nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = head(6, 3)
        if freezes:
            freeze(self, ["encoder.*"])

    def forward(self, x):
        return self.head(self.encoder(x)).square().mean()


def told(model: nn.Module, way: str, *, modes=(train_mode, train_mode), micro_batches: int = 2) -> str:
    """What two steps say of written state: an error, or warnings. modes: what sets the mode before each step."""
    words = ("writes to this", "in train mode")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = wrap_fsdp(model, FSDPParams(**WAYS[way]))
        optimizer = SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
        try:
            for step, set_mode in enumerate(modes):
                set_mode(wrapped)
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                train_step(wrapped, [{"x": x + i} for i in range(micro_batches)], optimizer)
        except ParamError as error:
            return str(error)
    assert not watch_state(wrapped).active, "after the first step nothing is looked at"
    return " ".join(str(w.message) for w in caught if any(word in str(w.message) for word in words))


def work() -> dict[str, str]:
    results = {}
    train = nn.Module.train
    for way in WAYS:
        results[f"{way}, parameter"] = told(Layers(Codes("parameter", summed=False)), way)
        results[f"{way}, norm"] = told(WithHead(freezes=True), way, modes=(train, train))
        results[f"{way}, silent: norm in eval mode"] = told(WithHead(freezes=True), way)
        results[f"{way}, silent: other state"] = told(Layers(Caches()), way)
        results[f"{way}, clamped"] = told(WithHead(freezes=True, head=Clamped), way, micro_batches=1)
        if way in WHOLE:
            results[f"{way}, silent: summed parameter"] = told(Layers(Codes("parameter", summed=True)), way)
    results["KEEP, norm after an evaluation"] = told(WithHead(freezes=True), "KEEP", modes=(train_mode, train))
    results["SHARD, buffer"] = told(Layers(Codes("buffer", summed=False)), "SHARD")
    results["SHARD, silent: summed buffer"] = told(Layers(Codes("buffer", summed=True)), "SHARD")
    results["SHARD, silent: buffer that is not saved"] = told(Layers(Codes("other", summed=False)), "SHARD")
    results["SHARD, silent: norm that trains"] = told(WithHead(freezes=False), "SHARD")
    return results


@pytest.mark.real
def test_state_that_forward_writes_is_told_in_the_first_step():
    for rank, results in enumerate(on_ranks(work, 2)):
        for case, text in results.items():
            way, _, what = case.partition(", ")
            if what.startswith("silent"):
                assert text == "", (case, text)
            elif what == "parameter":
                assert text.startswith("model: layers.1.1.codes: "), (case, text)
                assert ("differently on each rank" if way in WHOLE else "the change is lost") in text, (case, text)
            elif rank > 0:
                assert text == "", (case, text)  # rank 0 tells it once
            elif what == "buffer":
                assert text.startswith("layers.1.1.codes: ") and "only rank 0's is saved" in text, (case, text)
            elif what == "clamped":
                assert text.startswith("head.weight: "), (case, text)
                assert ("differently on each rank" if way == "DDP" else "the change is lost") in text, (case, text)
            else:
                assert text.startswith("encoder.1: frozen, but in train mode"), (case, text)
                assert text.count("train_mode(model)") == 1, (case, text)


def test_train_mode_leaves_frozen_modules_in_eval_mode():
    model = WithHead(freezes=True)
    model.dropout = nn.Dropout()
    train_mode(model)
    assert model.training and model.head.training and model.dropout.training
    assert not any(module.training for module in model.encoder.modules())
    freeze(model, ["!encoder.0.*"])
    train_mode(model)
    assert [module.training for module in model.encoder.modules()] == [True, True, False, False]


def test_a_unit_has_digests_of_its_parameters_while_it_is_gathered():
    with fake_group(2):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        layer = fully_shard(model[0])
        fully_shard(model)(torch.ones(1, 6))
        [group] = parameter_groups(layer)
        assert digests_of_group(group) == {}
        layer.unshard()
        assert set(digests_of_group(group)) == {"0.weight", "0.bias"}
