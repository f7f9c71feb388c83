"""Optimizers by name and by import path: their memory is predicted, they resume to the last bit, mistakes are named."""

import re

import pytest

from mmfsdp.checkpoint.steps import drop_after
from mmfsdp.core.optimizer_states import counted_states
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.run.files.folder import read_json
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.own.calls import OwnCodeError
from mmfsdp.params import OptimizerKind, ParamError, RunParams
from mmfsdp.predict.memory import memory_at_rest
from tests.tiny_run import tiny_run
from tests.train.test_resume import final
from tests.train.test_train import go  # noqa: F401  # a fixture

SGD = {"call": "torch.optim:SGD", "momentum": 0.9}


@pytest.mark.parametrize("kind", OptimizerKind)
def test_what_an_optimizer_keeps_is_what_its_entry_says(kind):
    matrix = {OptimizerKind.MUON: 1.0}.get(kind, kind.states)  # its states are those of AdamW, the most that it keeps
    assert counted_states(kind) == matrix <= kind.states


def test_an_optimizer_of_ones_own_resumes_to_the_last_bit_and_keeps_what_is_predicted(go):  # noqa: F811
    changes = {"train.optimizer": SGD, "train.steps": 4}
    run = go(**changes)
    whole = final(run)
    plan = WrapPlan.from_dict(read_json(run / "plan.json")["plan"])
    kept = 0
    for tensors in whole.values():
        kept += sum(len(content) for name, content in tensors.items() if "momentum_buffer" in name)
    assert memory_at_rest(plan).optimizer == kept > 0
    drop_after(run / "checkpoints", 2)
    go(**changes)
    assert final(run) == whole


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("missing:build", "'missing:build' cannot be imported: there is no module 'missing' in the current folder"),
        ("torch.optim:Sgd", "'torch.optim:Sgd': Sgd is not there in .*; did you mean SGD"),
        ("copy:copy", r"'copy:copy': copy\(x\) is called wrongly: got an unexpected keyword argument 'lr'"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_one_error_before_any_rank(tmp_path, optimizer, message):
    with pytest.raises(OwnCodeError) as error:
        prepare(tiny_run(tmp_path, **{"train.optimizer": optimizer, "launch.ranks": 2}))
    assert error.value.field == "train.optimizer" and re.search(message, error.value.message), error.value


def test_a_name_that_is_no_optimizer_is_refused_with_the_names():
    with pytest.raises(ParamError, match="train.optimizer: 'adam' is not allowed; did you mean adamw"):
        RunParams().change(**{"train.optimizer": "adam"})
