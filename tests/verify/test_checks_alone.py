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
from mmfsdp.params import ParamError, load


def test_modules_are_counted_while_asked_for_and_no_longer():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with entered_modules(model) as entered:
        model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}
    model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}


def test_derivatives_of_a_large_model_are_not_compared():
    def line_of(parameters: int):
        with torch.device("meta"):
            model = nn.Linear(parameters, 1, bias=False)
        return check_derivatives(SimpleNamespace(loop=SimpleNamespace(build=lambda: model)))

    line = line_of(MAX_PARAMETERS + 1)
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
