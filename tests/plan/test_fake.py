"""What is kept of an operator's first call is what torch's fake tensors say at each."""

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mmfsdp.plan.fake import FakeOperators, fake, fake_copy, fake_mode, tensors_of
from tests.tiny import tiny_batch, tiny_flamingo


class Checked(FakeOperators):
    """Asks at every call, too."""

    kept = 0

    def run(self, func, args, kwargs):
        out, kind = super().run(func, args, kwargs)
        if kind.parts:
            want = func(*args, **kwargs)
            self.kept += 1
            assert type(out) is type(want) and len(tensors_of(out)) == len(tensors_of(want))
            for got, t in zip(tensors_of(out), tensors_of(want), strict=True):
                assert vars(got) == vars(t) and torch._C._dispatch_key_set(got) == torch._C._dispatch_key_set(t), func
                for what in ("shape", "dtype", "layout", "device", "requires_grad"):
                    assert getattr(got, what) == getattr(t, what), (func, what)
                assert got.stride() == t.stride() and got.storage_offset() == t.storage_offset(), func
                assert got.untyped_storage().nbytes() == t.untyped_storage().nbytes(), func
                given = [x.untyped_storage()._cdata for x in tensors_of([*args, *kwargs.values()])]
                shared = [x.untyped_storage()._cdata for x in (got, t)]
                assert shared[0] == shared[1] or not set(shared) & set(given), func
        return out, kind


class Odd(nn.Module):
    """Numbers that are equal but of other types, complex ones, what changes in place, and what a constant gives."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.extra = nn.GRU(8, 8), nn.BatchNorm1d(8), torch.ones(8)
        self.norm.passed = self.passed = {}

    def forward(self, x):
        self.passed["x"] = x
        x = self.norm.passed.pop("x")
        whole = torch.arange(8, device=x.device)
        dtypes = [(whole * n).dtype for n in (2, 2.0, True) for _ in range(2)]
        assert dtypes == [torch.int64] * 2 + [torch.float32] * 2 + [torch.int64] * 2
        x = self.inner(self.norm(x))[0] * torch.tensor(2.0) + self.extra
        x = torch.fft.rfft(x).conj().imag.sum(-1, keepdim=True) + x
        x = x.clone().add_(1).unsqueeze_(0).squeeze_(0)
        top, places = x.topk(4, -1)
        return torch.zeros_like(x).scatter(1, places, top)[:, whole].cumsum(0).sum()


def test_kinds_of_calls_return_what_every_call_returns():
    for model, example in ((tiny_flamingo(), tiny_batch().inputs()), (Odd(), {"x": torch.ones(5, 8)})):
        for _ in range(2):
            mode = fake_mode()
            twin = fake_copy(model, mode).train()
            assert {n: (p.shape, p.dtype, p.requires_grad, type(p)) for n, p in twin.named_parameters()} == {
                n: (p.shape, p.dtype, p.requires_grad, type(fake(p, mode))) for n, p in model.named_parameters()
            }
            inputs = tree_map(lambda v, mode=mode: fake(v, mode) if isinstance(v, torch.Tensor) else v, example)
            with mode, Checked(mode) as checked:
                out = twin(**inputs)
                (out if isinstance(out, torch.Tensor) else out.loss).backward()
            assert checked.kept > 20
            assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
