"""A model whose head computes the loss trains as one with whole logits, on each backend, and says why it does not."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mmfsdp import estimate
from mmfsdp.core import token_loss
from mmfsdp.core.make_plan import make_plan, wrap_fsdp
from mmfsdp.core.step import train_step
from mmfsdp.core.token_loss import LossLinear, computes_loss_in_head, loss_positions
from mmfsdp.models import MultimodalModel, build_language, build_vision
from mmfsdp.models.loss_in_head import loss_in_head
from mmfsdp.params import BackboneParams, FSDPParams, TrainParams
from tests import families
from tests.bench.peaks import WORDS, build
from tests.parity import local
from tests.ranks import on_ranks
from tests.tiny import LANGUAGE, VISION, tiny_batch, tiny_flamingo

WAYS = {
    "SHARD": {},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "recomputed": {"activation_checkpointing": "all"},
    "FSDP1": {"backend": "FSDP1"},
    "DDP": {"backend": "DDP"},
}
PRECISIONS = {"fp32": (None, 1e-5), "bf16": ("bf16", 3e-2)}
"""By name: `mixed_precision`, and the relative difference that its rounding allows."""
CASES = ["-".join(case) for case in product(WAYS, PRECISIONS, ["tied", "untied"])]


def trained(case: str, *, whole: bool) -> list[list[float]]:
    """Return the losses of two steps, and this rank's trainable parameters after them."""
    way, precision, ties = case.split("-")
    model = tiny_flamingo(tied=ties == "tied")
    if not whole:
        assert loss_in_head(model) == "" and computes_loss_in_head(model)
    # The head trains as well, and with it a tied table.
    model.language_model.lm_head.table.requires_grad_()
    fsdp = FSDPParams(mixed_precision=PRECISIONS[precision][0], **WAYS[way])
    example = tiny_batch().inputs()
    model = wrap_fsdp(model, fsdp, example=example)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rank = torch.distributed.get_rank()
    batches = [tiny_batch(seed=2 * rank + i) for i in range(2)]
    losses = [train_step(model, batches, optimizer).loss for _ in range(2)]
    weights = torch.cat([local(p).detach().float().flatten() for p in model.parameters() if p.requires_grad])
    return [losses, weights.tolist()]


def on_rank() -> dict:
    return {case: [trained(case, whole=True), trained(case, whole=False)] for case in CASES}


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(on_rank, 2)


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_whole_logits(ranks, case):
    tolerance = PRECISIONS[case.split("-")[1]][1]
    for results in ranks:
        (whole_losses, whole_weights), (losses, weights) = results[case]
        assert losses == pytest.approx(whole_losses, rel=tolerance)
        difference = torch.tensor(weights) - torch.tensor(whole_weights)
        assert difference.norm() <= tolerance * torch.tensor(whole_weights).norm()


# ---- what a plan predicts ----


def planned(model: nn.Module, **changes):
    """Return the plan of a Flamingo with long texts, and its predicted cost."""
    ids = torch.zeros(4, 512, dtype=torch.long, device="meta")
    media = {"vision": torch.empty(4, 1, 1, 3, 32, 32, device="meta")}
    example = {"input_ids": ids, "labels": ids, "media": media}
    plan = make_plan(model, FSDPParams(**changes), world_size=2, example=example)
    return plan, estimate(plan, TrainParams(device="cpu"))


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_a_plan_predicts_the_peak_without_logits_and_the_same_traffic(changes, monkeypatch):
    monkeypatch.setattr(token_loss, "PIECE_BYTES", 1)  # else all positions of this model are one piece
    model = build("flamingo")
    whole_plan, whole_cost = planned(model, **changes)
    loss_in_head(model)
    plan, cost = planned(model, **changes)
    # Where layers are recomputed, the peak of this small model is in the backward of a layer, with or without logits.
    logits = 0 if "activation_checkpointing" in changes else 4 * 512 * (WORDS + 3) * 4
    assert cost.peak_bytes <= whole_cost.peak_bytes - logits
    assert cost.wire_bytes == whole_cost.wire_bytes
    assert plan.flops <= whole_plan.flops
    assert plan.lint == whole_plan.lint, "who has not asked for it is not warned"


# ---- models that keep whole logits ----

KEEPS = {"gemma3n": "changes its logits", "florence2": "shifts its labels", "blip": "NoneType"}
"""Families with a soft cap, with labels that are not shifted, and without a head of its own; and the reason given."""
IN_HEAD = ("gemma3", "qwen2_5_vl", "llava", "smolvlm")


def compare(name: str, reason: str | None) -> None:
    """Hold that a family of transformers has the loss and gradients of whole logits, and gives a reason, if any."""
    results = []
    for asks in (False, True):
        model = families.build(name).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        inputs = families.Inputs(name).inputs()
        if asks:
            given = loss_in_head(model)
            assert given == model.whole_logits
            assert reason is None or (reason in given if reason else not given), given
            if not given:
                inputs["loss_positions"] = loss_positions(inputs["labels"])
        output = model(**inputs)
        output.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.append((output.loss, gradients))
    (whole, whole_gradients), (loss, gradients) = results
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    assert gradients.keys() == whole_gradients.keys()
    for key, gradient in gradients.items():
        assert (gradient - whole_gradients[key]).norm() <= 1e-4 * whole_gradients[key].norm(), key


@pytest.mark.parametrize("name", [*IN_HEAD, *KEEPS])
def test_a_family_of_transformers_has_the_loss_that_it_had(name):
    compare(name, KEEPS.get(name, ""))


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(families.FAMILIES.keys() - {*IN_HEAD, *KEEPS, "aria"}))
def test_every_family_of_transformers_has_the_loss_that_it_had(name):
    compare(name, None)


def test_the_plan_says_why_a_model_keeps_whole_logits():
    model = families.build("gemma3n")
    loss_in_head(model)
    inputs = families.Inputs("gemma3n").inputs()
    lint = make_plan(model, world_size=2, example=inputs).lint
    [finding] = [finding for finding in lint if finding.code == "whole-logits"]
    assert model.whole_logits in finding.message


def test_a_language_model_that_scales_its_logits_keeps_them():
    def around(language: dict) -> MultimodalModel:
        encoder = build_vision(BackboneParams(source="open_clip", config=VISION))
        return MultimodalModel({"vision": encoder}, build_language(BackboneParams(config=language)))

    model = around({**LANGUAGE, "model_type": "cohere", "logit_scale": 0.5})
    assert "changes its logits" in loss_in_head(model)
    assert type(model.language_model.lm_head) is nn.Linear
    assert loss_in_head(around(LANGUAGE)) == ""


def test_without_labels_a_model_returns_logits_and_a_failed_forward_leaves_nothing_behind():
    model = families.build("llava")
    assert loss_in_head(model) == "" and isinstance(model.lm_head, LossLinear)
    inputs = families.Inputs("llava").inputs()
    with pytest.raises(ValueError):
        model(**{**inputs, "pixel_values": inputs["pixel_values"][:1]})
    without_labels = {key: value for key, value in inputs.items() if key != "labels"}
    assert model(**without_labels).logits.shape == (*inputs["input_ids"].shape, 200)
    ours, batch = tiny_flamingo(), tiny_batch().inputs()
    loss_in_head(ours)
    assert ours(**batch).logits is None
    assert ours(**{key: value for key, value in batch.items() if key != "labels"}).logits.shape == (2, 9, 53)
