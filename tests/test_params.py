"""Parameters: enums map to torch's, YAML and JSON round-trip exactly, every mistake is one clear error."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

from mmfsdp.params import (
    AutoWrapPolicy,
    Backend,
    BackwardPrefetch,
    DataParams,
    FSDPParams,
    LaunchParams,
    ModelParams,
    ParamError,
    Precision,
    RunParams,
    ShardingStrategy,
    StateDictType,
    TrainParams,
    load,
    preset_names,
)


def test_enums_map_to_torch():
    for strategy in ShardingStrategy:
        name = "_HYBRID_SHARD_ZERO2" if strategy is ShardingStrategy.HYBRID_SHARD_ZERO2 else strategy.value
        assert strategy.to_torch() is torch_fsdp.ShardingStrategy[name]
    for kind in StateDictType:
        assert kind.to_torch() is torch_fsdp.StateDictType[kind.value]
    assert BackwardPrefetch.BACKWARD_PRE.to_torch() is torch_fsdp.BackwardPrefetch.BACKWARD_PRE
    assert BackwardPrefetch.BACKWARD_POST.to_torch() is torch_fsdp.BackwardPrefetch.BACKWARD_POST
    assert BackwardPrefetch.NO_PREFETCH.to_torch() is None
    assert AutoWrapPolicy.NO_WRAP.to_torch() is None
    assert AutoWrapPolicy.SIZE_BASED_WRAP.to_torch() is torch_wrap.size_based_auto_wrap_policy
    assert AutoWrapPolicy.TRANSFORMER_BASED_WRAP.to_torch() is torch_wrap.transformer_auto_wrap_policy
    with pytest.raises(ValueError, match="FROZEN_AWARE.*make_plan"):
        AutoWrapPolicy.FROZEN_AWARE.to_torch()
    assert [p.to_torch() for p in Precision] == [torch.float32, torch.bfloat16, torch.float16]


def test_fields_have_docstrings_and_units():
    from mmfsdp.params.docs import field_docs

    for cls in (RunParams, ModelParams, DataParams, TrainParams, FSDPParams, LaunchParams):
        docs = field_docs(cls)
        for field in dataclasses.fields(cls):
            assert len(docs[field.name]) > 10, f"{cls.__name__}.{field.name} has no docstring"
            if cls is FSDPParams and field.name != "backend":
                assert "Backends:" in docs[field.name] and "Default" in docs[field.name], field.name


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip_exactly(name, tmp_path):
    params = load(name)
    params.to_yaml(tmp_path / "run.yaml")
    assert RunParams.from_yaml(tmp_path / "run.yaml") == params
    assert RunParams.from_json(params.to_json()) == params
    assert RunParams.from_yaml(tmp_path / "run.yaml").to_yaml() == params.to_yaml()


def test_strings_become_enums_and_absent_fields_keep_their_defaults():
    params = RunParams.from_dict({"fsdp": {"backend": "FSDP1", "mixed_precision": "bf16"}})
    assert params.fsdp.backend is Backend.FSDP1 and params.fsdp.mixed_precision is Precision.BF16
    assert params.train == TrainParams()
    assert FSDPParams(sharding_strategy="NO_SHARD").effective_backend is Backend.DDP
    assert FSDPParams(enable_fsdp=False).effective_backend is Backend.DDP


# fmt: off
WRONG = [
    ({"fsdp": {"sharding_strategy": "FULL_SHRAD"}},
     "fsdp.sharding_strategy", ["FULL_SHRAD", "SHARD_GRAD_OP", "did you mean FULL_SHARD"]),
    ({"fsdp": {"sharding_strategy": "full-shard"}}, "fsdp.sharding_strategy", ["did you mean FULL_SHARD"]),
    ({"fsdp": {"mixed_precision": "int8"}}, "fsdp.mixed_precision", ["int8", "bf16"]),
    ({"fsdp": {"min_num_params": 1000}}, "fsdp.min_num_params", ["1000", "SIZE_BASED_WRAP"]),
    ({"fsdp": {"transformer_layer_cls": "A"}}, "fsdp.transformer_layer_cls", ["TRANSFORMER_BASED_WRAP"]),
    ({"fsdp": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}, "fsdp.transformer_layer_cls", ["LlamaDecoderLayer"]),
    ({"fsdp": {"state_dict_type": "LOCAL_STATE_DICT"}}, "fsdp.state_dict_type", ["FSDP2", "SHARDED_STATE_DICT"]),
    ({"fsdp": {"frozen_policy": "AUTO"}}, "fsdp.memory_budget_gib", ["AUTO"]),
    ({"fsdp": {"memory_budget_gib": 16}}, "fsdp.memory_budget_gib", ["16", "AUTO"]),
    ({"fsdp": {"use_orig_params": True}}, "fsdp.use_orig_params", ["FSDP1"]),
    ({"fsdp": {"backward_prefetch": "BACKWARD_POST"}}, "fsdp.backward_prefetch", ["FSDP2", "BACKWARD_PRE"]),
    ({"fsdp": {"enable_fsdp": False, "cpu_offload": True}}, "fsdp.cpu_offload", ["DDP"]),
    ({"fsdp": {"dp_replicate": 2}}, "fsdp.dp_replicate", ["HYBRID_SHARD"]),
    ({"fsdp": {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2, "dp_shard": 2}, "launch": {"ranks": 8}},
     "fsdp.dp_replicate", ["8", "4"]),
    ({"fsdp": {"activation_checkpointing": "every:0"}}, "fsdp.activation_checkpointing", ["every:0"]),
    ({"fsdp": {"enable_fsdp": "maybe"}}, "fsdp.enable_fsdp", ["maybe", "true or false"]),
    ({"train": {"steps": 0}}, "train.steps", ["0", "at least 1"]),
    ({"train": {"steps": True}}, "train.steps", ["True", "whole number"]),
    ({"train": {"steps": 1.5}}, "train.steps", ["1.5"]),
    ({"train": {"lr": "fast"}}, "train.lr", ["fast", "number"]),
    ({"train": {"lr": float("nan")}}, "train.lr", ["nan"]),
    ({"train": {"steps": 5, "warmup_steps": 10}}, "train.warmup_steps", ["10", "5"]),
    ({"train": {"stepz": 5}}, "train.stepz", ["did you mean steps"]),
    ({"trian": {}}, "trian", ["did you mean train"]),
    ({"train": 7}, "train", ["7"]),
    ({"data": {"source": "folder"}}, "data.path", ["folder", "data.path"]),
    ({"data": {"path": "x"}}, "data.path", ["shapes"]),
    ({"data": {"more": 3}}, "data.more", ["3", "list"]),
    ({"data": {"more": [3]}}, "data.more.0", ["3", "mapping"]),
    ({"data": {"more": [{}, {"source": "json"}]}}, "data.more.1.path", ["json"]),
    ({"data": {"more": [{"wieght": 1}]}}, "data.more.0.wieght", ["did you mean weight"]),
    ({"data": {"weight": 0}}, "data.weight", ["above 0"]),
    ({"launch": {"name": "../x"}}, "launch.name", ["../x"]),
    ({"model": {"vision": {"source": "timm"}}}, "model.vision.source", ["timm", "open_clip"]),
    ({"model": {"freeze": ["!"]}}, "model.freeze", ["empty pattern"]),
    ([1, 2], "RunParams", ["[1, 2]"]),
]
# fmt: on


@pytest.mark.parametrize("values, field, words", WRONG, ids=[w[1] for w in WRONG])
def test_a_mistake_is_one_error_with_field_value_and_fix(values, field, words):
    with pytest.raises(ParamError) as caught:
        RunParams.from_dict(values)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_yaml_and_unknown_presets(tmp_path):
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ParamError, match="is not YAML"):
        RunParams.from_yaml(tmp_path / "x.yaml")
    with pytest.raises(ParamError, match="the presets are .*tiny"):
        load("tinny")
    with pytest.raises(ParamError, match="is not JSON"):
        RunParams.from_json("{")


def test_change_by_dotted_name():
    params = RunParams().change(**{"train.lr": 3e-4, "fsdp.frozen_policy": "KEEP"})
    assert params.train.lr == 3e-4 and params.fsdp.frozen_policy.value == "KEEP"
    with pytest.raises(ParamError, match="train.lrr"):
        RunParams().change(**{"train.lrr": 1})


def test_several_sources_round_trip_and_are_changed_by_dotted_name_and_flag(tmp_path):
    from mmfsdp.cli.words import parse

    text = "[{source: json, path: docs.jsonl, weight: 0.2, batch_size: 3}, {task: question}]"
    params = parse("plan", ["--data.more", text, "--train.steps", "30"])
    params.to_yaml(tmp_path / "run.yaml")
    assert RunParams.from_yaml(tmp_path / "run.yaml") == RunParams.from_json(params.to_json()) == params
    changed = parse("plan", ["--config", str(tmp_path / "run.yaml"), "--data.more.0.weight", "0.5"])
    assert changed == params.change(**{"data.more.0.weight": 0.5}) != params
    alone = params.data.sources()
    assert list(alone) == ["data", "data.more.0", "data.more.1"]
    assert alone["data"] == DataParams() and alone["data.more.0"].path == "docs.jsonl"
    with pytest.raises(ParamError, match="data.more.*is not YAML"):
        parse("plan", ["--data.more", "[{"])


def test_public_names_are_functions_even_after_their_files_were_imported():
    code = (
        "import mmfsdp.freeze, mmfsdp.launch, mmfsdp.estimate\n"
        "from mmfsdp import freeze, launch, estimate\n"
        "assert all(callable(f) for f in (freeze, launch, estimate, mmfsdp.freeze))\n"
        "assert set(mmfsdp.__all__) <= set(dir(mmfsdp)) and all(hasattr(mmfsdp, n) for n in mmfsdp.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
