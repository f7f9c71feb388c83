"""A checkpointed layer gets what it was given: lists and dicts as they are, and one tensor given twice as one."""

import torch
from torch import nn

from mmfsdp.core.recompute import checkpoint_activations
from mmfsdp.params import FSDPParams


class Sharing(nn.Module):
    """A layer that leaves its output for the next one in a dict, and adds a loss to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, shared: dict, losses: list) -> torch.Tensor:
        before = shared.get("kv", 0)
        shared["kv"] = self.linear(x)
        losses.append(shared["kv"].square().mean())
        return shared["kv"] + before


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, losses = {}, []
        for layer in self.layers:
            x = layer(x, shared, losses=losses)
        return x.sum() + sum(losses)


def test_a_layer_may_write_into_lists_and_dicts():
    torch.manual_seed(0)
    plain = Stack()
    checkpointed = Stack()
    checkpointed.load_state_dict(plain.state_dict())
    checkpoint_activations(checkpointed, FSDPParams(activation_checkpointing="all"))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(checkpointed(x), plain(x))
    assert torch.equal(checkpointed(x), plain(x))


def test_an_input_given_twice_stays_one_tensor():
    seen = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, query: torch.Tensor, key: torch.Tensor, *, value: torch.Tensor) -> torch.Tensor:
            seen.append(query is key and key is value)
            return self.linear(query * key * value)

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    checkpoint_activations(model, FSDPParams(activation_checkpointing="all"))
    x = torch.randn(2, 3, requires_grad=True)
    model.layers[0](x, x, value=x).sum().backward()
    assert seen == [True, True], "in forward, and when it runs again"
    assert x.grad is not None
