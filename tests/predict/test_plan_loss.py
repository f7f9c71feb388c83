"""The loss of a plan is the loss of `train_step`, whatever form the forward's output has."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from transformers.modeling_outputs import CausalLMOutput

from mmfsdp import FSDPParams, TrainParams, estimate, make_plan, train_step
from mmfsdp.core.plan import WrapPlan, plan_table

WIDTH, CLASSES = 16, 200


@dataclass
class Output:
    loss: Any
    logits: Any


Named = namedtuple("Named", "loss logits")
Unnamed = namedtuple("Unnamed", "mean logits")  # its first element is the loss, as in any tuple
FORMS = {
    "tensor": lambda loss, logits: loss,
    "dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "ModelOutput": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
    "dataclass": Output,
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "namedtuple": Named,
    "namedtuple without loss": Unnamed,
    "object": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
}
WITHOUT_LOSS = {
    "logits": lambda loss, logits: logits,
    "dict": lambda loss, logits: {"logits": logits},
    "ModelOutput": lambda loss, logits: CausalLMOutput(logits=logits),
    "tuple": lambda loss, logits: (logits,),
}


class Classifier(nn.Module):
    """It also returns `extra`'s output, which no loss depends on."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(3)))
        self.layers[1].requires_grad_(False)
        self.head, self.extra = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        x = self.layers(x)
        logits = self.head(x)
        return self.form(cross_entropy(logits, labels), torch.stack([logits, self.extra(x)]))


def batch() -> dict:
    torch.manual_seed(1)
    return {"x": torch.randn(8, WIDTH), "labels": torch.arange(8)}


def planned(form, backend: str) -> WrapPlan:
    fsdp = FSDPParams(backend=backend, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=WIDTH)
    return make_plan(Classifier(form), fsdp, world_size=2, example=batch())


@pytest.mark.parametrize("backend", ["FSDP2", "FSDP1", "DDP"])
def test_a_plan_is_the_same_for_each_form_of_output(backend):
    costs = {}
    for name, form in FORMS.items():
        plan = planned(form, backend)
        findings = [finding.message for finding in plan.lint if finding.code == "no-gradient"]
        assert len(findings) == 1 and findings[0].startswith("extra.weight, extra.bias: "), (name, plan.lint)
        assert not plan.without_loss
        cost = estimate(plan, TrainParams())
        costs[name] = cost.wire_bytes, cost.memory_bytes, cost.peak_bytes, plan.flops, plan.hardware_flops, plan.kernels
    assert costs == dict.fromkeys(FORMS, costs["tensor"])


def test_a_step_is_the_same_for_each_form_of_output():
    losses, weights = {}, {}
    for name, form in FORMS.items():
        model = Classifier(form)
        losses[name] = train_step(model, [batch()], SGD(model.parameters(), lr=0.1)).loss
        weights[name] = torch.cat([p.flatten() for p in model.parameters()])
    assert losses == dict.fromkeys(FORMS, losses["tensor"])
    assert all(torch.equal(weights[name], weights["tensor"]) for name in FORMS)


@pytest.mark.parametrize("form", WITHOUT_LOSS.values(), ids=WITHOUT_LOSS)
def test_a_plan_whose_example_gives_no_loss_says_so(form):
    plan = planned(form, "FSDP2")
    assert plan.without_loss and WrapPlan.from_json(plan.to_json()).without_loss
    assert not plan.lint, "every output that requires a gradient trains what it was computed with"
    words = "example's forward returns no loss"
    assert words in " ".join(plan_table(plan).split()) and words in " ".join(str(estimate(plan)).split())
    with_loss = planned(FORMS["tensor"], "FSDP2")
    assert words not in " ".join(plan_table(with_loss).split()) and words not in str(estimate(with_loss))


class TorchsLoss(nn.Module):
    """Its loss is torch's linear_cross_entropy, in pieces or not."""

    def __init__(self, options):
        super().__init__()
        self.head, self.options = nn.Linear(WIDTH, CLASSES, bias=False), options

    def forward(self, x, labels):
        weight = self.head.weight
        return torch.nn.functional.linear_cross_entropy(x.to(weight.dtype), weight, labels, options=self.options)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has no linear_cross_entropy")
def test_torchs_own_loss_in_pieces_is_warned_of():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    example = {"x": torch.zeros(8, WIDTH), "labels": torch.zeros(8, dtype=torch.long)}
    for options in (None, LinearCrossEntropyOptions()):
        plan = make_plan(TorchsLoss(options), FSDPParams(mixed_precision="bf16"), world_size=2, example=example)
        told = [finding.message for finding in plan.lint if finding.code == "torchs-loss"]
        assert [("in bfloat16" in message) for message in told] == ([True] if options else []), plan.lint
