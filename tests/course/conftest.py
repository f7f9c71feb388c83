import sys
from functools import partial
from pathlib import Path

import pytest

from mmfsdp.kit.widgets.ranks_cell import ranks_magic
from tests.forked_python import ForkedPython

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "notebooks"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_COURSE", str(tmp_path / "course"))
    monkeypatch.setenv("MMFSDP_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture(scope="module")
def rank_server(fork_server):
    """The process that starts the ranks of all cells, forked; test_ranks_magic.py starts it as a notebook does."""
    ranks_magic.stop_servers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_magic, "Popen", partial(ForkedPython, fork_server.address))
        ranks_magic.server_process()
        yield
        ranks_magic.stop_servers()
