"""Gated MLPs with their activation as one operator: which are exchanged, how near they are, and what a plan counts."""

import os

import pytest
import torch
import transformers
from ranks import fake_group
from torch import nn
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from mmfsdp.core.freeze import freeze
from mmfsdp.core.step import train_step
from mmfsdp.kit.models.backbones import add_lora
from mmfsdp.kit.models.fused_swiglu import FusedSwiGLU, fuse_swiglu, fused_swiglu, swiglu, swiglu_backward
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan, wrap_fsdp
from mmfsdp.predict import estimate
from tests.processes import in_fresh_python

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = transformers.LlamaConfig(**SIZES, use_cache=False)
IDS = torch.arange(24).view(2, 12)
EXAMPLE = {"input_ids": IDS, "labels": IDS}
WAYS = {
    "recomputed": {"activation_checkpointing": "all", "mixed_precision": "bf16"},
    "nf4": {"frozen_dtype": "nf4", "mixed_precision": "bf16"},
    "fp32": {},
}


class OtherNames(nn.Module):
    """The same with other names, in another order, with biases."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.w2, self.w3, self.w1 = nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.w2(nn.functional.silu(self.w1(x)) * self.w3(x)))


class Doubled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def llama(*, fused: bool, meta: bool = False) -> nn.Module:
    """Return a Llama of which adapters train."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = transformers.LlamaForCausalLM(LLAMA)
    add_lora(model, 2, targets=(), meta=meta)
    assert not fused or len(fuse_swiglu(model)) == 2
    freeze(model, ["*", "!*.lora_?.*"])
    return model


def test_mlps_are_known_by_what_they_compute():
    vision = Qwen2_5_VLMLP(Qwen2_5_VLVisionConfig(hidden_size=16, intermediate_size=8, hidden_act="silu"), bias=True)
    gemma = GemmaMLP(GemmaConfig(hidden_size=8, intermediate_size=8))
    replaced = LlamaMLP(LLAMA)
    replaced.forward = lambda x: x
    others = [Doubled(LLAMA), gemma, OtherNames(dropout=0.5).eval(), replaced, nn.Linear(8, 8)]
    model = nn.ModuleList([LlamaMLP(LLAMA), vision, OtherNames(), *others])
    names, state, inputs = list(model.state_dict()), torch.get_rng_state(), torch.randn(3, 8)
    expected = model[2](inputs)
    assert fuse_swiglu(model) == ["0", "1", "2"] and fuse_swiglu(model) == []
    assert list(model.state_dict()) == names and isinstance(model[0], LlamaMLP)
    assert model[0].gate_up_down == ("gate_proj", "up_proj", "down_proj")
    assert model[2].gate_up_down == ("w1", "w3", "w2")
    torch.testing.assert_close(model[2](inputs), expected)
    torch.set_rng_state(state)
    assert torch.equal(torch.randn(3, 8), inputs), "the search draws none of torch's random numbers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_have_the_bits_of_the_two_operators(dtype):
    torch.manual_seed(0)
    grad, *inputs = torch.randn(3, 11, 64).to(dtype)
    results = []
    for compute in (fused_swiglu, lambda gate, up: nn.functional.silu(gate) * up):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = compute(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fused, kept", [(False, 3), (True, 2)])
def test_backward_keeps_a_third_less_of_the_activation(fused, kept):
    mlp = LlamaMLP(transformers.LlamaConfig(**SIZES | {"intermediate_size": 48})).requires_grad_(False)
    if fused:
        fuse_swiglu(nn.ModuleList([mlp]))
    addresses = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (3, 48):
            addresses.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = mlp(torch.randn(3, 64, requires_grad=True))
    assert len(addresses) == kept and out.requires_grad


def test_a_plan_counts_one_operator_each_way_and_less_memory():
    plans = []
    for fused in (False, True):
        model = llama(fused=fused, meta=True)
        plans.append(make_plan(model, FSDPParams(mixed_precision="bf16"), world_size=2, example=EXAMPLE))
    written_out, fused = plans
    assert written_out.flops == fused.flops
    # Of each layer 5 operators are now 2; they moved 14 tensors, and now 8.
    size = IDS.numel() * LLAMA.intermediate_size * torch.bfloat16.itemsize
    assert written_out.kernels - fused.kernels == 2 * 3
    assert written_out.moved_bytes - fused.moved_bytes == 2 * 6 * size
    peaks = [estimate(plan, TrainParams(device="cuda")).peak_bytes for plan in plans]
    assert peaks[0] - peaks[1] == pytest.approx(2 * size, rel=0.5)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_adapters_is_the_same(way):
    losses = []
    with fake_group(1):
        for fused in (False, True):
            model = wrap_fsdp(llama(fused=fused), FSDPParams(**WAYS[way]), example=EXAMPLE)
            optimizer, _ = build_optimizer(model, TrainParams(lr=0.01, warmup_steps=0))
            losses.append([train_step(model, [EXAMPLE], optimizer).loss for _ in range(3)])
            assert fused == any(isinstance(module, FusedSwiGLU) for module in model.modules())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if way == "fp32" else 1e-2)
    assert losses[0][0] > losses[0][2], "it learns, so that the gradients of the adapters are compared"


def test_under_compile_it_is_written_out_for_the_compiler_to_fuse():
    mlp, graphs = LlamaMLP(LLAMA), []
    fuse_swiglu(nn.ModuleList([mlp]))

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph.forward

    inputs = torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(mlp.forward, backend=backend, fullgraph=True)(inputs), mlp(inputs))
    assert len(graphs) == 1 and "silu" in graphs[0] and "swiglu" not in graphs[0]


KERNELS = """
import torch
from mmfsdp.kit.models import swiglu_kernel
from mmfsdp.kit.models.fused_swiglu import swiglu, swiglu_backward
torch.manual_seed(0)
for shape in ((3, 1), (2, 3, 512), (5, 1000)):
    for dtype in (torch.float32, torch.float16):  # numpy, and so the interpreter, has no bf16
        grad, gate, up = torch.randn(3, *shape).to(dtype)
        transposed = gate.mT.contiguous().mT
        found = (swiglu_kernel.forward(transposed, up), *swiglu_kernel.backward(grad, transposed, up))
        plain = (swiglu(gate, up), *swiglu_backward(grad, gate, up))
        wide = grad.double(), gate.double(), up.double()
        exact = (swiglu(*wide[1:]), *swiglu_backward(*wide))
        for ours, theirs, right in zip(found, plain, exact, strict=True):
            assert ours.dtype is dtype
            assert (ours - right).norm() <= 1.05 * (theirs - right).norm() + 1e-7 * right.norm()
print("near")
"""


def test_the_kernels_are_as_near_to_fp64_as_plain_operators():
    """By triton's interpreter, which runs them on the CPU."""
    pytest.importorskip("triton")
    assert in_fresh_python(KERNELS, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=600) == "near\n"


@pytest.mark.parametrize("name, tensors", [("_forward", 3), ("_backward", 5)])
def test_the_kernels_compile_for_gpus(name, tensors):
    """Their whole way to machine code of an A100; all tensors are read and written 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mmfsdp.kit.models import swiglu_kernel

    kernel = getattr(swiglu_kernel, name)
    *pointers, numel, block = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={**dict.fromkeys(pointers, "*bf16"), numel: "i32", block: "constexpr"},
        constexprs={block: swiglu_kernel.BLOCK},
        # Addresses and sizes that 16 divides, as torch's and a layer's are.
        attrs={(i,): [["tt.divisibility", 16]] for i in range(tensors + 1)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert compiled.asm["cubin"] and len(pointers) == tensors
    ptx = compiled.asm["ptx"]
    loads, stores = ptx.count("ld.global.v4.b32"), ptx.count("st.global.v4.b32")
    assert (loads, stores) == ((2, 1) if name == "_forward" else (3, 2))


def test_fake_tensors_have_the_shapes_of_real_ones():
    gate, up = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    torch.library.opcheck(swiglu, (gate.detach(), up.detach()))
    torch.library.opcheck(swiglu_backward, (gate.detach().mT, up.detach().mT, up.detach().mT))
