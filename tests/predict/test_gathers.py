"""All-gathers are counted in one place: by events that are recorded with an example, or assumed without one."""

import pytest
import torch
from torch import nn

from mmfsdp import FSDPParams, make_plan


class Layers(nn.Module):
    """Its modules run once, in the order in which they are registered, so what is assumed without an example is so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        for frozen in (0, 2, 3):
            self.layers[frozen].requires_grad_(False)

    def forward(self, x):
        return self.layers(x).sum()


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2", "DDP"])
@pytest.mark.parametrize("policy", ["SHARD", "KEEP", "REPLICATE"])
def test_without_an_example_each_unit_is_gathered_as_in_a_model_that_runs_each_module_once(backend, policy):
    fsdp = FSDPParams(backend=backend, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=8)
    fsdp = fsdp.change(frozen_policy=policy) if backend != "DDP" else fsdp
    gathers = []
    for example in (None, {"x": torch.ones(2, 8)}):
        plan = make_plan(Layers(), fsdp, world_size=2, example=example)
        gathers.append({unit.name: (unit.gathers_forward, unit.gathers_backward) for unit in plan.units})
    assert gathers[0] == gathers[1]
    if backend != "DDP":
        assert gathers[0]["layers.1"] == (1, 1), "it is freed after forward, and backward needs it"
        assert gathers[0]["layers.0"][1] == 0, "nothing before it trains, so backward does not need it"


class WithUnreadOutput(Layers):
    """As an encoder whose last norm is not used, in models that take the features before it."""

    def __init__(self):
        super().__init__()
        self.unread = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.layers[:2](x)
        self.unread(x)
        return self.layers[2:](x).sum()


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_a_unit_whose_output_nothing_reads_is_gathered_ahead_in_backward(backend):
    """As torch gathers it: idefics on two ranks in test_vlms.py, of `make test-all`."""
    fsdp = FSDPParams(backend=backend, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=8)
    plan = make_plan(WithUnreadOutput(), fsdp, world_size=2, example={"x": torch.ones(2, 8)})
    gathers = {unit.name: (unit.gathers_forward, unit.gathers_backward) for unit in plan.units}
    assert gathers["unread"] == gathers["layers.2"] == (1, 1)
