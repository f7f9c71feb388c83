"""Notebooks as the tests need them: read, filled with their solutions, executed in a real kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from mmfsdp.kit.cli.class_copy import solutions, tagged

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

LESSONS = sorted(path for path in FOLDER.glob("[01][0-9]_*.ipynb") if not path.name.startswith("00_"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def with_both(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Each exercise as it stands, its check, then its solution and the check again: one kernel tries both."""
    solved, cells, waiting = solutions(book), [], None
    for cell in book.cells:
        cells.append(cell)
        if name := tagged(cell, "exercise"):
            waiting = (name, [nbformat.v4.new_code_cell(solved[name])])
        elif waiting and cell.cell_type == "code":
            waiting[1].append(nbformat.v4.new_code_cell(cell.source))
            if f'check("{waiting[0]}"' in cell.source:
                cells += waiting[1]
                waiting = None
    assert waiting is None, f"exercise {waiting and waiting[0]} is never checked"
    return nbformat.v4.new_notebook(cells=cells, metadata=book.metadata)


def execute(book: nbformat.NotebookNode, folder: Path, *, timeout: int = 600, **env: str) -> nbformat.NotebookNode:
    """Run it from top to bottom in a kernel of its own that works in this folder. A cell that raises, raises."""
    client = NotebookClient(book, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    one_thread = {"OMP_NUM_THREADS": "1"}  # two notebooks and the ranks of another test share the cores
    return client.execute(env=os.environ | one_thread | env)


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a code cell printed and showed, as plain text without tags."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        parts.append(output.get("text") or data.get("text/html") or data.get("text/plain") or "")
    return re.sub(r"<[^>]+>", " ", "\n".join(parts))
