"""Parts of `verify` that need no ranks: what they note of a model, and where they end."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.verify.batches import TEXT_TOKENS, random_batches
from mmfsdp.kit.verify.finite_differences import MAX_PARAMETERS, check_derivatives
from mmfsdp.kit.verify.forward_checks import entered_modules
from mmfsdp.kit.verify.shallow import trial_params
from mmfsdp.kit.verify.silent import check_trained
from mmfsdp.params import ParamError, load


def test_modules_are_counted_while_asked_for_and_no_longer():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with entered_modules(model) as entered:
        model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}
    model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}


class WithUnused(nn.Module):
    """A layer that trains, and one that gets no gradient; the loss depends on that one if `reads`."""

    def __init__(self, reads: bool):
        super().__init__()
        self.reads = reads
        self.head, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        y = self.head(x)
        return (y + self.other(x).detach() if self.reads else y).square().mean()


@pytest.mark.parametrize(
    ("reads", "level", "words"),
    [
        (True, "wrong", "the loss depends on other.*, which get no gradient"),
        (False, "note", "no batch here uses other.*, which train"),
    ],
)
def test_a_part_without_a_gradient_is_wrong_only_where_the_loss_depends_on_it(reads, level, words):
    torch.manual_seed(0)
    model, batch = WithUnused(reads), torch.randn(4, 3)
    model(batch).backward()
    names = [name for name, _ in model.named_parameters()]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    loop = SimpleNamespace(loss=lambda model, batch: model(batch))
    before = {name: p.clone() for name, p in model.named_parameters()}
    trial = SimpleNamespace(
        steps_alone=[SimpleNamespace(grads=grads)], trainable=names, plain=model, batch=batch, loop=loop
    )
    line = check_trained(trial)
    assert (line.level, line.code) == (level, "trained") and words in line.message and model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_derivatives_of_a_large_model_are_not_compared():
    with torch.device("meta"):
        model = nn.Linear(MAX_PARAMETERS + 1, 1, bias=False)
    line = check_derivatives(SimpleNamespace(loop=SimpleNamespace(build=lambda: model)))
    assert line.level == "note" and "not checked: 50 M parameters are too many (the limit is 50 M)" in line.message


def test_random_rows_are_as_long_as_their_pictures_need(tmp_path):
    params = trial_params(load("internvl3_8b"), tmp_path)  # its pictures have 256 tokens and more
    model, _ = build_model(params.model, meta=True)
    batches = random_batches(model, params, 2)
    whole = batches.joined.mapping["input_ids"]
    assert len(whole) == 2 * params.train.batch_size
    assert TEXT_TOKENS < whole.shape[1] <= params.data.max_length
    assert torch.equal(torch.cat([batch.mapping["input_ids"] for batch in batches.of_ranks]), whole)
    with pytest.raises(ParamError, match="data.max_length: .* is too short for .* raise it"):
        random_batches(model, params.change(**{"data.max_length": whole.shape[1] // 4}), 2)
