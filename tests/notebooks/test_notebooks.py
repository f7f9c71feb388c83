"""Every notebook is clean as it lies here, and runs from top to bottom in a real kernel."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import mmfsdp

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(name: str, folder: Path, **changes) -> nbformat.NotebookNode:
    """Execute a notebook with other values for the names in its cell of parameters, in a folder of its own."""
    book = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    place = next(i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", []))
    lines = [f"{key} = {value!r}" for key, value in changes.items()]
    book.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    NotebookClient(book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return book


def widget_texts(book: nbformat.NotebookNode) -> str:
    """Everything that the notebook's widgets show at its end."""
    models = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    return "\n".join(str(model["state"].get("value", "")) for model in models)


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


def test_start_here_goes_from_choices_to_captions(tmp_path):
    changes = {
        "launch.folder": str(tmp_path / "runs"),
        "train.steps": 12,
        "train.warmup_steps": 2,
        "train.eval_samples": 20,
    }
    (tmp_path / "course").symlink_to(ROOT / "notebooks/course")  # the captioner's
    book = run("00_start_here.ipynb", tmp_path, changes=changes)
    shown = widget_texts(book)
    (folder,) = (tmp_path / "runs").iterdir()
    assert "COMPLETED, step 12 of 12" in shown and "0 │</span> step 12/12" in shown
    assert " x in forward" in shown and shown.count("mm-card") > 10
    result = json.loads((folder / "result.json").read_text())
    assert result["frozen_parameters_changed"] == 0
    assert result["wire_bytes_predicted"] == result["wire_bytes_measured"] > 0
    assert "data:image/png" in (folder / "report.html").read_text()
