"""FLOPs of a plan beside those counted by hand: 2 for each weight and token in a product, and full attention."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, ViTConfig

from mmfsdp import FSDPParams, make_plan
from mmfsdp.predict.work import WorkCounter, grouped_mm_flops

BATCH, LENGTH, LAYERS, HEADS, HEAD_WIDTH = 2, 512, 2, 8, 32
TOKENS = BATCH * LENGTH
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
ATTENTION = LAYERS * 4 * BATCH * HEADS * LENGTH * LENGTH * HEAD_WIDTH
"""In forward: scores, and their product with the values."""


def llama(**options):
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=1000, head_dim=HEAD_WIDTH, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def matrices(model):
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name)


def planned(model, inputs, **fields):
    return make_plan(model, FSDPParams(mixed_precision="bf16", **fields), world_size=2, example=inputs)


def text():
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_language_model_that_trains_in_full(attention):
    model = llama(attn_implementation=attention)
    plan = planned(model, text())
    assert plan.flops == pytest.approx(3 * (2 * matrices(model) * TOKENS + ATTENTION), rel=0.01)
    # The backward of fused attention computes the scores again; eager attention has kept them.
    again = ATTENTION // 2 if attention == "sdpa" else 0
    assert plan.hardware_flops - plan.flops == again
    # GPU kernels skip half of causal attention, of which backward has 5 products for 2 in forward.
    fused = 3.5 * ATTENTION if attention == "sdpa" else 0
    assert (plan.attention_flops, plan.causal_flops) == (fused / 2, fused / 2)
    assert plan.moved_bytes > 0 and plan.kernels > 100


@pytest.mark.parametrize("frozen_dtype", [None, "nf4"])
def test_a_frozen_language_model_computes_no_gradients_of_weights_and_again_what_is_checkpointed(frozen_dtype):
    model = llama(tie_word_embeddings=False)
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)  # stands for what comes before it: backward passes through it all
    head = model.lm_head.weight.numel()
    needed = 4 * matrices(model) * TOKENS + 3 * ATTENTION
    kept = planned(model, text(), frozen_dtype=frozen_dtype)
    again = planned(model, text(), frozen_dtype=frozen_dtype, activation_checkpointing="all")
    assert kept.flops == again.flops == pytest.approx(needed, rel=0.01)
    assert kept.hardware_flops == kept.flops + ATTENTION // 2
    # Recomputation ends with the last layer's last saved tensor: the down projection's output is not needed.
    down = 2 * TOKENS * LAYERS * 256 * 512
    layers = 2 * TOKENS * (matrices(model) - head) + ATTENTION
    assert layers - down <= again.hardware_flops - kept.hardware_flops <= layers


class Counting(TorchDispatchMode):
    """Counts each operator."""

    def __init__(self, *, in_unit=False):
        super().__init__()
        self.counter, self.in_unit = WorkCounter(nn.Linear(1, 1)), in_unit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.counter.add(func, args, kwargs or {}, output, in_unit=self.in_unit)
        return output


def test_kernels_are_what_reads_or_writes_memory():
    with Counting() as mode:
        x = torch.empty(4, 8)  # allocates, and writes nothing
        y = x.view(8, 4).transpose(0, 1)  # views
        y.exp()
        x.add_(1)
    work = mode.counter.work
    assert work.kernels == 2
    assert work.moved_bytes == 4 * x.nbytes, "each of the two reads and writes as much"


@pytest.mark.parametrize("in_unit", [False, True])
def test_operators_between_two_products_may_become_one_kernel(in_unit):
    with Counting(in_unit=in_unit) as mode:
        x, weight = torch.empty(8, 8), torch.empty(8, 8)
        gate = x @ weight
        kept = gate.sigmoid()
        (kept * 2 + gate) @ weight  # the product by 2 is freed before
        x.exp().add_(1) @ weight
    work = mode.counter.work
    assert work.kernels == 3 + 5 and work.moved_bytes == (2 + 2 + 3 + 2 + 2) * x.nbytes
    # The first kernel reads `gate`, and writes the sum and what is kept; the second reads x and writes its result.
    assert (work.fusable_kernels, work.fusable_bytes) == ((2 + 1, (4 + 2) * x.nbytes) if in_unit else (0, 0))


def test_compiled_units_are_the_layers_and_what_they_recompute_or_a_custom_operator_does():
    model = llama()
    plan, again = planned(model, text()), planned(model, text(), activation_checkpointing="all")
    unsharded = planned(model, text(), auto_wrap_policy="NO_WRAP")
    assert 0 < plan.fusable_bytes < plan.moved_bytes and 0 < plan.fusable_kernels < plan.kernels
    assert again.fusable_kernels > plan.fusable_kernels
    assert (unsharded.fusable_bytes, unsharded.fusable_kernels) == (0, 0), "the root is not compiled"
    # What stays: of each layer the products, attention, and at least one kernel between them.
    products = LAYERS * 3 * 7
    assert plan.kernels - plan.fusable_kernels > 2 * products


def test_a_vision_encoder():
    config = ViTConfig(**SIZES, image_size=224, patch_size=16)
    with torch.device("meta"):
        model = AutoModel.from_config(config, add_pooling_layer=False)
    plan = planned(model, {"pixel_values": torch.zeros(BATCH, 3, 224, 224)})
    patches, tokens = BATCH * 196, BATCH * 197
    convolution = 256 * 3 * 16 * 16
    layers = sum(p.numel() for name, p in model.named_parameters() if "layer" in name and p.ndim == 2)
    attention = LAYERS * 4 * BATCH * HEADS * 197 * 197 * HEAD_WIDTH
    # The picture needs no gradient, so the convolution has no backward to its input.
    assert plan.flops == pytest.approx(6 * layers * tokens + 3 * attention + 4 * convolution * patches, rel=0.01)
    assert plan.causal_flops == 0 and plan.attention_flops == pytest.approx(3.5 * attention)


def test_products_of_experts_count_by_rows():
    rows, experts = torch.empty(64, 32, device="meta"), torch.empty(4, 32, 16, device="meta")
    assert grouped_mm_flops(rows, experts) == 2 * 64 * 32 * 16
    assert grouped_mm_flops(rows.T, torch.empty(64, 16, device="meta")) == 2 * 64 * 32 * 16
    assert grouped_mm_flops(torch.empty(4, 8, 32, device="meta"), experts) == 2 * 4 * 8 * 32 * 16


class OwnCheckpoint(nn.Module):
    """Checkpoints a part of itself, with either of torch's ways."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(64, 64), nn.Linear(64, 64), reentrant

    def forward(self, x):
        return checkpoint(self.first, self.second(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_models_own_is_no_needed_work(reentrant):
    plan = planned(OwnCheckpoint(reentrant=reentrant), {"x": torch.ones(8, 64)})
    product = 2 * 8 * 64 * 64
    assert plan.flops == 5 * product and plan.hardware_flops in (5 * product, 6 * product)
    assert WorkCounter(nn.Linear(1, 1)).work.flops == 0
