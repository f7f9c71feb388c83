"""What a kind of model, a source or an optimizer decides is asked of its entry: no room compares them by name."""

import ast
import inspect
from pathlib import Path

import pytest

import mmfsdp
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.data.own_processor import OwnBatch
from mmfsdp.kit.data.processor import SampleProcessor
from mmfsdp.kit.models.kinds import Kind
from mmfsdp.kit.models.media_model import MediaModel
from mmfsdp.params import DataSource, ModelKind, OptimizerKind
from tests.processes import in_fresh_python

PACKAGE = Path(mmfsdp.__file__).parent
DEFAULT = "it has the default, and compares none"
NAMED = {
    ModelKind: {
        "params/model.py": DEFAULT,
        "kit/cli/new.py": "it chooses the kind of model for a person's words, and compares none",
    },
    DataSource: {
        "params/data.py": DEFAULT,
        "kit/data/sources/detect.py": "it finds the source that reads a path, by the names of its files",
        "kit/data/sources/find_files.py": "the home of files of rows, which three sources share",
        "kit/data/sources/records.py": "the home of the records in these files",
        "kit/widgets/data_look.py": "it chooses generated pictures where a person has emptied the path",
    },
    OptimizerKind: {"params/train.py": DEFAULT, "core/plan.py": DEFAULT},
}
"""Registry -> other files that name one of its entries, with the reason."""
HOMES = ("kit/data/own_processor.py", "kit/data/chat.py", *(f"kit/models/{kind}_kind.py" for kind in ModelKind))
"""Files of one kind of model only, which may say what they are given."""
COMPARED = {"kit/bench/bench_step.py": "it compares OpenFlamingo's way to train with ours, which needs a Flamingo"}
"""Other file -> the reason why it asks whether something is of one of our classes."""


def found_in_package(lines_of) -> dict[str, list[int]]:
    """Return the lines that a function finds in the syntax of each file of the package, if any."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if lines_of(node)]
        if lines:
            found[path.relative_to(PACKAGE).as_posix()] = lines
    return found


@pytest.mark.parametrize("registry", NAMED, ids=lambda registry: registry.__name__)
def test_no_room_names_an_entry_of_a_registry(registry):
    def names_entry(node: ast.AST) -> bool:
        is_of_registry = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == registry.__name__
        return is_of_registry and node.attr in registry.__members__

    found = found_in_package(names_entry)
    assert found.keys() == NAMED[registry].keys(), found


def concrete(base: type) -> set[str]:
    """Return the names of our classes below a base that something may be made of."""
    names = set()
    for each in base.__subclasses__():
        names |= concrete(each)
        if not inspect.isabstract(each) and each.__module__.startswith("mmfsdp."):
            names.add(each.__name__)
    return names


def test_no_room_asks_whether_a_model_or_a_processor_is_one_of_ours():
    for kind in ModelKind:
        kind.load()
    classes = {OwnBatch.__name__}
    for base in (Kind, MediaModel, SampleProcessor, Batch):
        classes |= concrete(base)
    assert {"FlamingoKind", "Flamingo", "MultimodalModel", "OwnProcessor", "ChatProcessor"} <= classes

    def asks(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("isinstance", "issubclass"):
            return False
        named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
        return bool(named & classes)

    found = {name: lines for name, lines in found_in_package(asks).items() if name not in HOMES}
    assert found.keys() == COMPARED.keys(), found


def test_no_kind_imports_open_clip_before_a_model_has_an_encoder_of_it():
    code = "import sys\nfrom mmfsdp.params import ModelKind\nfor kind in ModelKind:\n    kind.load()\n"
    assert in_fresh_python(f"{code}print('open_clip' in sys.modules)").strip() == "False"
