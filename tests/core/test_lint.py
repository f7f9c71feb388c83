"""Each mistake is built, and found once, by name and with its fix."""

import os
import re
import subprocess
import sys

import pytest
import torch
from test_plan import Stack
from tiny import last_layer_trains, tiny_batch, tiny_flamingo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mmfsdp.core.freeze import freeze
from mmfsdp.core.guards import list_all, some
from mmfsdp.core.micro_batch import check_loss
from mmfsdp.core.names import plain_name
from mmfsdp.core.step import train_step
from mmfsdp.core.token_loss import LossLinear
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit import cli
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.lint.cost import card_without_bf16, emulated_bf16, units_to_compile
from mmfsdp.lint.plan import lint
from mmfsdp.params import FSDPParams, ParamError, TrainParams
from mmfsdp.planning import make_plan, wrap_fsdp
from tests.parity import local
from tests.ranks import fake_group


def plan(model: nn.Module, *, ranks: int = 2, example=None, **fields):
    return make_plan(model, FSDPParams(**fields), world_size=ranks, example=example)


def stack(dim: int = 8, *frozen: str) -> Stack:
    with torch.device("meta"):
        model = Stack(dim)
    freeze(model, frozen or ("scale",))
    return model


class Shared(nn.Module):
    """The output uses the embedding's weight without calling the embedding."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.table = nn.Embedding(dim, dim)
        self.layer = nn.Linear(dim, dim)

    def forward(self, ids):
        return nn.functional.linear(self.layer(self.table(ids)), self.table.weight)


def mixed_fsdp1():
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Block"}
    return plan(stack(8, "layers.0.q.*"), backend="FSDP1", **layers).lint


def two_dtypes():
    model = stack()
    for layer in model.layers:
        layer.q.to(torch.bfloat16)
    return plan(model).lint


def two_dtypes_fsdp1():
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Block"}
    precision = {"frozen_dtype": "bf16", "mixed_precision": "bf16"}
    return plan(stack(8, "layers.*.q.*"), backend="FSDP1", **precision, **layers).lint


def scalar(backend: str = "FSDP2"):
    model = stack(8, "layers.*")
    model.gate = nn.Parameter(torch.zeros((), device="meta"))
    return plan(model, backend=backend).lint


def integers(backend: str = "FSDP1"):
    model = stack(8, "layers.*")
    model.layers[0].table = nn.Parameter(torch.zeros(8, dtype=torch.int8, device="meta"), requires_grad=False)
    return plan(model, backend=backend).lint


def scalar_fsdp1():
    return scalar("FSDP1")


def wrapped_before():
    model = stack()
    made = plan(model)
    model.layers[0].__class__ = type("Wrapped", (FSDPModule, type(model.layers[0])), {})  # what fully_shard leaves
    return lint(model, made)


def wrapped_by_ddp():
    return plan(as_ddp(stack())).lint


def as_ddp(model: nn.Module) -> nn.Module:
    """As DDP holds a model, without its reducer."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


IDLE = ("unused.*", "head.bias")


def never_used():
    assert not plan(stack(8, *IDLE), backend="DDP", example={"x": torch.zeros(2, 8)}).lint
    return plan(stack(8, "unused.weight"), backend="DDP", example={"x": torch.zeros(2, 8)}).lint


class Coded(Shared):
    """Its inputs go through a codebook, of which only the index of the nearest entry is used."""

    def __init__(self):
        super().__init__()
        self.codebook = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.layer(self.table(self.codebook(x).argmax(dim=-1)))


def used_without_gradient():
    example = {"x": torch.zeros(2, 8)}
    findings = [plan(Coded(), backend=backend, example=example).lint for backend in ("DDP", "FSDP1", "FSDP2")]
    assert findings[0] == findings[1] == findings[2]
    return findings[0]


def nothing_trains():
    (found,) = plan(model := stack().requires_grad_(False)).lint
    freeze(model, re.findall("'(!.*)'", found.message))
    assert not plan(model).lint
    return [found]


def no_parameters():
    return plan(nn.Sequential(nn.GELU()), example={"input": torch.zeros(2, 8)}).lint


def left_in_root():
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Adapted"}
    return plan(stack(64), **layers).lint


def left_to_the_root():
    model = Shared(512)
    freeze(model, ("layer.*",))
    return plan(model, example={"ids": torch.zeros(2, 3, dtype=torch.int64)}).lint


class Experts(nn.Module):
    """A layer of 8 experts, as transformers holds them: one tensor for all."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 8), nn.Parameter(torch.zeros(8, 64, 64))

    def forward(self, x):
        weights = self.router(x).softmax(dim=-1)  # (batch, experts)
        return torch.einsum("bi,eij,be->bj", x, self.experts, weights)


def over_sharded():
    model = nn.Sequential(Experts(), Experts())
    assert not plan(model, ranks=8).lint and not plan(model, ranks=512, backend="FSDP1").lint
    (found,) = plan(model, ranks=512).lint
    (shard,) = re.findall("HYBRID_SHARD with dp_shard ([0-9]+)", found.message)
    assert not plan(model, ranks=512, sharding_strategy="HYBRID_SHARD", dp_shard=int(shard)).lint
    return [found]


def inputs_require_grad():
    model = last_layer_trains()
    ids = torch.ones(2, 8, dtype=torch.int64)
    for example in (None, {"input_ids": ids, "labels": ids}):
        quiet = plan(model, example=example)
        model.enable_input_require_grads()
        costly = plan(model, example=example)
        model.disable_input_require_grads()
        assert quiet.lint == ()
        more = [
            b.name for a, b in zip(quiet.units, costly.units, strict=True) if a.gathers_backward < b.gathers_backward
        ]
        assert more == [f"model.layers.{i}" for i in range(5)]
    return costly.lint


def inputs_require_grad_for_reentrant_checkpointing():
    """Without that gradient, what trains in a reentrant layer would get none, and no error would tell."""
    model = last_layer_trains()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    return plan(model.train()).lint


def wrapped_to_checkpoint():
    model = stack()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return plan(model).lint


def used_outside():
    model = Shared()
    made = plan(model, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="Embedding,Linear")
    assert "table" in [u.name for u in made.units]  # without an example nobody could know
    seen = plan(model, example={"ids": torch.zeros(2, 3, dtype=torch.int64)})
    assert not seen.lint and "table.weight" in [p.name for p in seen.units[0].params]
    from mmfsdp.core.trace import trace

    return lint(model, made, trace=trace(model, {"ids": torch.zeros(2, 3, dtype=torch.int64)}))


def unfrozen_later():
    model = stack()
    made = plan(model)
    model.scale.requires_grad_(True)
    return lint(model, made)


MISTAKES = {
    mixed_fsdp1: ("warning", "mixed-unit", "layers.0.q.base.*set backend to FSDP2.*FROZEN_AWARE"),
    two_dtypes: ("error", "two-dtypes", r"layers.0.*bfloat16.*to float32 before"),
    two_dtypes_fsdp1: ("error", "two-dtypes", r"layers.0.*set backend to FSDP2"),
    integers: ("error", "integers", "layers.0.table.*set backend to FSDP2"),
    scalar: ("error", "scalar", r"model.gate = .*reshape\(1\)"),
    scalar_fsdp1: ("error", "scalar", r"gate.*\(1,\)"),
    wrapped_before: ("error", "wrapped-before", "layers.0: already.*plain"),
    wrapped_by_ddp: ("error", "wrapped-before", "the model: already.*plain"),
    never_used: ("warning", "no-gradient", "head.bias, unused.bias: .*DDP fails.*freeze"),
    used_without_gradient: ("warning", "no-gradient", "codebook.weight: .*argmax.*DDP fails.*freeze"),
    nothing_trains: ("error", "nothing-trains", "freeze.*'!"),
    no_parameters: ("error", "no-parameters", "model: it has no parameters"),
    left_in_root: ("warning", "left-in-root", "head.weight.*FROZEN_AWARE"),
    left_to_the_root: ("warning", "left-in-root", "table.weight.*its own module"),
    over_sharded: ("warning", "over-sharded", "0.experts: 8 rows over 512 ranks.* 6[0-9.]* times.*dp_shard 8"),
    inputs_require_grad: (
        "warning",
        "inputs-require-grad",
        r"model.layers.0, model.layers.1 and 3 more.*embed_tokens.*disable_input_require_grads\(\)",
    ),
    inputs_require_grad_for_reentrant_checkpointing: (
        "warning",
        "inputs-require-grad",
        r"model.layers.0.*set fsdp.activation_checkpointing instead.*reentrant.*False}, and then call disable_input",
    ),
    wrapped_to_checkpoint: ("error", "wrapped-before", "layers.0: already.*plain"),
    used_outside: ("error", "used-outside", "table.weight.*example"),
    unfrozen_later: ("error", "unfrozen-later", "scale.*before make_plan"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_mistake_is_found_once_and_named(mistake):
    level, code, words = MISTAKES[mistake]
    headless = mistake in (mixed_fsdp1, two_dtypes_fsdp1)  # their heads are in no layer
    found = [f for f in mistake() if not headless or f.code != "left-in-root"]
    assert [(f.level, f.code) for f in found] == [(level, code)]
    assert re.search(words, found[0].message), found[0].message


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{}, {"frozen_policy": "KEEP"}, {"backend": "DDP"}, {"backend": "FSDP1"}])
def test_sound_plans_are_quiet(fields, tied):
    assert plan(tiny_flamingo(tied=tied), **fields).lint == ()


@pytest.mark.parametrize("fields", [{}, {"frozen_policy": "REPLICATE"}, {"backend": "DDP"}, {"backend": "FSDP1"}])
def test_a_forward_stops_where_a_frozen_parameter_is_trainable(fake_ranks, fields):
    model = apply_plan(tiny_flamingo(), plan(tiny_flamingo(), **fields))
    model(**tiny_batch().inputs())
    next(p for n, p in model.named_parameters() if "vision_encoder" in n).requires_grad_()
    with pytest.raises(ParamError, match="vision_encoder.*trainable now.*before make_plan"):
        model(**tiny_batch().inputs())


@pytest.mark.parametrize("backend, share", [("FSDP2", 2), ("FSDP1", 2), ("DDP", 1)])
def test_parameters_of_any_strides_are_sharded(fake_ranks, backend, share):
    conv = nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(8, 8), conv, nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.randn(8, 8).t())
    model[0].bias = nn.Parameter(torch.ones(1).expand(8), requires_grad=False)
    model[2].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
    whole = {name: p.detach().clone().flatten() for name, p in model.named_parameters()}
    wrapped = apply_plan(model, plan(model, backend=backend))
    numel = 0
    for full_name, p in wrapped.named_parameters():
        # The first rank has the first rows of each parameter; in FSDP1 the first half of a unit's parameters, in a row.
        shard = local(p).detach().flatten()
        assert torch.equal(shard, whole[plain_name(full_name, wrapped)][: len(shard)]), full_name
        numel += len(shard)
    assert numel == sum(map(len, whole.values())) // share


@pytest.fixture
def fake_ranks():
    with fake_group(2):
        yield


def test_an_error_stops_the_launch():
    model = stack()
    made = plan(model)
    made.check()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="added.weight.*make a new plan"):
        apply_plan(model, made)


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_training_stops_where_the_model_is_no_longer_as_planned(fake_ranks, backend):
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "FlamingoLayer"}
    with pytest.warns(UserWarning, match="plan: the root unit holds") as warned:
        wrap_fsdp(tiny_flamingo(), FSDPParams(backend=backend, **layers))
    assert {warning.filename for warning in warned} == {__file__}, "a warning names the line that calls wrap_fsdp"
    model = apply_plan(tiny_flamingo(), plan(tiny_flamingo(), backend=backend))
    batches, (optimizer, _) = [tiny_batch()], build_optimizer(model, TrainParams())
    with pytest.raises(ParamError, match="^model: Flamingo returns no loss"):  # not FSDPFlamingo
        check_loss(getattr(model, "module", model), None)
    with pytest.raises(ParamError, match="frozen, yet given to the optimizer"):
        train_step(model, batches, SGD(model.parameters(), lr=1.0))
    with pytest.raises(ParamError, match="nothing that trains was given to the optimizer"):
        train_step(model, batches, build_optimizer(tiny_flamingo(), TrainParams())[0])
    next(p for p in model.parameters() if not p.requires_grad).requires_grad_(True)
    with pytest.raises(ParamError, match="vision_encoder.*trainable now.*before make_plan"):
        train_step(model, batches, optimizer)


BLOCKS = ["--fsdp.auto-wrap-policy", "TRANSFORMER_BASED_WRAP", "--fsdp.transformer-layer-cls"]


@pytest.mark.parametrize("command", ["launch", "run"])
def test_an_error_stops_the_commands_before_anything_starts(command, tmp_path, capsys):
    where = ["--config", "tiny", "--launch.folder", str(tmp_path / "runs")]
    assert cli.main([command, *where, *BLOCKS, "ModuleList"]) == 2
    assert "the model has no ModuleList with a forward" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_plan_command_tells_errors_and_warnings(capsys):
    two_dtypes = ["--fsdp.backend", "FSDP1", "--fsdp.frozen-dtype", "bf16", "--fsdp.mixed-precision", "bf16"]
    assert cli.main(["plan", "--config", "tiny", *two_dtypes, *BLOCKS, "FlamingoLayer"]) == 1
    assert cli.main(["plan", "--config", "tiny", *BLOCKS, "LayerNorm"]) == 0
    said = capsys.readouterr().out
    assert "error: " in said and "warning: the root unit holds" in said


def test_fp32_on_a_gpu_is_told_with_what_it_costs_unless_tf32_is_on():
    def codes(device, **fields):
        fsdp = FSDPParams(**fields)
        return [f.code for f in make_plan(stack(), fsdp, world_size=2, train=TrainParams(device=device)).lint]

    assert codes("cuda") == codes("cuda", backend="DDP") == codes("cuda", mixed_precision="fp32") == ["fp32"]
    assert codes("cpu") == codes("cuda", mixed_precision="bf16") == []
    assert codes("cuda", backend="DDP", mixed_precision="fp16") == []
    (finding,) = make_plan(stack(), FSDPParams(), world_size=2, train=TrainParams(device="cuda")).lint
    assert "H100 67 of 989" in finding.message and finding.level == "warning"
    try:
        torch.set_float32_matmul_precision("high")
        assert codes("cuda") == []
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_card_that_emulates_bf16_is_told_where_the_plan_computes_in_it():
    def codes(card, **fields):
        return [finding.code for finding in emulated_bf16(plan(stack(), **fields), card)]

    assert codes("Tesla T4", mixed_precision="bf16") == ["emulated-bf16"]
    assert codes("Tesla T4", mixed_precision="fp16") == codes("Tesla T4") == codes("", mixed_precision="bf16") == []
    assert card_without_bf16() == "", "a process that has used no GPU asks none"


def test_logits_whose_rows_a_gpu_multiplies_slowly_are_told():
    class Head(nn.Module):
        def __init__(self, words: int):
            super().__init__()
            self.inner, self.lm_head = nn.Linear(8, 8), nn.Linear(8, words, bias=False)

    def told(words, device="cuda", head=nn.Linear, **fields):
        with torch.device("meta"):
            model = Head(words)
        model.lm_head.__class__ = head
        fsdp = FSDPParams(**{"mixed_precision": "bf16"} | fields)
        found = make_plan(model, fsdp, world_size=2, train=TrainParams(device=device)).lint
        return [finding.message for finding in found if finding.code == "odd-logits"]

    (message,) = told(50_257)
    assert message.startswith("lm_head: a position has 50,257 logits, no multiple of 8")
    assert not told(50_264) + told(50_257, head=LossLinear) + told(50_257, "cpu") + told(50_257, mixed_precision=None)
    assert not told(1_001), "a small head costs little"


def test_what_compiled_units_save_is_told_where_it_is_much_or_too_little():
    def told(steps, compiled, **fields):
        found = units_to_compile(
            plan(stack(), **fields), machine="h200-nvlink", seconds=1.0, compiled_seconds=compiled, steps=steps
        )
        return [(finding.level, finding.code) for finding in found]

    assert told(1000, 0.8) == [("note", "compile-off")]
    assert told(1000, 0.95) == [], "the prediction is not as exact as that"
    assert told(100, 0.8) == [], "a short run"
    assert told(100, 0.8, compile_units=True) == [("warning", "compile-short")]
    assert told(1000, 0.8, compile_units=True) == []


@pytest.mark.real
def test_the_variable_that_the_lint_names_switches_tf32_on():
    code = "import torch; print(torch.get_float32_matmul_precision())"
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "high\n", done.stderr


def test_many_names_that_differ_only_in_numbers_are_listed_as_one():
    few = ["layers.0.weight", "layers.1.weight", "head"]
    assert list_all(few) == "layers.0.weight, layers.1.weight, head"
    many = [f"layers.{i}.mlp.{j}.weight" for i in range(14) for j in range(2)]
    assert list_all(["scale", *many, "head"]) == "scale, 28 x layers.*.mlp.*.weight, head"


def test_of_more_than_two_names_two_are_said_and_the_others_counted():
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c", "d"]) == "a, b and 2 more"
