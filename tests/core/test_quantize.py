"""Frozen matrices in int8 and nf4: rounded as the formats say, right in backward, and kept as codes there."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from pretend_cuda import CUDA, PretendCuda, Waits
from tiny import tiny_flamingo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.pytorch_utils import Conv1D

from mmfsdp.core import quantize as q
from mmfsdp.core.fake_tensors import fake_mode
from mmfsdp.core.trace import trace
from mmfsdp.core.weights import QuantizedWeights
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.models import build_language
from mmfsdp.params import BackboneParams, FrozenDtype, FSDPParams, ParamError
from mmfsdp.planning import make_plan
from mmfsdp.quantized import int8, nf4
from tests.processes import in_fresh_python
from tests.ranks import fake_group

FORMS = (FrozenDtype.INT8, FrozenDtype.NF4)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize("columns", [128, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_its_nearest_level(dtype, columns):
    matrix = torch.randn(9, columns).to(dtype)
    matrix[3] = 0
    for form, levels in {int8.FORMAT: torch.arange(-127, 128) / 127, nf4.FORMAT: nf4.LEVELS}.items():
        codes, scales = q.quantize(matrix, form)
        for made, empty in zip((codes, scales), q.quantize(matrix.to("meta"), form), strict=True):
            assert (made.shape, made.dtype, made.is_contiguous()) == (empty.shape, empty.dtype, True)
        each = columns if form is int8.FORMAT else nf4.BLOCK
        rounded = q.dequantize(codes, scales, columns, dtype, form)
        assert rounded.dtype is dtype and rounded.shape == matrix.shape and not rounded[3].any()
        for row, codes_of_row in zip(matrix, rounded, strict=True):
            for part, found in zip(row.split(each), codes_of_row.split(each), strict=True):
                on_grid = part.float().abs().max() * levels
                nearest = on_grid[(part.float()[:, None] - on_grid).abs().argmin(dim=1)]
                tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype] * float(part.abs().max())
                torch.testing.assert_close(found.float(), nearest, rtol=0, atol=tolerance)


def test_codes_of_the_reference():
    """QLoRA's levels, and the order of two codes in a byte."""
    codes, scales = q.quantize(torch.cat((nf4.LEVELS, nf4.LEVELS, nf4.LEVELS, nf4.LEVELS))[None] * 3, nf4.FORMAT)
    assert scales.tolist() == [[3.0]]
    assert codes[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert nf4.PAIRS[0x2F].tolist() == [nf4.LEVELS[2], nf4.LEVELS[15]]


def searched(matrix):
    """Codes and scales of nf4 as QLoRA defines them: by a search for the interval between midpoints of levels."""
    blocks = F.pad(matrix, (0, -matrix.shape[1] % nf4.BLOCK)).view(len(matrix), -1, nf4.BLOCK)
    scales = blocks.abs().amax(dim=2)
    normalized = blocks.float() / scales.float().clamp(min=1e-30)[:, :, None]
    codes = torch.bucketize(normalized, (nf4.LEVELS[1:] + nf4.LEVELS[:-1]) / 2).to(torch.uint8).flatten(1)
    return codes[:, ::2] * 16 + codes[:, 1::2], scales


def hard_matrices():
    """Matrices with the numbers at which a wrong comparison, rounding or look-up would show."""
    torch.manual_seed(0)
    boundaries = (nf4.LEVELS[1:] + nf4.LEVELS[:-1]) / 2
    below, above = (torch.nextafter(boundaries, torch.full_like(boundaries, end)) for end in (-2.0, 2.0))
    cells = torch.arange(-nf4.CELLS, nf4.CELLS + 1) / nf4.CELLS  # where the table of cells has its edges
    edges = torch.cat([boundaries, below, above, cells, torch.nextafter(cells, torch.zeros_like(cells))])
    ones = torch.ones(len(edges), 1)  # the scale of each block is 1
    yield torch.cat([ones, edges[:, None], -edges[:, None], ones.expand(-1, 61) / 3], dim=1)
    yield torch.randn(700, 2048)  # several chunks
    yield torch.randn(96, 70).T  # as Conv1D has it
    yield torch.randn(5, 128) * 1e-39  # numbers below the smallest normal one
    yield torch.cat([torch.zeros(1, 128), torch.full((1, 128), torch.nan), torch.full((1, 128), torch.inf)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_search_bit_by_bit_on_any_device(dtype, monkeypatch):
    """Checkpoints hold checksums of codes and scales."""
    assert len(set(nf4.BOUNDARY_CELLS.tolist())) == len(nf4.BOUNDARIES)  # no cell has two
    for matrix in hard_matrices():
        matrix = matrix.to(dtype)
        wanted = searched(matrix)
        found = q.quantize(matrix, nf4.FORMAT)
        monkeypatch.setattr(q, "group_device", lambda: CUDA)
        with Waits() as waits:
            by_gpu = q.quantize(matrix, nf4.FORMAT)
        monkeypatch.undo()
        assert sum(waits.found.values()) > 2 and "cpu to cuda" in str(waits.found)  # it went there
        for made in (found, by_gpu):
            for tensor, expected in zip(made, wanted, strict=True):
                assert tensor.device.type == "cpu" and tensor.is_contiguous()
                assert torch.equal(tensor.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_int8_rounds_once():
    """bf16 weights are code times scale / 127, rounded; with a rounded scale / 127 one in five is another number."""
    codes, scales = q.quantize(torch.randn(64, 256).bfloat16(), int8.FORMAT)
    exact = (codes.double() * (scales.double() / 127)).float().bfloat16()
    assert torch.equal(q.dequantize(codes, scales, 256, torch.bfloat16, int8.FORMAT), exact)
    with Waits() as waits:
        on_gpu = q.dequantize(PretendCuda(codes), PretendCuda(scales), 256, torch.bfloat16, int8.FORMAT)
    assert torch.equal(on_gpu.values, exact) and not waits.found


FUSED = """
import torch
from mmfsdp.quantized import nf4
from mmfsdp.core import quantize as q
from mmfsdp.quantized.nf4_kernel import launch
for columns in (64, 70, 4992):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        codes, scales = q.quantize(torch.randn(9, columns).to(dtype), nf4.FORMAT)
        levels = nf4.LEVELS.to(dtype)
        if dtype is torch.bfloat16:  # numpy has none: the interpreter would cut off where a GPU rounds
            levels = levels.float()
        out = launch(codes, scales, levels, columns, nf4.BLOCK).to(dtype)
        assert torch.equal(out, q.dequantize(codes, scales, columns, dtype, nf4.FORMAT)), (columns, dtype)
print("equal")
"""


OF_A_UNIT = """
stored = []
for rows, columns in ((9, 64), (3, 70), (1, 4992)):
    stored.append((*q.quantize(torch.randn(rows, columns).half(), nf4.FORMAT), columns))
from tests.bench.gpu.unit_kernel import launch_unit
outs = launch_unit(stored, nf4.LEVELS.half(), nf4.BLOCK)
for (codes, scales, columns), out in zip(stored, outs, strict=True):
    assert torch.equal(out, q.dequantize(codes, scales, columns, torch.float16, nf4.FORMAT)), columns
print("equal")
"""


def test_the_fused_kernels_give_what_plain_operators_give():
    """By triton's interpreter, which runs them on the CPU: of a matrix, and of a unit, which is only measured."""
    pytest.importorskip("triton")
    both = in_fresh_python(FUSED + OF_A_UNIT, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=600)
    assert both == "equal\nequal\n"


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_fused_kernel_compiles_for_gpus(architecture):
    """Its whole way to machine code: A100 and H100. Codes are read 8, weights written 16 bytes at a time, rounded."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mmfsdp.quantized import nf4_kernel

    tensors = {"codes": "*u8", "scales": "*bf16", "levels": "*bf16", "out": "*bf16"}
    numbers = dict.fromkeys(("columns", "row_bytes", "row_blocks"), "i32")
    constants = {"BLOCK_BYTES": nf4.BLOCK // 2, "BYTES": nf4_kernel.BYTES}
    source = ASTSource(
        nf4_kernel._dequantize,
        signature={**tensors, **numbers, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        # Addresses and sizes that 16 divides, as torch's and a layer's are.
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(tensors) + len(numbers))},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert compiled.asm["cubin"]
    ptx = compiled.asm["ptx"]
    assert "ld.global.v2.b32" in ptx and "st.global.v4.b32" in ptx
    # A product of two bf16 numbers is exact in fp32, so that the compiler may as well multiply in bf16.
    assert "fma.rn.bf16" in ptx or "mul.bf16" in ptx or "cvt.rn.bf16" in ptx


@pytest.mark.parametrize("form", FORMS)
def test_a_source_of_quantized_weights_reads_each_matrix_once_and_leaves_others_as_they_are(form):
    stored, matrix = torch.randn(128, 64), torch.randn(64, 128)
    weights = {"conv.weight": stored, "linear.weight": matrix, "linear.bias": torch.ones(64)}
    source = QuantizedWeights(dict(weights), {"conv.weight": True, "linear.weight": False}, form.load())
    assert source.pop("linear.bias") is weights["linear.bias"]
    for name, wanted in (("linear.weight", matrix), ("conv.weight", stored.T)):
        codes, scales = q.quantize(wanted, form.load())
        # In the order in which the model has them; the matrix itself is gone after the first.
        assert torch.equal(source.pop(name + q.CODES), codes)
        assert not any(key.startswith(name) for key in source.weights)
        assert torch.equal(source.pop(name + q.SCALES), scales)
    assert not source.weights and not source.made


def test_nf4_on_a_gpu_is_one_operator_and_no_table_is_made_of_fake_tensors():
    codes, scales = q.quantize(torch.randn(8, 128).bfloat16(), nf4.FORMAT)
    with fake_mode():
        fake_codes = torch.empty(codes.shape, dtype=codes.dtype, device="cuda")
        fake_scales = torch.empty(scales.shape, dtype=scales.dtype, device="cuda")
        graph = make_fx(lambda c, s: q.dequantize(c, s, 128, torch.bfloat16, nf4.FORMAT))(fake_codes, fake_scales)
        assert q.dequantize(fake_codes, fake_scales, 128, torch.bfloat16, nf4.FORMAT).shape == (8, 128)
        fake = q.dequantize(torch.empty(8, 64, dtype=torch.uint8), torch.empty(8, 2), 128, torch.bfloat16, nf4.FORMAT)
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert operators == [torch.ops.mmfsdp.dequantize_nf4.default]
    assert fake.device.type == "cpu" and nf4.on_gpu.cache_info().currsize == 0
    assert not any(isinstance(table, FakeTensor) for table in nf4.PAIRS_OF.values())


def test_without_triton_nf4_is_dequantized_by_plain_operators_with_a_warning():
    """Where triton cannot run, such as on a CPU, which stands for a GPU here."""
    codes, scales = q.quantize(torch.randn(8, 70).bfloat16(), nf4.FORMAT)
    nf4.fused_kernel.cache_clear()
    with pytest.warns(UserWarning, match="frozen_dtype: nf4 is dequantized by plain operators.*triton cannot run"):
        plain = nf4.dequantize_on_gpu(codes, scales, 70, torch.bfloat16)
    assert torch.equal(plain, q.dequantize(codes, scales, 70, torch.bfloat16, nf4.FORMAT))
    nf4.fused_kernel.cache_clear()
    nf4.on_gpu.cache_clear()


class Parts(nn.Module):
    """A module that trains, and each kind of module that is quantized after it."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.linear = frozen(nn.Linear(64, 192, bias=False))
        self.conv = frozen(Conv1D(64, 192))
        self.attention = frozen(nn.MultiheadAttention(64, 4, batch_first=True))

    def forward(self, x):
        x = self.conv(self.linear(self.before(x)))
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_dequantized_matrices_and_only_codes_are_kept(form):
    torch.manual_seed(0)
    model, x = Parts(), torch.randn(2, 5, 64)
    plain = copy.deepcopy(model)
    q.quantize_model(model, FSDPParams(frozen_dtype=form))
    names = {name for name, _ in model.named_parameters() if name.endswith("_codes")}
    assert names == {f"{m}_codes" for m in ("linear.weight", "conv.weight")} | {
        "attention.in_proj_weight_codes",
        "attention.out_proj.weight_codes",
    }
    plain.linear.weight.data = model.linear.weight
    plain.conv.weight.data = model.conv.weight.T.contiguous()
    plain.attention.in_proj_weight.data = model.attention.in_proj_weight
    plain.attention.out_proj.weight.data = model.attention.out_proj.weight
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, keep):
        model(x)
    large = [t.shape for t in kept if t.is_floating_point() and t.ndim == 2 and t.numel() >= 64 * 64]
    assert not large, "a dequantized matrix is kept for backward"
    out = model(x)
    out.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(model.before.weight.grad, plain.before.weight.grad)


def test_backward_is_known_to_pass_through_codes():
    model = Parts()
    q.quantize_model(model, FSDPParams(frozen_dtype="nf4"))
    passed = trace(model, {"x": torch.randn(2, 5, 64)}).grad_flow
    for matrix in ("linear.weight", "conv.weight", "attention.in_proj_weight"):
        assert f"{matrix}_codes" in passed


def test_what_stays_as_it_is():
    """What trains, embeddings, norms, tied matrices, heads, other classes, and what `not_quantized` names."""
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=50))
    frozen(model).transformer.h[0].mlp.c_fc.requires_grad_(True)
    chosen = {name for name, _, _ in q.matrices(model, FSDPParams())}
    layer = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    wanted = {f"transformer.h.{i}.{part}.weight" for i in (0, 1) for part in layer}
    assert chosen == wanted - {"transformer.h.0.mlp.c_fc.weight"}
    without_attention = FSDPParams(frozen_dtype="nf4", not_quantized=["*.attn.*"])
    assert not any(".attn." in name for name, _, _ in q.matrices(model, without_attention))
    with pytest.raises(ParamError, match="not_quantized: 'x.*' matches no frozen matrix"):
        list(q.matrices(model, FSDPParams(frozen_dtype="nf4", not_quantized=["x.*"])))
    flamingo = {name for name, _, _ in q.matrices(tiny_flamingo(), FSDPParams())}
    assert flamingo and not any("lm_head" in name or "embed" in name or "cross" in name for name in flamingo)


def test_refused_by_name(monkeypatch):
    with pytest.raises(ParamError, match="frozen_dtype: nf4 cannot be honored by FSDP1.*FSDP2"):
        FSDPParams(backend="FSDP1", frozen_dtype="nf4")
    with pytest.raises(ParamError, match="not_quantized: .* has no effect unless frozen_dtype is int8 or nf4"):
        FSDPParams(frozen_dtype="bf16", not_quantized=["*"])
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(ParamError, match="frozen_dtype: int8 needs torch 2.12 or newer with FSDP2"):
        make_plan(tiny_flamingo(), FSDPParams(frozen_dtype="int8"), world_size=2)
    assert make_plan(tiny_flamingo(), FSDPParams(backend="DDP", frozen_dtype="int8"), world_size=2)


@pytest.mark.parametrize("meta", [False, True])
def test_weights_that_another_library_has_quantized_are_refused_by_its_name(tmp_path, meta):
    GPT2Config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}).save_pretrained(tmp_path)
    with pytest.raises(ParamError, match="quantized by bitsandbytes.*set fsdp.frozen_dtype to nf4 or int8"):
        build_language(BackboneParams(name=str(tmp_path), weights=str(tmp_path)), meta=meta)


def test_plan_counts_the_weights_of_the_model():
    plain = make_plan(tiny_flamingo(), FSDPParams(), world_size=2)
    for form in FORMS:
        plan = make_plan(tiny_flamingo(), FSDPParams(frozen_dtype=form), world_size=2)
        assert [u.numel for u in plan.units] == [u.numel for u in plain.units]
        assert f"{form}>fp32" in str(plan) and "mix>" not in str(plan)


class Fp8(q.Format):
    """A third format: codes that are floating-point numbers themselves, a scale for each row."""

    def quantize(self, matrix):
        scales = matrix.abs().amax(dim=1, keepdim=True)
        return (q.relative(matrix, scales) * 448).to(torch.float8_e4m3fn), scales

    def dequantize(self, codes, scales, columns, dtype):
        return (codes.float() * (scales.float() / 448)).to(dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_codes_of_a_format_of_ones_own_are_cast_by_nothing(precision, monkeypatch):
    monkeypatch.setattr(FrozenDtype, "load", lambda self: Fp8())
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    model[0].requires_grad_(False)
    x = torch.randn(4, 64)
    exact = model(x)
    fields = {"frozen_dtype": "int8", "mixed_precision": precision, "backend": "DDP", "sharding_strategy": "NO_SHARD"}
    plan = make_plan(model, FSDPParams(**fields), world_size=1)
    (codes,) = (p for p in plan.by_name.values() if p.name == "0.weight_codes")
    assert codes.dtype == "float8_e4m3fn" and not codes.is_floating and codes.num_weights == 64 * 32
    with fake_group(1):
        q.quantize_model(model, plan.fsdp)
        wrapped = apply_plan(model, plan, device="cpu")
        assert model[0].weight_codes.dtype is torch.float8_e4m3fn
        assert torch.allclose(wrapped(x).float(), exact, atol=0.1)
