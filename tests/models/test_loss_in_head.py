"""A model whose head computes the loss trains as one with whole logits, on each backend, and says why it does not."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import nn

from mmfsdp import estimate
from mmfsdp.core import token_loss
from mmfsdp.core.freeze import freeze
from mmfsdp.core.step_batch import IGNORED_LABEL, loss_positions
from mmfsdp.core.token_loss import LossLinear, computes_loss_in_head
from mmfsdp.kit.bench.bench_models import random_batch
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.models import MultimodalModel, TokenIds, build_language, build_vision
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.models.loss_in_head import loss_in_head
from mmfsdp.params import BackboneParams, FSDPParams, ModelParams, TrainParams
from mmfsdp.planning import make_plan
from tests import families
from tests.bench.peaks import LANGUAGE as PEAKS_LANGUAGE
from tests.bench.peaks import VISION as PEAKS_VISION
from tests.bench.peaks import WORDS, Case, Result, build, results
from tests.parity import sent, wire
from tests.tiny import LANGUAGE, VISION, tiny_batch, tiny_flamingo

WAYS = {
    "SHARD": {},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "recomputed": {"activation_checkpointing": "all"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 in one unit": {"backend": "FSDP1", "auto_wrap_policy": "NO_WRAP"},
    "DDP": {"backend": "DDP"},
}
PRECISIONS = {"fp32": (None, 1e-5), "bf16": ("bf16", 3e-2)}
"""By name: `mixed_precision`, and the relative difference that its rounding allows."""
COVER = {
    "SHARD fp32 tied",
    "SHARD bf16 untied",
    "KEEP bf16 tied",
    "REPLICATE fp32 untied",
    "recomputed bf16 untied",
    "FSDP1 fp32 untied",
    "FSDP1 in one unit bf16 tied",
    "DDP fp32 tied",
    "DDP bf16 untied",
}
"""Each backend with each precision, and with tied and untied tables; each precision with both."""
ALL = {" ".join(case) for case in product(WAYS, PRECISIONS, ["tied", "untied"])}
VOCABULARY = 4000
"""With one layer, logits are the largest tensors of the step."""
NEAR = 0.05
"""The relative difference between a predicted and a measured peak."""


@dataclass(frozen=True)
class HeadCase(Case):
    """A Flamingo with a head that trains; a step holds its logits, or computes the loss in the head."""

    tied: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()} tied={self.tied} whole={self.whole}"

    def make(self) -> tuple[nn.Module, list[Batch]]:
        """Return the model and a batch, in which a third of the positions has no label."""
        torch.manual_seed(0)
        vision = BackboneParams(source="open_clip", config={"embed_dim": 64, "vision_cfg": PEAKS_VISION})
        sizes = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "tie_word_embeddings": self.tied}
        language = BackboneParams(config={**PEAKS_LANGUAGE, **sizes})
        params = ModelParams(vision=vision, language=language, num_latents=8, perceiver_depth=1, loss_in_head=False)
        model, _ = build_model(params)
        freeze(model, params.frozen_patterns)
        # With it trains a tied table.
        model.language_model.lm_head.table.requires_grad_()
        batch = random_batch(VOCABULARY, TokenIds.after(VOCABULARY).image, (2, 192), 32, seed=0)
        batch.labels[:, :64] = IGNORED_LABEL
        if not self.whole:
            assert loss_in_head(model) == "" and computes_loss_in_head(model)
            batch = replace(batch, loss_positions=loss_positions(batch.labels))
        return model, [batch]


def measured(names: set[str]) -> dict[str, list[Result]]:
    """Return the results of two ranks by case: with whole logits, and with the loss in the head."""
    cases = []
    for name in sorted(names):
        way, precision, ties = name.rsplit(" ", 2)
        fsdp = {**WAYS[way], "mixed_precision": PRECISIONS[precision][0]}
        cases += [HeadCase("flamingo", fsdp, tied=ties == "tied", whole=whole) for whole in (True, False)]
    both = results(cases, 2)
    assert len(both) == len(cases), "the lint refuses none"
    return {name: both[2 * i : 2 * i + 2] for i, name in enumerate(sorted(names))}


@pytest.fixture(scope="module")
def covered():
    return measured(COVER)


@pytest.fixture(scope="module")
def other():
    return measured(ALL - COVER)


def check(case: str, whole: Result, in_head: Result) -> None:
    """Hold that steps are those of whole logits, and that ranks send and hold what was predicted."""
    tolerance = PRECISIONS[case.rsplit(" ", 2)[1]][1]
    for whole_row, row in zip(whole.rows, in_head.rows, strict=True):
        for whole_step, step in zip(whole_row["steps"], row["steps"], strict=True):
            assert step == pytest.approx(whole_step, rel=tolerance)
        assert sent(row, in_head.plan) == sent(whole_row, whole.plan)
        assert sent(row, in_head.plan) == wire(in_head.cost.wire, backend=in_head.plan.backend)
    for result in (whole, in_head):
        assert abs(result.error) <= NEAR, f"{result.error:+.1%} {result.case}: {result.cost.peak}"
    most = whole.cost.peak_bytes
    if "head" not in whole.cost.peak_when:  # where all is one unit, it is at the reduction of all gradients
        most += 8 * 2 * 192  # of loss_positions, at most
    assert in_head.cost.peak_bytes < most


@pytest.mark.real
@pytest.mark.parametrize("case", sorted(COVER))
def test_ranks_step_as_with_whole_logits_and_hold_what_was_predicted(covered, case):
    check(case, *covered[case])


@pytest.mark.real
@pytest.mark.extended
@pytest.mark.parametrize("case", sorted(ALL - COVER))
def test_ranks_of_every_other_case_step_as_with_whole_logits_and_hold_what_was_predicted(other, case):
    check(case, *other[case])


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
    largest = max(gradient.norm() for gradient in whole_gradients.values())
    for key, gradient in gradients.items():
        # In aria, a query in front of an almost constant softmax has a gradient of 1e-12: all of it is rounding.
        tolerance = 1e-4 * whole_gradients[key].norm() + 1e-12 * largest
        assert (gradient - whole_gradients[key]).norm() <= tolerance, key


@pytest.mark.parametrize("name", [*IN_HEAD, *KEEPS])
def test_a_family_of_transformers_has_the_loss_that_it_had(name):
    compare(name, KEEPS.get(name, ""))


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(families.FAMILIES.keys() - {*IN_HEAD, *KEEPS}))
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


def test_a_model_whose_forward_fails_on_its_example_keeps_its_whole_logits():
    model, inputs = families.build("llava"), families.Inputs("llava").inputs()
    reason = loss_in_head(model, {**inputs, "pixel_values": inputs["pixel_values"][:1]})
    assert reason.startswith("its forward failed with the loss in the head (ValueError: ")
    assert type(model.lm_head) is nn.Linear
    assert loss_in_head(model, inputs) == ""


def test_without_labels_a_model_returns_logits_and_a_failed_forward_leaves_nothing_behind():
    model = families.build("llava")
    assert loss_in_head(model) == "" and isinstance(model.lm_head, LossLinear)
    inputs = families.Inputs("llava").inputs()
    with pytest.raises(ValueError):
        model(**{**inputs, "pixel_values": inputs["pixel_values"][:1]})
    without_labels = {key: value for key, value in inputs.items() if key != "labels"}
    assert model(**without_labels).logits.shape == (*inputs["input_ids"].shape, 200)
    ours, batch = tiny_flamingo(), tiny_batch().inputs()
    assert loss_in_head(ours) == loss_in_head(ours) == "", "a second call changes nothing"
    assert ours(**batch).logits is None
    assert ours(**{key: value for key, value in batch.items() if key != "labels"}).logits.shape == (2, 9, 53)
