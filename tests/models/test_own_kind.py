"""A kind of model is one class: what plans, verifies, runs and exports a model asks it."""

from pathlib import Path

import pytest

from mmfsdp.kit.compat.layout import layout_of
from mmfsdp.kit.models.kinds import kind_of
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.kit.verify.from_params import verify_run
from mmfsdp.kit.verify.shallow import trial_params
from mmfsdp.params import ParamError
from tests.tiny_run import tiny_run

OWN = Path(__file__).parent.parent / "files/own"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Parameters of a run of the kind in tests/files/own/toy_kind.py."""
    monkeypatch.syspath_prepend(OWN)
    build = {"call": "toy_kind:ToyKind", "language": str(tmp_path / "language")}
    return tiny_run(tmp_path, **{"model.build": build, "data.augment": False, "launch.ranks": 2})


def test_a_kind_of_ones_own_is_planned_with_its_data_and_tried_with_few_layers(toy, tmp_path):
    prepared = prepare(toy, activations=True)
    assert [unit.name for unit in prepared.plan.units if "h.3" in unit.name], "all its layers"
    assert prepared.cost.batch.startswith("the largest batch of") and prepared.cost.batch_peak
    assert trial_params(toy, tmp_path).model.build["layers"] == 1
    assert type(kind_of(toy.model)).__name__ == "ToyKind"
    with pytest.raises(ParamError, match="adapter is for model.kind transformers, not own; use from_pretrained"):
        layout_of(toy.model, "adapter")


@pytest.mark.real
def test_a_kind_of_ones_own_is_verified_run_resumed_and_exported(toy):
    report = verify_run(toy)
    assert report.ok, str(report)
    lines = {line.code: line.message for line in report.lines}
    assert lines["resume"].startswith("killed after step") and lines["export"].startswith("it loads")
