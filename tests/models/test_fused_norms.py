"""RMS norms as one operator: which are exchanged, how near their results are, and what a plan counts of them."""

import pytest
import torch
import transformers
from ranks import fake_group
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from mmfsdp.core.freeze import freeze
from mmfsdp.core.step import train_step
from mmfsdp.kit.models.fused_norms import FusedRMSNorm, fuse_norms
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan, wrap_fsdp

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12)
EXAMPLE = {"input_ids": IDS, "labels": IDS}


def llama(*, fused: bool, meta: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))
    assert not fused or len(fuse_norms(model)) == 2 * 2 + 1
    freeze(model, ["*", "!*.layers.0.self_attn.q_proj.*", "!model.norm.*"])
    return model


def test_norms_are_known_by_what_they_compute():
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    norms = [LlamaRMSNorm(8), Qwen2RMSNorm(8, eps=1e-5), GemmaRMSNorm(8), Doubled(8), nn.LayerNorm(8, bias=False)]
    model = nn.ModuleList([*norms, nn.RMSNorm(8), nn.Linear(8, 8)])
    names = list(model.state_dict())
    assert fuse_norms(model) == ["0", "1"] and fuse_norms(model) == []
    assert list(model.state_dict()) == names and isinstance(model[0], LlamaRMSNorm)
    assert (model[0].fused_eps, model[1].fused_eps) == (1e-6, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_as_near_to_fp64_as_those_of_transformers(dtype):
    def errors(norm: nn.Module) -> list[float]:
        inputs = x.to(dtype).requires_grad_()
        out = norm(inputs)
        out.backward(grad.to(dtype))
        found = (out, inputs.grad, norm.weight.grad)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    torch.manual_seed(0)
    x, grad, weight = torch.randn(4, 6, 64).to(dtype).double(), torch.randn(4, 6, 64).to(dtype).double(), torch.rand(64)
    wide, scale = x.clone().requires_grad_(), weight.to(dtype).double().requires_grad_()
    out = nn.functional.rms_norm(wide, (64,), scale, 1e-6)
    out.backward(grad)
    exact = (out, wide.grad, scale.grad)
    theirs, ours = LlamaRMSNorm(64), LlamaRMSNorm(64)
    for norm in (theirs, ours):
        norm.weight.data.copy_(weight)
        norm.to(dtype)
    fuse_norms(nn.ModuleList([ours]))
    # The gradient of a frozen weight is not computed, which changes no other.
    for mine, other in zip(errors(ours), errors(theirs), strict=True):
        assert mine <= 1.05 * other + 1e-7


def test_two_dtypes_are_left_to_the_norm_itself():
    norm, plain = LlamaRMSNorm(8), LlamaRMSNorm(8)
    fuse_norms(nn.ModuleList([norm]))
    inputs = torch.randn(2, 8, dtype=torch.bfloat16)
    assert torch.equal(norm(inputs), plain(inputs))


def test_a_plan_counts_one_operator_each_way_and_a_step_is_the_same():
    plans = [
        make_plan(llama(fused=fused, meta=True), FSDPParams(mixed_precision="bf16"), world_size=2, example=EXAMPLE)
        for fused in (False, True)
    ]
    written_out, fused = plans
    assert written_out.flops == fused.flops
    assert fused.moved_bytes < written_out.moved_bytes and fused.kernels <= written_out.kernels - 5 * 10
    losses = []
    with fake_group(2):
        for each in (False, True):
            model = wrap_fsdp(llama(fused=each), FSDPParams(), example=EXAMPLE)
            optimizer, _ = build_optimizer(model, TrainParams(lr=0.1, warmup_steps=0))
            losses.append([train_step(model, [EXAMPLE], optimizer).loss for _ in range(2)])
            assert each == any(isinstance(module, FusedRMSNorm) for module in model.modules())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
