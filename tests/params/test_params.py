"""Parameters: enums map to torch's, YAML round-trips exactly, every mistake is one clear error."""

from pathlib import Path

import pytest
import torch
import yaml

from mmfsdp.params import (
    Backend,
    DataParams,
    FSDPParams,
    LaunchParams,
    ModelParams,
    ParamError,
    Precision,
    RunParams,
    TrainParams,
    load,
    preset_names,
)
from mmfsdp.params.base import read_yaml
from mmfsdp.params.profiles import profile_names
from mmfsdp.params.run import PRESETS, read_cluster, with_cluster
from tests.processes import in_fresh_python


def test_precisions_map_to_torch():
    assert [p.to_torch() for p in Precision] == [torch.float32, torch.bfloat16, torch.float16]


def test_fields_have_docstrings_and_units():
    for cls in (RunParams, ModelParams, DataParams, TrainParams, FSDPParams, LaunchParams):
        for name, field in cls.model_fields.items():
            assert len(field.description) > 10, f"{cls.__name__}.{name} has no docstring"
            if cls is FSDPParams and name != "backend":
                assert "Backends:" in field.description and "Default" in field.description, name
    assert Backend.DDP.description.startswith("DistributedDataParallel:")


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip_exactly(name, tmp_path):
    params = load(name)
    params.to_yaml(tmp_path / "run.yaml")
    assert RunParams.from_yaml(tmp_path / "run.yaml") == params
    assert RunParams.from_yaml(tmp_path / "run.yaml").to_yaml() == params.to_yaml()


def test_strings_become_enums_and_absent_fields_keep_their_defaults():
    params = RunParams.from_dict({"fsdp": {"backend": "FSDP1", "mixed_precision": "bf16"}})
    assert params.fsdp.backend is Backend.FSDP1 and params.fsdp.mixed_precision is Precision.BF16
    assert params.train == TrainParams()


WRONG = yaml.safe_load((Path(__file__).parent.parent / "files/wrong_params.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake["field"])
def test_a_mistake_is_one_error_with_field_value_and_fix(mistake):
    with pytest.raises(ParamError) as caught:
        RunParams.from_dict(mistake["values"])
    assert caught.value.field == mistake["field"]
    for word in mistake["words"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_yaml_and_unknown_presets(tmp_path):
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ParamError, match="is not YAML"):
        RunParams.from_yaml(tmp_path / "x.yaml")
    with pytest.raises(ParamError, match="x.yaml: is not YAML.*the key 'steps' is there twice.*line 2, column 8"):
        (tmp_path / "x.yaml").write_text("fsdp: {}\ntrain: {steps: 1, steps: 2}\n")
        RunParams.from_yaml(tmp_path / "x.yaml")
    for tagged in "!!python/object:os.system {}|!!timestamp never|!!timestamp 2020-01-01|!!binary é|!own 1".split("|"):
        with pytest.raises(ParamError, match=f"is not YAML.*the tag {tagged.split()[0]} .*line 1, column 8"):
            read_yaml(f"train: {tagged}", name="YAML")
    with pytest.raises(ParamError, match="is not YAML"):
        read_yaml("train: !!bool maybe", name="YAML")
    with pytest.raises(ParamError, match="train.1: no such field"):
        RunParams.from_dict(read_yaml("train: {1: 2}", name="YAML"))
    with pytest.raises(ParamError, match="did you mean tiny"):
        load("tinny")


def test_every_model_is_changed_by_name_and_checked():
    params = RunParams().change(**{"train.lr": 3e-4, "fsdp.frozen_policy": "KEEP"})
    assert params.train.lr == 3e-4 and params.fsdp.frozen_policy.value == "KEEP"
    assert params.train.change(steps=7, warmup_steps=1) == TrainParams(lr=3e-4, steps=7, warmup_steps=1)
    assert params.change(train=TrainParams()).train == TrainParams()
    with pytest.raises(ParamError, match="train.lrr: no such field; did you mean train.lr?"):
        RunParams().change(**{"train.lrr": 1})
    with pytest.raises(ParamError, match="^steps: 0 should be greater than or equal to 1"):
        params.train.change(steps=0)


def test_the_reason_beside_a_choice_is_the_error_that_it_would_be():
    params = RunParams()
    for name, value in [
        ("fsdp.state_dict_type", "LOCAL_STATE_DICT"), ("fsdp.backward_prefetch", "BACKWARD_POST"),
        ("fsdp.use_orig_params", False), ("fsdp.min_num_params", 5), ("launch.partition", "gpu"),
        ("data.pictures", "x"), ("model.lora_rank", 8),
    ]:  # fmt: skip
        with pytest.raises(ParamError) as caught:
            params.change(**{name: value})
        reason = params.unavailable(name, value)
        assert reason and caught.value.field == name and caught.value.message.endswith(reason)
    assert not params.unavailable("fsdp.use_orig_params") and params.unavailable("launch.partition")
    flat = params.change(**{"fsdp.backend": "FSDP1"})
    for name, value in [("fsdp.state_dict_type", "LOCAL_STATE_DICT"), ("fsdp.use_orig_params", False)]:
        assert flat.unavailable(name, value) == "" and flat.change(**{name: value})
    assert flat.unavailable("fsdp.frozen_policy", "AUTO") and not flat.unavailable("fsdp.frozen_policy")
    ddp = params.change(**{"fsdp.sharding_strategy": "NO_SHARD"})
    assert not ddp.unavailable("fsdp.sharding_strategy", "FULL_SHARD")
    assert "set sharding_strategy to FULL_SHARD" in ddp.unavailable("fsdp.cpu_offload")
    off = params.change(**{"fsdp.enable_fsdp": False})
    assert "set enable_fsdp to true" in off.unavailable("fsdp.cpu_offload")


def test_shipped_profiles_of_clusters_are_sound_and_come_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slurm = LaunchParams(executor="slurm", cluster="single_node_8gpu", partition="mine", ranks=8)
    launch = with_cluster(slurm)
    assert launch.gpus_per_node == 8 and launch.partition == "mine" and launch.cluster is None
    for path in (PRESETS / "clusters").glob("*.yaml"):
        assert read_cluster(path.stem).launch.executor.value == "slurm"
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/single_node_8gpu.yaml").write_text("gpus_per_node: 4\nmodules: [cuda]\n")
    launch = with_cluster(slurm.change(modules=["gcc"]))
    assert launch.gpus_per_node == 4 and launch.modules == ("cuda", "gcc")


def test_the_profiles_of_a_class_come_first_and_what_they_hide_is_told(tmp_path, monkeypatch):
    from mmfsdp.kit.run.slurm.site import notes

    monkeypatch.chdir(tmp_path)
    slurm = RunParams().change(**{"launch.executor": "slurm", "launch.cluster": "lab", "launch.ranks": 2})
    for folder, account in (("clusters", "own"), ("class", "course")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lab.yaml").write_text(f"account: {account}\npartition: gpu\n")
    assert with_cluster(slurm.launch).account == "own" and not notes(slurm)
    monkeypatch.setenv("MMFSDP_CLUSTERS", str(tmp_path / "class"))
    assert with_cluster(slurm.launch).account == "course"
    assert notes(slurm) == [f"launch.cluster lab: {tmp_path}/class/lab.yaml is read, and not clusters/lab.yaml"]
    assert profile_names()[0] == "lab" and "single_node_8gpu" in profile_names()
    (tmp_path / "class/today.yaml").write_text("account: course\npartition: gpu\nreservation: monday\nmem: lots\n")
    today = slurm.launch.change(cluster="today")
    with pytest.raises(ParamError, match=f"launch.cluster: {tmp_path}/class/today.yaml: mem: 'lots' is not allowed"):
        with_cluster(today)
    (tmp_path / "class/today.yaml").write_text("account: course\npartition: gpu\nreservation: monday\n")
    launch = with_cluster(today)
    assert (launch.account, launch.partition, launch.reservation) == ("course", "gpu", "monday")
    with pytest.raises(ParamError, match=f"'tody' in {tmp_path}/class and clusters and .*; did you mean today"):
        with_cluster(slurm.launch.change(cluster="tody"))
    monkeypatch.setenv("MMFSDP_CLUSTERS", "~/none")
    with pytest.raises(ParamError, match="MMFSDP_CLUSTERS names '~/none', which is no folder on this machine"):
        with_cluster(today)


def test_several_sources_are_changed_by_dotted_flag(tmp_path):
    from mmfsdp.kit.cli import build_parser
    from mmfsdp.kit.cli.flags import params_of, read_words

    (tmp_path / "run.yaml").write_text("data: {more: [{source: json, path: docs.jsonl}, {}]}")
    words = ["plan", "--config", str(tmp_path / "run.yaml"), "--data.more.0.weight", "0.5"]
    params = params_of(read_words(build_parser(), words))
    assert [source.weight for source in params.data.sources().values()] == [1.0, 0.5, 1.0]


def test_public_names_are_functions_even_after_their_files_were_imported():
    code = (
        "import mmfsdp.core.freeze, mmfsdp.kit.run.launch, mmfsdp.predict\n"
        "from mmfsdp import freeze, launch, estimate\n"
        "assert all(callable(f) for f in (freeze, launch, estimate, mmfsdp.freeze))\n"
        "assert set(mmfsdp.__all__) <= set(dir(mmfsdp))"
    )
    in_fresh_python(code)
