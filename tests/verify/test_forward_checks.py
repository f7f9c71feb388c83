"""What the checks of a forward note of a model, and that they leave it as it was."""

import torch
from torch import nn

from mmfsdp.kit.verify.forward_checks import entered_modules


def test_modules_are_counted_while_asked_for_and_no_longer():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with entered_modules(model) as entered:
        model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}
    model(torch.ones(1, 2))
    assert entered == {"": 1, "0": 2, "1": 1}
