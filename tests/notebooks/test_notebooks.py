"""Every notebook is clean as it lies here. `test_lessons.py` and `tests/browser/test_start_here.py` run them."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import mmfsdp

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

WITH_TORCH = {"torch.nn", "torch.optim"}
"""Modules that lessons name, and that torch imports with itself."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_kept_without_outputs_and_use_the_package(path):
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    for cell in code:
        defined = re.findall(r"^\s*(?:class|def) (\w+)", cell.source, re.MULTILINE)
        assert not set(defined) & set(mmfsdp.__all__), "notebooks never redefine what the package has"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_imports_the_modules_that_it_names(path):
    """The kernels of test_lessons.py have imported more than a person's: `torch.x.y` may be there in them alone."""
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    cells = [cell.source for cell in book.cells if cell.cell_type == "code" and not cell.source.startswith("%%")]
    assert not modules_named("\n".join(map(TransformerManager().transform_cell, cells))) - WITH_TORCH


def modules_named(code: str) -> set[str]:
    """Return the modules that code names as attributes of others, such as torch.nn, and does not import."""
    tree = ast.parse(code)
    names: dict[str, str] = {}  # what a name of the code is bound to: a module, or something in one
    imported: set[str] = set()
    for line in ast.walk(tree):
        if isinstance(line, ast.Import):
            for alias in line.names:
                imported.add(alias.name)
                first = alias.name.partition(".")[0]
                names |= {alias.asname: alias.name} if alias.asname else {first: first}
        elif isinstance(line, ast.ImportFrom):
            imported.add(str(line.module))
            names |= {alias.asname or alias.name: f"{line.module}.{alias.name}" for alias in line.names}
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *others = ast.unparse(node).split(".")
            named.add(".".join([names.get(first, ""), *others]))
    return {
        name for name in named if is_module(name) and not any(f"{other}.".startswith(f"{name}.") for other in imported)
    }


def is_module(name: str) -> bool:
    """Return True for the name of a module inside a package."""
    try:
        return re.fullmatch(r"\w+(\.\w+)+", name) is not None and find_spec(name) is not None
    except ModuleNotFoundError:  # what it would be in is no package
        return False


def test_a_module_that_is_named_and_not_imported_is_found():
    found = modules_named(
        "import torch\nimport os.path\nfrom torch import distributed as d\n"
        + "\n".join(["torch.nn.Linear(1, 1)", "os.path.join('a')", "d.fsdp.fully_shard", "x.nn", "torch.ones(1).sum()"])
    )
    assert found == {"torch.nn", "torch.distributed.fsdp"}
