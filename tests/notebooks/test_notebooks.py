"""Every notebook is clean as it lies here. `test_lessons.py` and `tests/browser/test_start_here.py` run them."""

import re
from pathlib import Path

import nbformat
import pytest

import mmfsdp

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
