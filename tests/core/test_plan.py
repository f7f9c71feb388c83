"""Plans hold every parameter once, keep frozen and trainable apart, and know where backward goes."""

import json
import re
import threading

import pytest
import torch
from tiny import LANGUAGE, tiny_batch, tiny_flamingo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

from mmfsdp.core import model_record
from mmfsdp.core.freeze import freeze
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.models import build_language
from mmfsdp.kit.train.prepare import frozen_model, preview
from mmfsdp.params import BackboneParams, FSDPParams, ParamError, load, preset_names
from mmfsdp.params.in_words import count
from mmfsdp.planning import make_plan, wrap_fsdp
from tests.processes import in_fresh_python
from tests.ranks import fake_group


def plan_of(model: nn.Module, *, world_size: int = 2, example=None, **fields) -> WrapPlan:
    return make_plan(model, FSDPParams(**fields), world_size=world_size, example=example)


def units(plan: WrapPlan) -> dict[str, str]:
    return {u.name: u.kind for u in plan.units if u.params}


def flows(plan: WrapPlan) -> set[str]:
    return {u.name for u in plan.units if u.kind == "frozen" and u.grad_flow}


class Drawing(nn.Module):
    """Draws random numbers itself, and has another thread draw some in the middle of each forward."""

    drawn: list[float] = []

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)])
        for layer in self.layers:
            layer[0].register_forward_hook(self.hook)

    def hook(self, *_) -> None:
        thread = threading.Thread(target=lambda: Drawing.drawn.append(torch.rand(()).item()))
        thread.start()
        thread.join()

    def forward(self, x):
        return {"loss": self.layers(x[torch.randperm(len(x))]).sum()}


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_another_thread_draws_its_random_numbers_as_if_no_plan_were_made(checkpointing):
    """As the cell of a notebook does while a widget plans."""
    Drawing.drawn = []
    model, fsdp = Drawing(), FSDPParams(activation_checkpointing=checkpointing)
    torch.manual_seed(0)
    make_plan(model, fsdp, world_size=2, example={"x": torch.zeros(4, 8)})
    drawn, after = Drawing.drawn, torch.rand(()).item()
    torch.manual_seed(0)
    runs = 3 if checkpointing == "all" else 2  # one to trace, one to record, which runs a checkpointed layer again
    assert len(drawn) == 2 * runs and drawn + [after] == [torch.rand(()).item() for _ in range(len(drawn) + 1)]


POLICIES = [
    {},
    {"auto_wrap_policy": "NO_WRAP"},
    {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000},
    {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "FlamingoLayer,PerceiverResampler"},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["DDP", "FSDP1", "FSDP2"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.get("auto_wrap_policy", "FROZEN_AWARE"))
def test_every_parameter_is_in_one_unit_by_all_its_names(policy, backend, tied):
    model = tiny_flamingo(tied=tied)
    plan = plan_of(model, backend=backend, **policy)
    held = [p.name for p in plan.params]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    assert set(plan.by_name) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert WrapPlan.from_json(plan.to_json()) == plan
    assert max(map(len, str(plan).splitlines())) <= 80


def test_the_printed_plan_says_of_each_unit_what_the_model_holds():
    model = tiny_flamingo()
    low = {"mixed_precision": "bf16", "frozen_dtype": "bf16"}
    plan = plan_of(model, example=tiny_batch().inputs(), frozen_policy="KEEP", **low)
    head, table, _ = re.split(r"\n-+\n", str(plan))
    lines, rows = table.splitlines(), []
    for name, figures in zip(lines[::2], lines[1::2], strict=True):
        found = re.match(r"  (\w+) ?(\w*)(\*?) +([\d.]+K?) (\w+)>bf16 .* (\d)\+(\d)\^? ", figures)
        rows.append((name, *found.groups()))
    held = [unit for unit in plan.units if unit.params]
    assert [row[0] for row in rows] == [unit.name for unit in held] and f": {len(rows)} units" in head
    sizes = dict(model.named_parameters())
    for unit, (_, kind, policy, flow, numel, dtype, forward, backward) in zip(held, rows, strict=True):
        params = [sizes[p.name] for p in unit.params]
        trains = params[0].requires_grad
        assert (kind, policy) == (("trainable", "") if trains else ("frozen", "KEEP"))
        assert dtype == ("fp32" if trains else "bf16") and numel == count(sum(p.numel() for p in params))
        assert bool(flow) == (not trains and unit.name.startswith("language_model.") and "embed" not in unit.name)
        assert (int(forward), int(backward)) == (unit.gathers_forward, unit.gathers_backward) and forward == "1"
    total, trainable = (count(sum(p.numel() for p in sizes.values() if p.requires_grad >= t)) for t in (False, True))
    assert re.search(rf"^  total +{total} ", str(plan), re.M)
    assert f"{trainable} of {total} parameters train." in str(plan)


@pytest.mark.parametrize("example", [None, "a batch"])
def test_a_flamingo_is_split_where_frozen_meets_trainable(example):
    plan = plan_of(tiny_flamingo(), example=example and tiny_batch().inputs())
    kinds = units(plan)
    assert set(kinds.values()) == {"frozen", "trainable"}
    assert kinds["language_model.model.layers.1.cross_attention"] == "trainable"
    assert kinds["language_model.model.layers.1.decoder_layer"] == "frozen"
    assert kinds["language_model.lm_head.new_tokens"] == "trainable"
    assert not plan.units[0].params and plan.units[0].modules == ("",)
    assert flows(plan) == {
        "language_model.model.layers.0",
        "language_model.model.layers.1.decoder_layer",
        "language_model.model.layers.2",
        "language_model.{model.norm,lm_head.table}",
    }
    assert [u.gathers_backward for u in plan.units if u.name.startswith("vision")] == [0, 0, 0]


def test_tied_tables_share_a_unit():
    plan = plan_of(tiny_flamingo(tied=True))
    home = {p.name: u for u in plan.units for p in u.params}
    table = home["language_model.model.embed_tokens.table.weight"]
    new = home["language_model.model.embed_tokens.new_tokens.weight"]
    assert "language_model.lm_head.table" in table.modules and table.kind == "frozen" and table.grad_flow
    assert new.modules == ("language_model.model.embed_tokens.new_tokens", "language_model.lm_head.new_tokens")
    assert new.kind == "trainable"


class Branch(nn.Module):
    """A layer of its own and one in a module inside it."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(self.own(x))


def test_units_that_would_be_partly_inside_each_other_are_one():
    model = nn.Sequential(Branch(), Branch())
    # What two tied matrices join: each branch with the inner module of the other.
    model[0].own.weight = model[1].inner[0].weight
    model[1].own.weight = model[0].inner[0].weight
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "Branch,Sequential"}
    (unit,) = [unit for unit in plan_of(model, **layers).units if unit.params]
    assert unit.modules == ("0", "1") and len(unit.params) == 6


def test_fsdp1_holds_a_tied_frozen_table_whole_rather_than_mix():
    plan = plan_of(tiny_flamingo(tied=True), backend="FSDP1")
    assert all(len(u.modules) == 1 for u in plan.units if u.sharded)
    assert {u.kind for u in plan.units} == {"empty", "frozen", "trainable"}
    assert [p.name for u in plan.units if not u.sharded for p in u.params] == [
        "language_model.model.embed_tokens.table.weight"
    ]


def test_fsdp1_gathers_a_matrix_that_two_layers_share_in_a_module_that_runs():
    model = build_language(BackboneParams(config=LANGUAGE))
    layers = model.model.layers  # a list of layers has no forward
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    for example in (None, {"input_ids": torch.ones(1, 3, dtype=torch.int64)}):
        plan = plan_of(model, backend="FSDP1", example=example)
        plan.check()
        held = {p.name: u.name for u in plan.units for p in u.params}
        assert held["model.layers.0.mlp.up_proj.weight"] == "model"


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank trainable side path, as LoRA has it."""

    def __init__(self, dim: int):
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, 2, bias=False)
        self.up = nn.Linear(2, dim, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q = Adapted(dim)
        self.v = Adapted(dim)

    def forward(self, x):
        return x + self.q(self.norm(x)) * self.v(x)


class Stack(nn.Module):
    def __init__(self, dim: int = 8, layers: int = 3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.zeros(1))
        self.unused = nn.Linear(dim, dim)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x * self.scale), self.head.weight) * self.gate


def test_adapters_are_one_unit_inside_their_frozen_layer():
    model = Stack()
    freeze(model, ["*", "!*.down.*", "!*.up.*"])
    kinds = units(plan_of(model))
    assert kinds["layers.0"] == "frozen"
    assert kinds["layers.0.{q.down,q.up,v.down,v.up}"] == "trainable"


class AdaptedInPlace(nn.Module):
    """Adapters as parameters of the module that holds the frozen weights."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(8, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_what_adapters_hold_is_apart_from_the_frozen_weights_inside_them(backend):
    blocks = nn.Sequential(*(Block(8) for _ in range(3)))
    for block in blocks:
        block.norm, block.q, block.v = nn.Linear(8, 8), AdaptedInPlace(), AdaptedInPlace()
    model = nn.Sequential(blocks, nn.Linear(8, 8))
    freeze(model, ("*", "!*.down", "!*.up"))
    plan = make_plan(model, FSDPParams(backend=backend), world_size=2)
    assert {unit.kind for unit in plan.units if unit.params} == {"frozen", "trainable"}
    assert [unit.trainable_numel for unit in plan.units if unit.trainable_numel] == [64] * 3


class Texts(nn.Module):
    def forward(self, x):
        return self.text[0](x)


class Called(nn.Module):
    """An encoder that is called past its forward, and whose text side never is; then a layer twice, beside another."""

    def __init__(self, uses: bool):
        super().__init__()
        self.uses, self.encoder = uses, Texts()
        self.encoder.text, self.encoder.pictures = (nn.ModuleList([nn.Sequential(nn.Linear(8, 8))]) for _ in range(2))
        self.encoder.shift, self.encoder.patch = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)
        self.first, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.encoder.pictures[0](self.encoder.patch(x)) + (self.encoder.shift if self.uses else 0)
        return self.layer(self.layer(self.first(x)))


@pytest.mark.parametrize("uses", [True, False])
def test_a_module_that_never_runs_is_not_gathered_and_what_is_used_of_it_is_held_above(uses):
    model = Called(uses)
    freeze(model, ["encoder.*"])
    plan = plan_of(model, example={"x": torch.zeros(2, 8)})
    assert [f.code for f in plan.lint if f.code != "left-in-root"] == []
    owner = next(u for u in plan.units if "encoder.shift" in [p.name for p in u.params])
    gathers = {u.name: u.gathers_forward for u in plan.units if u.params}
    assert (owner.modules, gathers[owner.name]) == ((("",), 1) if uses else (("encoder",), 0))
    assert [u.gathers_backward for u in plan.units if u.name in ("first", "layer")] == [0, 1]


class Cached(nn.Module):
    """A layer that is given its cache by place, as GPT-2's are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.forward = self.attend

    def attend(self, x, cache):
        keys = nn.functional.linear(x, self.layer.weight)[:, None]
        return (keys if cache is None else cache.update(keys, keys, 0)[0]).sin().mean(1)

    def forward(self, x):
        return self.layer(x, DynamicCache())


def test_recomputed_layers_keep_no_cache():
    assert plan_of(Cached(), example={"x": torch.zeros(2, 3, 8)}, activation_checkpointing="layer").memory_events
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model, ids = T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes)), torch.zeros(2, 3, dtype=torch.int64)
    freeze(model, ["encoder.*", "shared.*"])
    made = plan_of(model, example={"input_ids": ids, "labels": ids}, activation_checkpointing="*.block.*")
    assert made.memory_events  # the second forward kept as many tensors as the first


def test_an_example_shows_what_really_runs():
    model = Stack()
    freeze(model, ["*", "!layers.1.*"])
    plan = plan_of(model, example={"x": torch.zeros(2, 8)})
    assert "head" not in units(plan)  # its forward never runs, so only the root can fetch its weight
    assert {p.name for p in plan.units[0].params} >= {"scale", "gate", "head.weight"}
    assert flows(plan) == {"(root)", "layers.2", "norm"}
    assert plan.units[[u.name for u in plan.units].index("layers.0")].gathers_backward == 0


class Selecting(nn.Module):
    """Selects rows of an activation by a mask and by places, and needs to know how many there are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask, places):
        y = self.linear(x)
        assert y[mask].shape == (2, 4) and y[places].shape == (3, 4)
        return y[mask].sum() + y[places].sum()


def test_an_example_shows_how_many_rows_a_mask_selects():
    example = {"x": torch.ones(5, 4), "mask": torch.tensor([0, 1, 0, 0, 1]).bool(), "places": torch.tensor([0, 4, 0])}
    plan = make_plan(Selecting(), world_size=2, example=example)
    assert not plan.lint and plan.flops > 0


def test_an_example_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="example: .*forward failed"):
        plan_of(Stack(), example={"x": torch.zeros(2, 7)})
    asking = nn.Linear(8, 8)
    asking.register_forward_hook(lambda *given: given[-1] if given[-1].sum() > 0 else None)
    with pytest.raises(ValueError, match="example: .*DataDependent.*leave the example out"):
        plan_of(asking, example={"input": torch.zeros(2, 8)})


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "LamaDecoderLayer"},
            "LlamaDecoderLayer",
        ),
        ({"frozen_dtype": "bf16", "frozen_policy": "REPLICATE"}, "mixed_precision"),
        ({"backend": "DDP", "frozen_dtype": "bf16"}, "mixed_precision"),
        ({"backend": "FSDP1", "use_orig_params": False, "auto_wrap_policy": "NO_WRAP"}, "is mixed.*FROZEN_AWARE"),
        ({"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 3, "dp_shard": 2}, "makes 6 ranks, not 8"),
        ({"backend": "FSDP1", "sharding_strategy": "HYBRID_SHARD", "dp_shard": 1}, "nothing to shard; .*NO_SHARD"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, words):
    with pytest.raises(ParamError, match=words) as error:
        plan_of(tiny_flamingo(), world_size=8, **fields)
    assert error.value.field in fields


@pytest.mark.parametrize("fields, shape", [
    ({}, (1, 8)),
    ({"backend": "DDP"}, (8, 1)),
    ({"sharding_strategy": "NO_SHARD"}, (8, 1)),
    ({"sharding_strategy": "HYBRID_SHARD", "dp_shard": 2}, (4, 2)),
    ({"sharding_strategy": "HYBRID_SHARD_ZERO2", "dp_replicate": 2}, (2, 4)),
])  # fmt: skip
def test_mesh(fields, shape):
    plan = plan_of(tiny_flamingo(), world_size=8, **fields)
    assert (plan.replicate, plan.shard) == shape


def test_a_hybrid_strategy_without_sizes_has_one_replica_per_node(monkeypatch):
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    with pytest.raises(ParamError, match="16 ranks cannot know how many of them a node has; set dp_shard") as error:
        plan_of(tiny_flamingo(), world_size=16, **hybrid)
    assert error.value.field == "dp_shard"
    shapes = {}
    with fake_group(16):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        for way, fields in {"node": hybrid, "half a node": {**hybrid, "dp_shard": 4}, "no axes": {}}.items():
            plan = model_record.plan_of(wrap_fsdp(tiny_flamingo(), FSDPParams(**fields)))
            shapes[way] = (plan.replicate, plan.shard)
        plan = model_record.plan_of(wrap_fsdp(tiny_flamingo(), FSDPParams(**hybrid), mesh=mesh))
        shapes["mesh"] = (plan.replicate, plan.shard)
    assert shapes == {"node": (2, 8), "half a node": (4, 4), "no axes": (1, 16), "mesh": (4, 4)}
    launched = {"launch.executor": "slurm", "launch.ranks": 16, "launch.nodes": 4}
    params = load("tiny").change(**launched, **{"fsdp.sharding_strategy": "HYBRID_SHARD"})
    plan, _ = preview(params)
    assert (plan.replicate, plan.shard) == (4, 4)


def test_reading_a_plan_needs_no_torch(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan_of(tiny_flamingo()).to_dict()))
    code = (
        "import sys; from mmfsdp.core.plan import WrapPlan; import mmfsdp.predict;"
        f"plan = WrapPlan.from_json(open({str(tmp_path / 'plan.json')!r}).read());"
        "print(plan); assert 'torch' not in sys.modules"
    )
    in_fresh_python(code)


def test_a_table_that_others_call_by_other_names_is_the_roots():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model, ids = T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes)), torch.zeros(2, 3, dtype=torch.int64)
    plan = plan_of(model, example={"input_ids": ids, "labels": ids})
    assert not plan.refused and [p.name for p in plan.units[0].params] == ["shared.weight"]
    assert {"encoder.block.0", "decoder.block.0"} < units(plan).keys()


@pytest.mark.parametrize("preset", preset_names())
def test_every_presets_plan_fits_the_page_and_tells_what_is_gathered_ahead(preset):
    params = load(preset).change(**{"launch.ranks": 8})
    model, _ = frozen_model(params.model)
    for fields in ({}, {"mixed_precision": "bf16", "frozen_dtype": "bf16", "auto_wrap_policy": "NO_WRAP"}):
        plan = make_plan(model, FSDPParams(**fields, forward_prefetch=True), world_size=8)
        assert max(map(len, str(plan).splitlines())) <= 80
    plan = make_plan(model, params.fsdp, world_size=8)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 60, "layers that are alike share a line"
    ahead = plan.prefetched_in_backward
    assert bool(ahead) == any(u.gathers_backward for u in plan.units[:-1]) and not plan.prefetched_in_forward
    for order, earlier in ahead.items():
        assert earlier.forward_end < plan.units[order].forward_end and earlier.gathers_backward


def test_whole_numbers_beside_what_trains_are_planned_for_fsdp1():
    model = nn.Module()
    model.frozen, model.head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 8)
    model.scale = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    model.forward = lambda x: model.head(model.frozen(x) * model.scale)
    fsdp = FSDPParams(backend="FSDP1", auto_wrap_policy="NO_WRAP")
    plan = make_plan(model, fsdp, world_size=2, example={"x": torch.ones(2, 64)})
    assert plan.lint and any("scale" in p.name for p in plan.params)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_parameter_of_another_dtype_is_named(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].mask = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    with pytest.raises(ParamError, match=f"0.mask is {str(dtype)[6:]}; make it a buffer, or cast it to float32 or "):
        make_plan(model, FSDPParams(), world_size=2)


class Scaled(nn.Module):
    """Layers, two of them frozen, and a frozen parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])
        freeze(self, ["layers.0.*", "layers.2.*"])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (self.scale * x).sum()


def test_a_frozen_root_is_sharded_under_replicate_since_it_starts_all_other_units():
    plan = plan_of(Scaled(), frozen_policy="REPLICATE")
    sharded = {unit.name: unit.sharded for unit in plan.units if unit.kind == "frozen"}
    assert sharded == {"(root)": True, "layers.0": False, "layers.2": False}
    assert [unit.frozen_policy for unit in plan.units if unit.is_root] == ["SHARD"]
