"""Oumi's FSDP parameters: each enum and field means what its documentation says, in torch's enums and in the state of
a model that was wrapped by it on four real ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from mmfsdp import (
    AutoWrapPolicy,
    BackwardPrefetch,
    FSDPParams,
    ParamError,
    ShardingStrategy,
    StateDictType,
    make_plan,
    wrap_fsdp,
)
from tests.ranks import WAYS, on_ranks


def test_every_enum_has_oumis_members_and_torchs_counterparts():
    for kind in (ShardingStrategy, StateDictType, BackwardPrefetch):
        theirs = getattr(torch_fsdp, kind.__name__)
        counterparts = {choice.value: choice.to_torch() for choice in kind}
        assert counterparts.pop("NO_PREFETCH", None) is None
        assert {each.name.removeprefix("_"): each for each in theirs} == counterparts
    assert {p.value for p in AutoWrapPolicy} == {"SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP", "FROZEN_AWARE"}
    for choice in (*ShardingStrategy, *StateDictType, *BackwardPrefetch, *AutoWrapPolicy):
        assert isinstance(choice, str) and str(choice) == choice.value and type(choice)(choice.value) is choice


def test_the_fields_are_oumis():
    ours = set(FSDPParams.model_fields)
    assert ours >= {
        "enable_fsdp", "sharding_strategy", "cpu_offload", "mixed_precision", "backward_prefetch", "forward_prefetch",
        "use_orig_params", "state_dict_type", "auto_wrap_policy", "min_num_params", "transformer_layer_cls",
        "sync_module_states",
    }  # fmt: skip


def test_its_yaml_moves_as_it_is():
    written_out = FSDPParams(use_orig_params=True, min_num_params=100_000, auto_wrap_policy="NO_WRAP")
    assert written_out.min_num_params == 100_000
    named = FSDPParams(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="a.b.Layer, tests.Block")
    assert named.layer_classes == ("Layer", "Block")
    guessed = FSDPParams(auto_wrap_policy="TRANSFORMER_BASED_WRAP", use_orig_params=True)
    two = nn.ModuleDict({"layers": nn.Sequential(Layer(), Layer()), "head": nn.Linear(8, 2)})
    plan = make_plan(two, guessed, world_size=2)
    assert [unit.modules for unit in plan.units[1:]] == [("layers.0",), ("layers.1",)]
    assert [f.message for f in plan.lint if f.code == "guessed-layers"] == [
        "transformer_layer_cls is not set; the model's lists of layers hold Layer"
    ]
    with pytest.raises(ParamError, match="transformer_layer_cls: is not set, and the model has no list of layers"):
        make_plan(nn.Linear(8, 2), guessed, world_size=2)


def test_its_fields_are_taken_together_and_the_plan_names_those_without_effect():
    # As in Oumi's own tests, which set every field; there is no GPU to offload to here.
    every_field = {
        "enable_fsdp": True, "sharding_strategy": "FULL_SHARD", "cpu_offload": False, "mixed_precision": "bf16",
        "backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "use_orig_params": None,
        "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls": "Layer", "min_num_params": 100_000_000, "sync_module_states": False,
    }  # fmt: skip
    params = FSDPParams(backend="FSDP1", **every_field)
    assert params.min_num_params == 100_000_000
    assert FSDPParams.from_dict(params.to_dict()) == params
    two = nn.Sequential(Layer(), Layer())
    assert notes_without_effect(two, params) == [
        "min_num_params: 100000000 has no effect unless auto_wrap_policy is SIZE_BASED_WRAP; remove it, or change "
        "auto_wrap_policy from TRANSFORMER_BASED_WRAP"
    ]
    by_layer = params.change(min_num_params=100_000)
    assert notes_without_effect(two, by_layer) == []
    assert make_plan(two, params, world_size=2).units == make_plan(two, by_layer, world_size=2).units

    by_size = params.change(auto_wrap_policy="SIZE_BASED_WRAP")
    assert [note.partition(":")[0] for note in notes_without_effect(two, by_size)] == ["transformer_layer_cls"]
    whole = params.change(auto_wrap_policy="NO_WRAP")
    assert len(notes_without_effect(two, whole)) == 2
    # FROZEN_AWARE is ours: files of Oumi have none, so who sets one of these beside it means something else.
    for name in ("min_num_params", "transformer_layer_cls"):
        with pytest.raises(ParamError, match=f"{name}: .* has no effect unless auto_wrap_policy is"):
            FSDPParams(**{name: every_field[name]})


def notes_without_effect(model: nn.Module, params: FSDPParams) -> list[str]:
    plan = make_plan(model, params, world_size=2)
    return [finding.message for finding in plan.lint if finding.code == "without-effect"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), Layer(), Layer(), nn.Linear(8, 2))


CASES = WAYS["oumi"]


def wrap_every_case() -> dict:
    found = {}
    for name, fields in CASES.items():
        # Each rank with weights of its own: only sync_module_states can make them equal.
        wrapped = wrap_fsdp(
            model(dist.get_rank()), FSDPParams(**{"backend": "FSDP1", "auto_wrap_policy": "NO_WRAP", **fields})
        )
        seen: dict = {"wrapper": type(wrapped).__name__}
        if isinstance(wrapped, FSDP):
            units = FSDP.fsdp_modules(wrapped)
            seen["units"] = [type(unit.module).__name__ for unit in units]
            seen["strategy"] = units[min(1, len(units) - 1)].sharding_strategy.name
            seen["prefetch"] = [str(wrapped.backward_prefetch), wrapped.forward_prefetch]
            seen["orig"] = wrapped._use_orig_params
            seen["compute"] = str(wrapped.mixed_precision.param_dtype)
            seen["offload"] = wrapped.cpu_offload.offload_params
        with FSDP.summon_full_params(wrapped) if isinstance(wrapped, FSDP) else torch.no_grad():
            whole = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
        seen["as rank 0"] = torch.equal(whole, torch.cat([p.detach().flatten() for p in model(0).parameters()]))
        found[name] = seen
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(wrap_every_case, 4)


@pytest.mark.real
def test_the_wrapped_models_are_what_the_fields_say(found):
    seen = found[0]
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        assert seen[strategy]["strategy"] == strategy
    assert seen["HYBRID_SHARD_ZERO2"]["strategy"] == "_HYBRID_SHARD_ZERO2"
    for ddp in ("NO_SHARD", "disabled"):
        assert seen[ddp]["wrapper"] == "DistributedDataParallel"
    plain = seen["default"]
    assert plain["prefetch"] == ["BackwardPrefetch.BACKWARD_PRE", False] and not plain["offload"] and plain["orig"]
    assert seen["BACKWARD_POST"]["prefetch"][0] == "BackwardPrefetch.BACKWARD_POST"
    assert seen["NO_PREFETCH"]["prefetch"][0] == "None" and seen["forward_prefetch"]["prefetch"][1] is True
    assert seen["bf16"]["compute"] == "torch.bfloat16" and seen["fp16"]["compute"] == "torch.float16"
    assert seen["flat"]["orig"] is False
    assert plain["units"] == ["Sequential"] and plain["compute"] == "None"
    assert seen["by size"]["units"] == seen["FULL_SHARD"]["units"] == ["Sequential", "Layer", "Layer"]


@pytest.mark.real
def test_rank_0s_weights_are_everybodys_only_with_sync_module_states(found):
    # Unsynced and sharded, each rank holds a part of its own: the whole is a mixture.
    for rank in found:
        assert [name for name, seen in rank.items() if not seen["as rank 0"]] == ["unsynced"]
