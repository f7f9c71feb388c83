"""State that the forward writes: what FSDP would drop or what would differ between ranks is told in the first step."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.optim import SGD

from mmfsdp.core.freeze import freeze, train_mode
from mmfsdp.core.make_plan import wrap_fsdp
from mmfsdp.core.step import train_step
from mmfsdp.params import FSDPParams, ParamError

WAYS = {
    "SHARD": {"frozen_policy": "SHARD"},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "FSDP1": {"backend": "FSDP1"},
    "DDP": {"backend": "DDP", "sharding_strategy": "NO_SHARD"},
}
WHOLE = ("REPLICATE", "DDP")


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


class WithCodes(nn.Module):
    def __init__(self, form="parameter", summed=False):
        super().__init__()
        torch.manual_seed(0)
        frozen = nn.Sequential(nn.Linear(6, 6), Codes(form, summed)).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(6, 6), frozen, nn.Linear(6, 6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class WithNorm(nn.Module):
    def __init__(self, trains: bool):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)
        if not trains:
            freeze(self, ["encoder.*"])

    def forward(self, x):
        return self.head(self.encoder(x)).square().mean()


def said(model: nn.Module, way: str, *, set_mode=train_mode) -> str:
    """What two steps say: an error, or the warnings about what was changed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = wrap_fsdp(model, FSDPParams(**WAYS[way]))
        set_mode(wrapped)
        optimizer = SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
        try:
            for step in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                train_step(wrapped, [{"x": x}, {"x": x + 1}], optimizer)
        except ParamError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught if "buffers" in str(w.message))


def work() -> dict[str, str]:
    results = {}
    for way in WAYS:
        results[f"{way}, parameter"] = said(WithCodes(), way)
        results[f"{way}, frozen norm"] = said(WithNorm(trains=False), way, set_mode=nn.Module.train)
        results[f"{way}, silent: frozen norm in eval mode"] = said(WithNorm(trains=False), way)
        if way in WHOLE:
            results[f"{way}, silent: summed parameter"] = said(WithCodes(summed=True), way)
    results["SHARD, buffer"] = said(WithCodes("buffer"), "SHARD")
    results["SHARD, silent: summed buffer"] = said(WithCodes("buffer", summed=True), "SHARD")
    results["SHARD, silent: buffer that is not saved"] = said(WithCodes("other"), "SHARD")
    results["SHARD, silent: norm that trains"] = said(WithNorm(trains=True), "SHARD")
    return results


@pytest.mark.real
def test_state_that_forward_writes_is_told_in_the_first_step():
    for rank, results in enumerate(on_ranks(work, 2)):
        for case, text in results.items():
            way, _, what = case.partition(", ")
            if what.startswith("silent"):
                assert text == "", (case, text)
            elif what == "parameter":
                name = "layers.1" if way == "FSDP1" else "layers.1.1.codes"
                assert text.startswith(f"model: {name}"), (case, text)
                assert ("differently on each rank" if way in WHOLE else "the change is lost") in text, (case, text)
            elif rank == 0:
                name = "layers.1.1.codes" if what == "buffer" else "encoder.1.running_mean, encoder.1.running_var"
                assert text.startswith(name) and "train_mode(model)" in text, (case, text)
            else:
                assert text == "", (case, text)  # rank 0 tells it once
