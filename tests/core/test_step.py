"""One process: schedule, decay groups, accumulation, clipping, and steps that are skipped."""

import math
import warnings
from collections import UserDict
from functools import partial

import pytest
import torch
import transformers
from tiny import Mapping, tiny_batch, tiny_flamingo
from torch import nn
from torch.optim import SGD
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

from mmfsdp.core.micro_batch import label_tokens, lint_loss
from mmfsdp.core.several_optimizers import SeveralOptimizers
from mmfsdp.core.step import squared_grad_norm, train_step
from mmfsdp.core.step_batch import MappingBatch
from mmfsdp.kit.models.loss_in_head import loss_in_head
from mmfsdp.kit.train.optimizer import build_optimizer, lr_factor
from mmfsdp.params import ParamError, Schedule, TrainParams


def texts() -> Mapping:
    """Two texts of which every token is a label."""
    ids = torch.arange(12).view(2, 6)
    return Mapping({"input_ids": ids, "labels": ids})


TRAIN = TrainParams(steps=10, lr=1e-2, warmup_steps=4, weight_decay=0.1)


def test_schedules_rise_then_fall():
    for schedule in Schedule:
        assert lr_factor(0, TrainParams(steps=10, schedule=schedule, warmup_steps=0)) == 1.0
    factors = {
        s: [lr_factor(i, TrainParams(steps=10, warmup_steps=4, schedule=s)) for i in range(10)] for s in Schedule
    }
    for values in factors.values():
        assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[Schedule.CONSTANT][4:] == [1.0] * 6
    assert factors[Schedule.LINEAR][4:] == pytest.approx([1 - i / 6 for i in range(6)])
    assert factors[Schedule.COSINE][4:] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 6) for i in range(6)])


@pytest.mark.parametrize("tied", [False, True])
def test_each_trainable_parameter_is_in_one_group_and_only_matrices_decay(tied):
    model = tiny_flamingo(tied=tied)
    optimizer, _ = build_optimizer(model, TRAIN)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            spared = p.ndim < 2 or any(word in names[p] for word in ("new_tokens", "latents"))
            assert group["weight_decay"] == (0.0 if spared else 0.1), names[p]


def test_micro_steps_make_the_step_of_the_whole_batch():
    def after(batches) -> tuple[list[torch.Tensor], list[float]]:
        model = tiny_flamingo()
        optimizer, schedule = build_optimizer(model, TRAIN)
        m = train_step(model, batches, optimizer, schedule=schedule, max_grad_norm=0.1)
        figures = [m.loss, m.grad_norm, m.lr, m.tokens, m.samples]
        return [p.detach() for p in model.parameters()], figures

    whole = tiny_batch(4)
    parts = [whole.__class__(*(t[i : i + 1] for t in (whole.input_ids, whole.attention_mask, whole.labels)),
                             {"vision": whole.media["vision"][i : i + 1]}) for i in range(4)]  # fmt: skip
    (once, figures), (often, others) = after([whole]), after(parts)
    assert figures == pytest.approx(others, rel=1e-5)
    assert figures[3] == (whole.labels[:, 1:] != -100).sum() and figures[4] == 4 and figures[2] == 1e-2 / 4
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(once, often, strict=True))


def test_the_kernel_of_a_fused_optimizer_clips_while_it_reads_the_gradients():
    def halves(model, make) -> SeveralOptimizers:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return SeveralOptimizers(make(trainable[::2]), make(trainable[1::2]))

    def after(make) -> tuple[nn.Module, float]:
        """The model after two steps that are clipped, and the norm of the gradients that the optimizer was given."""
        model = tiny_flamingo()
        optimizer = make(model)
        given: list[float] = []

        def note(*_) -> None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            given.append(torch.stack([grad.norm() for grad in grads]).norm().item())

        (getattr(optimizer, "optimizers", [optimizer])[0]).register_step_pre_hook(note)
        norms = [train_step(model, [tiny_batch()], optimizer, max_grad_norm=0.1).grad_norm for _ in range(2)]
        assert min(norms) > 0.2, "else nothing is clipped"
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer)), "a step of the caller's would be clipped, too"
        return model, given[0] / norms[0]

    sgd = partial(SGD, lr=1.0)
    by_hand, share = after(lambda model: sgd([p for p in model.parameters() if p.requires_grad]))
    assert share < 0.5, "clipped before the optimizer sees them"
    for make in (
        lambda model: sgd([p for p in model.parameters() if p.requires_grad], fused=True),
        partial(halves, make=partial(sgd, fused=True)),
    ):
        fused, share = after(make)
        assert share == pytest.approx(1, abs=1e-4)
        for p, q in zip(by_hand.parameters(), fused.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    mixed, _ = after(partial(halves, make=lambda params: sgd(params, fused=len(params) % 2 == 0)))
    for p, q in zip(by_hand.parameters(), mixed.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_label_tokens_are_those_that_the_models_loss_is_a_mean_over():
    batch, model = tiny_batch(), nn.Module()
    batch.labels[:, 0] = 1  # of which a causal model predicts none
    every = int((batch.labels != -100).sum())
    assert label_tokens(model, batch) == label_tokens(tiny_flamingo(), batch) == every - 2
    model.config = transformers.PretrainedConfig(is_encoder_decoder=True)
    assert label_tokens(model, batch) == every
    model.count_label_tokens = lambda batch: 7
    assert label_tokens(model, batch) == 7


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"vocab_size": 32, "d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
ROUTED = SIZES | {"num_key_value_heads": 2, "output_router_logits": True}


class Doubled(nn.Module):
    """Returns twice the loss that its head computes, and no logits."""

    def __init__(self):
        super().__init__()
        self.model = in_head(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))

    def forward(self, input_ids, labels):
        return CausalLMOutput(loss=2 * self.model(input_ids=input_ids, labels=labels).loss)


def in_head(model):
    assert loss_in_head(model) == ""
    return model


LOSSES = {
    "causal": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), True),
    "masked": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), True),
    "causal without a shift": (lambda: transformers.BartForCausalLM(transformers.BartConfig(**BART)), False),
    "with a router's loss": (lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**ROUTED)), False),
    "in the head": (lambda: in_head(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))), True),
    "in the head, doubled": (Doubled, False),
}


@pytest.mark.parametrize("make, is_served", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_mean_over_the_counted_tokens_is_told_once(make, is_served):
    torch.manual_seed(0)
    model, batch = make(), texts()
    for first in (True, False):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            train_step(model, [batch], SGD(model.parameters(), lr=0.1))
        told = [str(w.message) for w in warned if "not a mean over" in str(w.message)]
        assert bool(told) == (first and not is_served), told
        assert all(line.startswith(type(model).__name__) for line in told)


@pytest.mark.parametrize("form", [dict, CausalLMOutput])
def test_a_loss_beside_no_logits_is_said_to_be_unchecked_once(form):
    class Fused(nn.Linear):
        """Its loss comes from a fused kernel, so its output has a place for logits, and none in it."""

        def forward(self, labels):
            return form(loss=self.weight.sum(), logits=None)

    model, batch = Fused(2, 1), {"labels": texts().mapping["labels"]}
    for first in (True, False):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            train_step(model, [batch], SGD(model.parameters(), lr=0.1))
        told = [str(w.message) for w in warned if "its output has no logits" in str(w.message)]
        assert bool(told) == first, told


def test_a_mean_over_samples_is_left_alone():
    labels = torch.tensor([0, 1, 2])  # of a classifier: logits have one row for each
    output = SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.zeros(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lint_loss(nn.Module(), output.loss, output.logits, labels, 3)


class Scorer(nn.Module):
    """A model without labels: its loss is a mean over samples, and is returned in a form of choice."""

    def __init__(self, form=lambda loss: loss):
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(3)), form

    def forward(self, x, targets):
        return self.form((x @ self.weight - targets["y"]).square().mean())


def scored(rows: int, seed: int) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=g), "targets": {"y": torch.randn(rows, generator=g)}}


def test_without_labels_the_mean_is_over_samples_and_said_once():
    batches = [scored(1, 0), UserDict(scored(5, 1))]
    whole = Scorer()
    x, y = (torch.cat([batch["x"] for batch in batches]), torch.cat([batch["targets"]["y"] for batch in batches]))
    loss = whole(x, {"y": y})
    loss.backward()
    model = Scorer()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        metrics = train_step(model, batches, SGD(model.parameters(), lr=1.0))
        train_step(model, batches, SGD(model.parameters(), lr=1.0))
    assert (metrics.loss, metrics.samples, metrics.tokens) == (pytest.approx(float(loss)), 6, 6)
    assert metrics.grad_norm == pytest.approx(float(whole.weight.grad.norm()))
    (said,) = [str(w.message) for w in warned if "no labels" in str(w.message)]
    assert said.startswith("Scorer: the batch has no labels, so train_step takes the loss for a mean over samples")


FORMS = {
    "of a loss per sample": (lambda loss: loss * torch.ones(2), r"Scorer returns a loss of shape \(2,\)"),
    "of logits first": (lambda loss: (loss * torch.ones(2, 3), loss), r"a loss of shape \(2, 3\)"),
    "of a number": (lambda loss: {"loss": loss.item()}, "a loss of type float"),
    "of no loss": (lambda loss: {"logits": loss}, "Scorer returns no loss"),
    "of nothing": (lambda loss: (), "Scorer returns no loss"),
}


@pytest.mark.parametrize("form, words", FORMS.values(), ids=FORMS)
@pytest.mark.filterwarnings("ignore:Scorer. the batch has no labels")
def test_an_output_without_a_scalar_loss_is_an_error(form, words):
    model = Scorer(form)
    with pytest.raises(ParamError, match=f"^model: .*{words}"):
        train_step(model, [scored(2, 0)], SGD(model.parameters(), lr=1.0))


NO_BATCHES = {
    "one mapping": (scored(2, 0), r"one mapping; give a list: train_step\(model, \[batch\]"),
    "a tuple": ([(torch.ones(2), torch.ones(2))], "holds a tuple; give a mapping"),
    "no rows": ([{"task": "vqa"}], "holds a mapping of task, without a tensor"),
    "none": ([], "is empty"),
}


@pytest.mark.parametrize("micro_batches, words", NO_BATCHES.values(), ids=NO_BATCHES)
@pytest.mark.filterwarnings("ignore:Scorer. the batch has no labels")
def test_what_is_no_list_of_batches_is_an_error(micro_batches, words):
    model = Scorer()
    with pytest.raises(ParamError, match=f"^micro_batches: .*{words}"):
        train_step(model, micro_batches, SGD(model.parameters(), lr=1.0))


def test_rows_and_labels_of_a_mapping():
    ids, patches = torch.arange(12).view(2, 6), torch.ones(40, 8)
    batch = MappingBatch({"pixel_values": patches, "input_ids": ids, "labels": ids})
    assert (batch.size, batch.label_tokens) == (2, 10)  # patches of several pictures lie in one tensor
    one_a_sample = torch.tensor([1, -100, 3])
    assert MappingBatch({"pixel_values": torch.ones(3, 8), "labels": one_a_sample}).label_tokens == 2
    assert MappingBatch({"pixel_values": torch.ones(3, 8), "labels": torch.ones(3, 4)}).label_tokens == 3
    moved = MappingBatch({"input_ids": ids, "media": [{"pixels": patches}], "names": ["a"]}).to(torch.device("meta"))
    assert moved.mapping["input_ids"].is_meta and moved.mapping["media"][0]["pixels"].is_meta
    assert moved.mapping["names"] == ["a"]


def test_a_model_without_a_loss_is_named():
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    model.forward = lambda input_ids, labels: transformers.BertModel.forward(model, input_ids)
    with pytest.raises(ValueError, match="model: BertModel returns no loss"):
        train_step(model, [texts()], SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("joined", [False, True])
def test_a_step_that_fails_leaves_nothing_by_which_the_next_would_be_clipped(joined):
    model = tiny_flamingo()
    own = SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, fused=True)
    optimizer = SeveralOptimizers(own) if joined else own

    def fail(*_) -> None:
        raise RuntimeError("a hook of the caller's")

    own.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the caller's"):
        train_step(model, [tiny_batch()], optimizer, max_grad_norm=0.1)
    for each in (optimizer, own):
        assert not {"grad_scale", "found_inf"} & set(vars(each))


def test_the_gradient_is_clipped_to_its_global_norm():
    model = tiny_flamingo()
    before = [p.detach().clone() for p in model.parameters()]
    m = train_step(model, [tiny_batch()], SGD(model.parameters(), lr=1.0), max_grad_norm=0.01)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(before, model.parameters(), strict=True)))
    assert m.grad_norm > 0.1 and moved == pytest.approx(0.01, rel=1e-3)
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_below_the_limit_is_left_as_it_is():
    model = tiny_flamingo()
    before = [p.detach().clone() for p in model.parameters()]
    m = train_step(model, [tiny_batch()], SGD(model.parameters(), lr=1.0), max_grad_norm=1e3)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(before, model.parameters(), strict=True)))
    assert m.grad_norm < 1e2 and moved == pytest.approx(m.grad_norm, rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(fused):
    model = tiny_flamingo()
    optimizer, _ = build_optimizer(model, TRAIN)
    if not fused:
        optimizer = SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    bad = tiny_batch()
    bad.media["vision"].fill_(float("inf"))
    assert train_step(model, [bad], optimizer, max_grad_norm=1.0).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    metrics = train_step(model, [tiny_batch()], optimizer, max_grad_norm=1.0)
    assert not metrics.skipped and metrics.to_dict()["skipped"] is False
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_batch_without_labels_to_learn_adds_nothing():
    model, silent = tiny_flamingo(), tiny_batch(seed=1)
    silent.labels.fill_(-100)
    optimizer, _ = build_optimizer(model, TRAIN)
    both = train_step(model, [tiny_batch(), silent], optimizer)
    optimizer, _ = build_optimizer(model := tiny_flamingo(), TRAIN)
    alone = train_step(model, [tiny_batch()], optimizer)
    assert (both.loss, both.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-6)


def test_a_model_without_gradients_has_a_gradient_of_norm_0():
    model = torch.nn.Linear(3, 2)
    assert squared_grad_norm(model, torch.device("cpu")).tolist() == [0.0]
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert squared_grad_norm(model, torch.device("cpu")).tolist() == [25.0]
