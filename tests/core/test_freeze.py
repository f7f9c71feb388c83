"""Patterns set requires_grad in order; mistakes are named."""

import pytest
import torch
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.params import ParamError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


def trainable(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.requires_grad}


def test_later_patterns_win_and_the_rest_stays():
    model = Tied()
    model.layers[1].bias.requires_grad_(False)
    report = freeze(model, ["layers.0.*", "*weight", "!layers.?.weight"])
    assert trainable(model) == {"layers.0.weight", "layers.1.weight"} == set(report.trainable)
    assert set(report.frozen) == {"table.weight", "layers.0.bias", "layers.1.bias"}


def test_a_tied_parameter_answers_to_each_name():
    model = Tied()
    freeze(model, ["head.*"])
    assert not model.table.weight.requires_grad
    freeze(model, ["*", "!table.weight"])
    assert trainable(model) == {"table.weight"}


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("layer.0.*", "layers.0.*"),
        ("!layer.0.*", "layers.0.*"),
        ("layers.0", "layers.0.*"),
        ("layers.0.weights", "layers.0.weight"),
    ],
)
def test_a_pattern_without_a_match_suggests_near_names(pattern, nearest):
    with pytest.raises(ParamError, match="freeze: ") as error:
        freeze(Tied(), [pattern])
    assert f"{pattern!r} matches no parameter; near ones are {nearest}, " in str(error.value)


def test_a_pattern_that_is_like_no_name_is_told_the_first_parameter():
    with pytest.raises(ParamError, match="'qqq' matches no parameter; the first parameter is table.weight$"):
        freeze(Tied(), ["qqq"])


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(ParamError, match="leaves nothing to train.*'!"):
        freeze(Tied(), ["*"])


def test_whole_number_weights_stay_frozen():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    assert freeze(model, ["weight", "!scale"]).frozen == ("weight", "scale")
