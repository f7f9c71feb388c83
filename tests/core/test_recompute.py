"""Activation checkpointing with FSDP2, whatever part of a layer trains, on two ranks: loss and gradients are those of
one process, and what is sent is what was planned."""

import itertools
import warnings
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from mmfsdp.core.quantize import quantize_model
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.compat.describe import describe
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan, plan_on_rank_0
from mmfsdp.predict import estimate
from tests import families
from tests.pages import PAGES
from tests.parity import whole, wire
from tests.ranks import on_ranks

WORDS, WIDTH = 160, 32
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "max_position_embeddings": 64, **LAYERS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
"""In fp32: 20 numbers are a multiple of 16 bytes, and in bf16 they are not."""
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 64, **TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def experts() -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[]))


def qwen() -> nn.Module:
    return families.build("qwen2_5_vl")


class Layer(nn.Module):
    """A layer with torch's attention, as a tower of CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


class OwnLayer(nn.Module):
    """A layer that checkpoints a part of itself: FSDP2's hooks of the layer do not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.sigmoid(self.scale * self.before(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


def own() -> nn.Module:
    return nn.Sequential(nn.Sequential(OwnLayer(), OwnLayer(), OwnLayer()))


def switched_on() -> nn.Module:
    model = llama()
    model.activation_checkpointing_enable()
    return model


MODELS = {model.__name__: model for model in (llama, gpt2, experts, qwen, Tower, own, switched_on)}
TRAINED = [
    "llama *.mlp.*",
    "llama *.self_attn.*",
    "llama *norm*",
    "llama *.layers.1.mlp.*",
    "llama *.layers.1.mlp.* *.layers.2.*",
    "llama *.layers.1.mlp.down_proj*",
    "llama *.layers.2.* lm_head*",
    "gpt2 *h.1.mlp.*",
    "gpt2 *.attn.*",
    "experts *.mlp.gate.*",
    "experts *.experts.*",
    "qwen *language_model*.mlp.*",
    "Tower embedding*",
    "Tower *.mlp.*",
]
"""A model, and the patterns of what trains in it."""
CASES = []
for number, choice in enumerate(itertools.product(TRAINED, ("SHARD", "KEEP"), (True, False))):
    # Each pattern with and without an example, quantized and not.
    CASES.append((*choice, "int8" if (number + number // 2) % 2 else None, "all"))
CASES += [(trained, "REPLICATE", True, None, "all") for trained in TRAINED[::4]]
OWN = ["own 0.1.after*", "switched_on *.layers.1.mlp.*"]
CASES += [(trained, "SHARD", True, None, "none") for trained in OWN]


def model_of(trained: str) -> nn.Module:
    name, *patterns = trained.split()
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter_name, p in model.named_parameters(remove_duplicate=False):
        p.requires_grad_(any(fnmatchcase(parameter_name, pattern) for pattern in patterns))
    return model.train()


def inputs_of(trained: str, rank: int) -> dict[str, Any]:
    name = trained.split()[0]
    generator = torch.Generator().manual_seed(rank)
    if name == "qwen":
        return families.Inputs("qwen2_5_vl", seed=rank).inputs()
    if name in ("Tower", "own"):
        return {"x" if name == "Tower" else "input": torch.randn(2, 5, WIDTH, generator=generator)}
    ids = torch.randint(WORDS, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    return output.square().mean() if isinstance(output, torch.Tensor) else output.loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def of_one_process(trained: str, frozen_dtype: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of both ranks' inputs, and the gradients of their mean."""
    model = model_of(trained)
    quantize_model(model, FSDPParams(frozen_dtype=frozen_dtype))
    losses = []
    for rank in range(2):
        loss = loss_of(model, inputs_of(trained, rank))
        (loss / 2).backward()
        losses.append(loss.item())
    return losses, gradients(model)


def problems(trained: str, policy: str, with_example: bool, frozen_dtype: str | None, choice: str) -> list[str]:
    """Return what is not as in one process, or not as planned, in two steps."""
    losses, expected = of_one_process(trained, frozen_dtype)
    fsdp = FSDPParams(frozen_policy=policy, frozen_dtype=frozen_dtype, activation_checkpointing=choice)
    example = inputs_of(trained, 0) if with_example else None
    model = model_of(trained)
    plan = plan_on_rank_0(model, partial(make_plan, model, fsdp, world_size=2, example=example))
    planned = wire(estimate(plan, TrainParams()).wire, control=False)
    model = apply_plan(model, plan)
    # transformers' own switch makes the embedding's output require a gradient: the lint says what that costs.
    found = [finding.code for finding in plan.lint if finding.code != "inputs-require-grad"]
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, Collectives() as counted:
            warnings.simplefilter("always")
            loss = loss_of(model, inputs_of(trained, dist.get_rank()))
            loss.backward()
            sent = wire(counted.rows(), control=False)
        # Qwen2.5-VL registers its modules in another order than it calls them: a plan without an example warns.
        if not trained.startswith("qwen"):
            found += [str(warning.message) for warning in caught if "plan:" in str(warning.message)]
        if sent != planned:
            found.append(f"sent {sent}, planned {planned}")
        if abs(loss.item() - losses[dist.get_rank()]) > 1e-5:
            found.append(f"loss {loss.item()}, alone {losses[dist.get_rank()]}")
        computed = gradients(model)
        model.zero_grad()
        if computed.keys() != expected.keys():
            found.append(f"gradients of {computed.keys() ^ expected.keys()}")
        for name in computed.keys() & expected.keys():
            if not torch.allclose(computed[name], expected[name], rtol=1e-4, atol=1e-6):
                found.append(f"gradient of {name}")
    return found


# ---- transformers' own switch, which also makes the embedding's output require a gradient ----

SWITCHES = {
    "no checkpointing": {},
    "`fsdp.activation_checkpointing: all`": {"ours": "all"},
    "`gradient_checkpointing_enable()`": {"use_reentrant": False},
    "the same, then `disable_input_require_grads()`": {"use_reentrant": False, "inputs": False},
    '`gradient_checkpointing_enable({"use_reentrant": True})`': {"use_reentrant": True},
    "the same, with forward prefetch by hand": {"use_reentrant": True, "prefetch": True},
    "the same before transformers 5.23": {"use_reentrant": True, "prefetch": True, "old": True},
}
"""A way to checkpoint six layers of which the fifth trains. What they gather is on notebooks/reference/policies.md."""


class CheckpointedCall(nn.Module):
    """A layer whose call is checkpointed, with its hooks, as by transformers before 5.23."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=True)


CheckpointedCall.__name__ = "GradientCheckpointingLayer"


def six_layers(*, use_reentrant: bool | None = None, inputs: bool = True) -> nn.Module:
    """Return a model of which the fifth of six layers trains."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 6})).train()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.4" in name)
    if use_reentrant is not None:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
        if not inputs:
            model.disable_input_require_grads()
    return model


def gathers_in_backward(*, prefetch: bool = False, old: bool = False, ours: str = "none", **switches: Any) -> list[Any]:
    """Return how often fully_shard's units of layers are gathered in backward, what the lint says, and the gradient."""
    model, ids = six_layers(**switches), inputs_of("llama", dist.get_rank())
    if ours != "none":
        model = apply_plan(
            model, make_plan(model, FSDPParams(activation_checkpointing=ours), world_size=2, example=ids)
        )
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    layers = list(model.model.layers)
    for layer, following in zip(layers, layers[1:], strict=False):
        if prefetch:
            layer.set_modules_to_forward_prefetch([following])
    if old:
        for layer in layers:
            layer.__class__ = type(type(layer).__name__, (CheckpointedCall, type(layer)), {})
            layer.gradient_checkpointing = False
    with Collectives() as counted:
        model(**ids).loss.backward()
    if old:
        for layer in layers:
            layer.gradient_checkpointing = True
    count = sum(row.count for row in counted.rows() if (row.kind, row.phase) == ("all-gather", "backward"))
    grad = whole(model.model.layers[4].mlp.up_proj.weight.grad).norm().item()
    return [count, [finding.code for finding in describe(model).lint if finding.code != "left-in-root"], grad]


def all_cases() -> tuple[list[list[str]], dict[str, list[Any]]]:
    torch.set_num_threads(1)
    by_case = []
    for case in CASES:
        try:
            by_case.append(problems(*case))
        except Exception as error:
            by_case.append([f"{type(error).__name__}: {error}"])
    return by_case, {way: gathers_in_backward(**switches) for way, switches in SWITCHES.items()}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[tuple[list[list[str]], dict[str, list[Any]]]]:
    return on_ranks(all_cases, 2)


@pytest.mark.real
@pytest.mark.parametrize("trained", TRAINED + OWN)
def test_what_runs_again_in_backward_is_gathered_there_as_planned(on_two_ranks, trained):
    for by_case, _ in on_two_ranks:
        for case, found in zip(CASES, by_case, strict=True):
            if case[0] == trained:
                assert not found, (case, found)


@pytest.mark.real
def test_what_transformers_own_switch_gathers_in_backward_is_on_its_page(on_two_ranks):
    (_, first), (_, second) = on_two_ranks
    page = (PAGES / "policies.md").read_text()
    gradient = first["no checkpointing"][2]
    for way, (count, codes, grad) in first.items():
        lint = ", ".join(f"`{code}`" for code in codes)
        assert f"| {way} | {count} | {lint} |" in page
        assert second[way][:2] == [count, codes] and grad == pytest.approx(gradient, rel=1e-4)


def test_a_unit_that_runs_again_is_kept_until_then():
    """KEEP and what ends forward last save its second all-gather, as they do for a unit with grad flow."""
    trained = "llama *.layers.1.mlp.*"
    gathers = {}
    for policy in ("SHARD", "KEEP"):
        fsdp = FSDPParams(frozen_policy=policy, activation_checkpointing="all")
        plan = make_plan(model_of(trained), fsdp, world_size=2, example=inputs_of(trained, 0))
        units = {unit.name: unit for unit in plan.units}
        layer = units["model.layers.1"]
        assert layer.kind == "frozen" and layer.recomputed and not layer.grad_flow
        assert not units["model.layers.0"].needed_in_backward, "what comes before it does not run again"
        gathers[policy] = (layer.gathers_forward, layer.gathers_backward)
    assert gathers == {"SHARD": (1, 1), "KEEP": (1, 0)}
