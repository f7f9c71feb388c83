"""A kind of model is one class: all rooms ask it, and none compares a kind, a model or a processor with one of ours."""

import ast
import inspect
from pathlib import Path

import pytest

import mmfsdp
from mmfsdp.checks.from_params import verify_run
from mmfsdp.checks.shallow import trial_params
from mmfsdp.compat.layout import layout_of
from mmfsdp.data import own_processor
from mmfsdp.data.batch import Batch
from mmfsdp.data.chat import ChatProcessor
from mmfsdp.data.processor import SampleProcessor
from mmfsdp.models.kinds import Kind, kind_of
from mmfsdp.models.media_model import MediaModel
from mmfsdp.params import ModelKind, ParamError
from mmfsdp.train.prepare import prepare
from tests.tiny_run import tiny_run

PACKAGE = Path(mmfsdp.__file__).parent
OWN = PACKAGE.parent / "tests/files/own"
HOMES = ("data/own_processor.py", "data/chat.py")
HOMES += tuple(f"models/{kind}_kind.py" for kind in ModelKind)
"""Files of one kind only, which may say what they are given."""
ALLOWED = {
    "bench/bench_step.py": "it compares OpenFlamingo's way to train with ours, which needs a Flamingo",
    "cli/new.py": "it chooses the kind of model for a person's words, and compares none",
    "params/model.py": "it has the default kind, and compares none",
}
"""Other file -> the reason why it names a kind, a model or a processor."""


def concrete(base: type) -> set[str]:
    """Return the names of our classes below a base, without those that others extend."""
    names = set()
    for each in base.__subclasses__():
        names |= concrete(each)
        if not inspect.isabstract(each) and each.__module__.startswith("mmfsdp."):
            names.add(each.__name__)
    return names


def branches(tree: ast.AST, classes: set[str]) -> list[int]:
    """Return the lines that name a member of ModelKind, or ask whether something is of one of these classes."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ModelKind":
            lines.append(node.lineno)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            named |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
            if named & classes:
                lines.append(node.lineno)
    return lines


def test_no_room_compares_kinds_models_or_processors():
    for kind in ModelKind:
        kind.load()
    classes = {own_processor.OwnBatch.__name__}
    for base in (Kind, MediaModel, SampleProcessor, Batch):
        classes |= concrete(base)
    assert {"FlamingoKind", "Flamingo", "MultimodalModel", "OwnProcessor", ChatProcessor.__name__} <= classes
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        lines = branches(ast.parse(path.read_text()), classes)
        if lines and name not in HOMES:
            found[name] = lines
    assert found.keys() == ALLOWED.keys(), found


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Parameters of a run of the kind in tests/files/own/toy_kind.py."""
    monkeypatch.syspath_prepend(OWN)
    build = {"call": "toy_kind:ToyKind", "language": str(tmp_path / "language")}
    return tiny_run(tmp_path, **{"model.build": build, "data.augment": False, "launch.ranks": 2})


def test_a_kind_of_ones_own_is_planned_with_its_data_and_tried_with_few_layers(toy, tmp_path):
    prepared = prepare(toy, activations=True)
    assert [unit.name for unit in prepared.plan.units if "h.3" in unit.name], "all its layers"
    assert prepared.cost.batch.startswith("the largest of the data's first") and prepared.cost.batch_peak
    assert trial_params(toy, tmp_path).model.build["layers"] == 1
    assert type(kind_of(toy.model)).__name__ == "ToyKind"
    with pytest.raises(ParamError, match="adapter is for model.kind transformers, not own; use from_pretrained"):
        layout_of(toy.model, "adapter")


@pytest.mark.real
def test_a_kind_of_ones_own_is_verified_run_resumed_and_exported(toy):
    report = verify_run(toy)
    assert report.ok, str(report)
    lines = {line.check: line.text for line in report.lines}
    assert lines["resume"].startswith("killed after step") and lines["export"].startswith("it loads")
