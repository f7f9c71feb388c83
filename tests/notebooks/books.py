"""Notebooks as the tests need them: read, filled with their solutions, executed in a real kernel.

The kernel is ipykernel's, in a process that was forked (tests/forked_python.py) in place of started.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient

from mmfsdp.kit.cli.class_copy import solutions, tagged
from tests.forked_python import PARENT, ForkedPython, ForkServer

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


def execute(
    book: nbformat.NotebookNode, folder: Path, server: ForkServer, *, timeout: int = 600, **env: str
) -> nbformat.NotebookNode:
    """Run it from top to bottom in a kernel of its own that works in this folder. A cell that raises, raises."""
    client = NotebookClient(book, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    manager = client.create_kernel_manager()
    manager.provisioner = ForkedKernel(kernel_id=str(uuid4()), kernel_spec=manager.kernel_spec, parent=manager)
    manager.provisioner.server = server
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env  # two notebooks and the ranks of another test share the cores
    env.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would leave out of the notebook what libraries print
    return client.execute(env=env)


class ForkedKernel(LocalProvisioner):
    """Has a kernel's process forked; all else is as for one on this machine that jupyter_client starts."""

    server: ForkServer

    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        environment = options["env"] | {PARENT: str(os.getpid())}
        command = [sys.executable, *cmd[1:]]
        self.process = ForkedPython(
            self.server.address, command, env=environment, cwd=options.get("cwd"), start_new_session=True
        )
        self.pid = self.pgid = self.process.pid
        self.cwd = options.get("cwd")
        return self.connection_info


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a code cell printed and showed, as plain text without tags."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        parts.append(output.get("text") or data.get("text/html") or data.get("text/plain") or "")
    return re.sub(r"<[^>]+>", " ", "\n".join(parts))
