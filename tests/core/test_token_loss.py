"""The loss of a head in pieces equals the one of whole logits: the loss, each gradient, and what is never computed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmfsdp.core import token_loss as module
from mmfsdp.core.step_batch import MIN_PIECE, loss_positions
from mmfsdp.core.token_loss import LossLinear, token_loss

B, L, D, V, E = 3, 100, 32, 203, 3
"""Rows, positions of a row, width, rows of the head's matrix, and logits from elsewhere."""
SCALES = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 65536.0}
"""The factor of the loss in backward: fp16 needs one."""


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    """Have 300 positions make three pieces."""
    monkeypatch.setattr(module, "PIECE_BYTES", 1)


def inputs(dtype, *, trains, bias, extra):
    """Return hidden (B, L, D), weight (V, D), bias (V,) and extra (B, L, E), of which each or None needs a gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, needs_gradient):
        return (torch.randn(shape, generator=generator) / 4).to(dtype).requires_grad_(needs_gradient)

    return (
        draw(B, L, D, needs_gradient=True),
        draw(V, D, needs_gradient=trains),
        draw(V, needs_gradient=trains) if bias else None,
        draw(B, L, E, needs_gradient=True) if extra else None,
    )


def drawn_labels(known, extra):
    """Return labels (B, L): a prompt before an answer, a row without any, and a whole row."""
    labels = torch.randint(0, known + (E if extra else 0), (B, L), generator=torch.Generator().manual_seed(1))
    labels[0, :40] = labels[1] = -100
    return labels


def loss_of_whole_logits(hidden, weight, bias, extra, labels, known):
    """Return the mean loss, computed as it is without pieces."""
    logits = F.linear(hidden, weight, bias)[..., :known]
    if extra is not None:
        logits = torch.cat((logits, extra.to(logits.dtype)), dim=-1)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / (labels[:, 1:] != -100).sum().clamp(min=1)


def loss_in_pieces(hidden, weight, bias, extra, labels, known, *, positions=None):
    """Return the mean loss of a head that computes it."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    count = (targets != -100).sum().clamp(min=1)
    if positions is not None:
        targets = targets[positions]
    rows = None if extra is None else extra.flatten(0, 1)
    return token_loss(hidden.flatten(0, 1), weight, bias, rows, targets, positions, known) / count


def gradients(loss, tensors, labels, known, scale, **options):
    """Return a loss and the gradients of its inputs, without the scale."""
    tensors = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    value = loss(*tensors, labels, known, **options)
    (value * scale).backward()
    return value.detach(), [None if t is None or t.grad is None else t.grad.double() / scale for t in tensors]


CASES = list(itertools.product(SCALES, [False, True], [False, True], [False, True], [V, V - 5]))


@pytest.mark.parametrize("dtype, trains, bias, extra, known", CASES)
def test_loss_and_gradients_are_as_near_to_fp64_as_those_of_whole_logits(dtype, trains, bias, extra, known):
    tensors, labels = inputs(dtype, trains=trains, bias=bias, extra=extra), drawn_labels(known, extra)
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    wanted, wanted_gradients = gradients(loss_of_whole_logits, exact, labels, known, 1.0)
    whole, whole_gradients = gradients(loss_of_whole_logits, tensors, labels, known, SCALES[dtype])
    # A gradient is rounded once more, when backward scales it.
    rounding = max(1e-6, torch.finfo(dtype).eps / 4)
    for positions in (None, loss_positions(labels)):
        loss, found = gradients(loss_in_pieces, tensors, labels, known, SCALES[dtype], positions=positions)
        assert abs(loss - wanted) <= 2 * abs(whole - wanted) + 1e-6 * wanted
        for gradient, of_whole, target in zip(found, whole_gradients, wanted_gradients, strict=True):
            assert (gradient is None) == (of_whole is None) == (target is None)
            if gradient is not None:
                error, error_of_whole = (gradient - target).norm(), (of_whole - target).norm()
                assert error <= 1.5 * error_of_whole + rounding * target.norm()


def test_in_fp64_all_is_fp64_so_that_finite_differences_can_be_compared_with():
    tensors, labels = inputs(torch.float64, trains=True, bias=True, extra=True), drawn_labels(V, True)
    wanted, wanted_gradients = gradients(loss_of_whole_logits, tensors, labels, V, 1.0)
    loss, found = gradients(loss_in_pieces, tensors, labels, V, 1.0)
    torch.testing.assert_close((loss, found), (wanted, wanted_gradients), rtol=1e-12, atol=1e-12)


def test_positions_are_those_that_predict_a_label_and_fill_whole_pieces():
    labels = drawn_labels(V, False)
    positions = loss_positions(labels)
    predicting = positions[positions != B * L - 1].tolist()
    targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    assert predicting == (targets != -100).nonzero()[:, 0].tolist()
    assert len(positions) == 2 * MIN_PIECE and targets[B * L - 1] == -100
    assert len(loss_positions(torch.full((2, 9), -100))) == 0, "nothing to learn"
    assert len(loss_positions(torch.zeros(1, 3, dtype=torch.long))) == 3, "not more than there are"


def test_without_labels_the_loss_is_0_and_so_is_each_gradient():
    tensors = inputs(torch.float32, trains=True, bias=True, extra=True)
    labels = torch.full((B, L), -100)
    for positions in (None, loss_positions(labels)):
        loss, found = gradients(loss_in_pieces, tensors, labels, V, 1.0, positions=positions)
        assert loss == 0
        assert all(gradient is not None and not gradient.any() for gradient in found)


def test_what_a_position_without_a_label_holds_does_not_matter():
    hidden, weight, *_ = inputs(torch.float32, trains=True, bias=False, extra=False)
    labels = drawn_labels(V, False)
    _, wanted = gradients(loss_in_pieces, (hidden, weight, None, None), labels, V, 1.0)
    broken = hidden.detach().clone()
    broken[1] = torch.nan  # as after attention to nothing but padding
    _, found = gradients(loss_in_pieces, (broken.requires_grad_(), weight, None, None), labels, V, 1.0)
    assert all(torch.equal(gradient, target) for gradient, target in zip(found[:2], wanted[:2], strict=True))


def test_a_frozen_matrix_costs_two_products_and_a_trained_one_three():
    from torch.utils.flop_counter import FlopCounterMode

    labels = drawn_labels(V, False)
    counted = {}
    for trains in (False, True):
        tensors = inputs(torch.float32, trains=trains, bias=False, extra=False)
        with FlopCounterMode(display=False) as counter:
            loss_in_pieces(*tensors, labels, V).backward()
        counted[trains] = counter.get_total_flops()
    product = 2 * B * L * D * V
    assert counted == {False: 2 * product, True: 3 * product}


def test_no_tensor_is_as_large_as_the_logits_of_all_positions():
    """Autograd keeps nothing of a piece either: the largest tensor that it keeps is a gradient."""
    tensors = inputs(torch.float32, trains=False, bias=False, extra=False)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_in_pieces(*tensors, drawn_labels(V, False), V).backward()
    assert max(kept) <= B * L * D < B * L * V


def test_a_head_without_targets_is_a_linear_of_the_same_names_and_weights():
    head = nn.Linear(D, V)
    weights = dict(head.named_parameters())
    x = torch.randn(2, D)
    wanted = head(x)
    head.__class__ = LossLinear
    assert torch.equal(head(x), wanted) and dict(head.named_parameters()) == weights
    torch.testing.assert_close(head(x, torch.tensor([3, -100])), F.cross_entropy(wanted[:1], torch.tensor([3])))
