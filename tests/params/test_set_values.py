"""A value that somebody has set is told from one that nobody has set, whatever the value is."""

import json

import pytest
import torch
from torch import nn

from mmfsdp import freeze
from mmfsdp.kit.cli import build_parser
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.params import (
    RECIPES,
    BackboneParams,
    DataParams,
    LaunchParams,
    ModelParams,
    MoreParams,
    ParamError,
    RunParams,
    load,
)
from mmfsdp.params.run import with_cluster


def through_yaml(params: RunParams, tmp_path) -> RunParams:
    params.to_yaml(tmp_path / "params.yaml")  # of a run's folder: all ranks read it
    return RunParams.from_yaml(tmp_path / "params.yaml")


ROADS = {
    "as it is": lambda params, _: params,
    "change": lambda params, _: params.change(**{"train.lr": 1e-3}),
    "a section changed": lambda params, _: params.change(model=params.model),
    "YAML": through_yaml,
    "JSON": lambda params, _: RunParams.from_dict(json.loads(json.dumps(params.to_dict()))),
    "flags": lambda params, _: params_of(read_words(build_parser(), ["plan", "--train.lr", "1e-3"]), default=params),
}
OTHER_KINDS = {
    "flamingo": ({}, RECIPES["flamingo"]),
    "multimodal": ({"model.kind": "multimodal", "model.num_latents": 64}, RECIPES["llava_stage1"]),
    "lora": ({"model.kind": "multimodal", "model.lora_rank": 2}, RECIPES["llava_lora"]),
    "own": ({"model.build": "a:b"}, ()),
}


@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
def test_what_is_frozen_follows_the_kind_unless_somebody_has_set_it(road, tmp_path):
    unset = road(load("tiny"), tmp_path)
    set_to_the_default = road(load("tiny").change(**{"model.freeze": ["flamingo"]}), tmp_path)
    set_to_nothing = road(load("tiny").change(**{"model.freeze": []}), tmp_path)
    for changes, default in OTHER_KINDS.values():
        assert unset.change(**changes).model.frozen_patterns == default
        assert set_to_the_default.change(**changes).model.frozen_patterns == RECIPES["flamingo"]
        assert set_to_nothing.change(**changes).model.frozen_patterns == ()
        assert set_to_the_default.change(**changes, **{"model.freeze": None}).model.frozen_patterns == default
    lora = unset.change(**OTHER_KINDS["lora"][0])
    assert road(lora, tmp_path).change(**{"model.lora_rank": None}).model.frozen_patterns == RECIPES["llava_stage1"]


def test_the_recipe_of_a_flamingo_freezes_an_own_model():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision_encoder, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.language_model = nn.ModuleDict({"cross_attention": nn.Linear(2, 2), "new_tokens": nn.Linear(2, 2)})
            self.language_model["layers"] = nn.ModuleDict(
                {"cross_attention": nn.Linear(2, 2), "new_tokens": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)}
            )

    params = ModelParams.from_dict({"build": "a:b", "freeze": ["flamingo"]})
    report = freeze(Own(), params.frozen_patterns)
    assert set(report.frozen) >= {"vision_encoder.weight", "language_model.layers.mlp.weight"}
    assert "head.weight" in report.trainable and "language_model.layers.cross_attention.weight" in report.trainable
    with pytest.raises(ParamError, match="freeze: None is no list of patterns; .*frozen_patterns"):
        freeze(Own(), ModelParams().freeze)


def test_flags_and_files_can_unset_a_list_or_empty_it(tmp_path):
    def with_flags(*words: str) -> RunParams:
        return params_of(read_words(build_parser(), ["plan", *words]), default=load("llava_7b"))

    assert with_flags().model.freeze == RECIPES["llava_stage2"]
    assert with_flags("--model.freeze", "None").model.freeze is None
    assert with_flags("--model.freeze").model.freeze == ()
    assert with_flags("--model.freeze", "a.*", "b.*").model.freeze == ("a.*", "b.*")


REFUSED = [
    (ModelParams, {"build": "a:b", "num_latents": 8}, "num_latents: 8 has no effect unless kind is flamingo or multi"),
    (ModelParams, {"build": "a:b", "vision": {"name": "x"}}, "vision: .* has no effect unless kind is flamingo"),
    (
        ModelParams,
        {"build": "a:b", "kind": "flamingo"},
        "build: 'a:b' is the kind own, but kind is flamingo; unset one",
    ),
    (DataParams, {"reader": "a:b", "source": "shapes"}, "reader: 'a:b' is the source own, but source is shapes; unset"),
    (DataParams, {"reader": "a:b", "path": "x"}, "path: 'x' has no effect unless source is folder"),
    (
        MoreParams,
        {"reader": "a:b", "source": "json", "path": "x"},
        "reader: 'a:b' is the source own, but source is json",
    ),
]


@pytest.mark.parametrize("kind, values, message", REFUSED)
def test_nothing_that_is_set_beside_own_code_is_dropped(kind, values, message):
    with pytest.raises(ParamError, match=message):
        kind.from_dict(values)
    with pytest.raises(ParamError, match=message):
        kind.from_dict(json.loads(json.dumps(values)))
    section = "model" if kind is ModelParams else "data"
    if kind is not MoreParams:
        with pytest.raises(ParamError, match=f"{section}.{message}"):
            load("tiny").change(**{f"{section}.{name}": value for name, value in values.items()})
        with pytest.raises(ParamError, match=f"{section}.{message}"):
            load("tiny").change(**{section: values})


def test_own_code_takes_the_place_of_the_presets_model_and_data():
    tiny = load("tiny")
    assert tiny.model.num_latents == 8
    own = tiny.change(**{"model.build": "a:b", "data.reader": "c:d"})
    assert (own.model, own.data.source.value, own.train) == (ModelParams(build="a:b"), "own", tiny.train)
    assert own.change(**{"model.build": "e:f"}).model == ModelParams(build="e:f")
    assert own.change(**{"model.build": "a:b", "data.reader": "c:d"}) == own
    assert load("tiny_llava").change(**{"model.build": "a:b", "model.lora_rank": None}).model == ModelParams(
        build="a:b"
    )
    stored = tiny.change(**{"data.source": "json", "data.path": "rows.jsonl", "data.pictures": "p"})
    assert stored.change(**{"data.reader": "c:d"}).data.source.value == "own"
    more = stored.change(**{"data.more": [{"source": "json", "path": "x"}]})
    assert more.change(**{"data.more.0.reader": "c:d"}).data.sources()["data.more.0"].path is None


def test_an_empty_list_takes_the_place_of_the_profiles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/lab.yaml").write_text("interface: [ib0]\n")
    launch = LaunchParams(executor="slurm", cluster="lab", ranks=2)
    assert with_cluster(launch).interface == ("ib0",)
    assert with_cluster(launch.change(interface=())).interface == ()


SECTIONS = [
    {"model": {"kind": "multimodal"}, "model.lora_rank": 4},
    {"model.lora_rank": 4, "model": {"kind": "multimodal"}},
    {"model": ModelParams(kind="multimodal"), "model.lora_rank": 4},
    {"model.kind": "multimodal", "model": {"lora_rank": 4, "kind": "multimodal"}},
]


@pytest.mark.parametrize("changes", SECTIONS)
def test_a_section_and_a_field_in_it_are_changed_together_in_any_order(changes):
    assert load("tiny").change(**changes).model == ModelParams(kind="multimodal", lora_rank=4)


def test_a_part_of_a_section_keeps_the_defaults_of_its_other_fields():
    changed = RunParams().change(**{"model": {"num_latents": 8}, "model.vision.weights": "openai"}).model
    assert changed == ModelParams(
        num_latents=8, vision=BackboneParams(**ModelParams().vision.to_dict() | {"weights": "openai"})
    )
    nested = RunParams().change(**{"model": {"language": BackboneParams(name="x")}, "model.language.weights": "y"})
    assert nested.model.language == BackboneParams(name="x", weights="y")
    entries = {"data.more": (MoreParams(), {"weight": 0.5}), "data.more.1.max_length": 9}
    assert [more.max_length for more in RunParams().change(**entries).data.more] == [64, 9]
    for name in ("model.lora_rankk", "model.vision.nam", "data.more.2.weight", "data.more.0.weigth", "train.lr.x"):
        with pytest.raises(ParamError, match=f"{name}: no such field"):
            RunParams().change(**{"model": {"num_latents": 8}, "data.more": [{}], name: 1})


def test_a_model_that_was_frozen_otherwise_since_is_recorded_again():
    from mmfsdp import FSDPParams, make_plan
    from mmfsdp.predict.plan_cache import PlanCache

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
    options = {"world_size": 2, "example": {"input": torch.ones(2, 8)}}
    fsdp, kept = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=8), PlanCache()
    for frozen in ((0, 1), (1, 2), (), (0, 1)):
        for place, layer in enumerate(model):
            layer.requires_grad_(place not in frozen)
        assert make_plan(model, fsdp, **options, cache=kept) == make_plan(model, fsdp, **options)
