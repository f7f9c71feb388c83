"""The Python blocks of README, CONTRIBUTING and the reference pages run, a page at a time and in its order."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import in_processes
from tests.test_docs import PAGES, blocks

pytestmark = pytest.mark.real

STARTS = re.compile(
    r"\b(launch|sweep|Run\.open)\(|from_pretrained\(\"[A-Z]|init_process_group\(.* if |torchrun --nproc"
)
"""What starts or opens a run, downloads a model, or is for torchrun: other tests do that, on smaller models."""
SCRIPTS = {page.stem: [b for b in blocks(page, "python") if not STARTS.search(b)] for page in PAGES}


def run_them(rank: int, folder: str, scripts: dict[str, list[str]]) -> dict[str, str]:
    """What went wrong on each page, in a folder of its own."""
    found = {}
    for name, parts in scripts.items():
        here = Path(folder, name)
        here.mkdir()
        os.chdir(here)
        known: dict = {"__name__": name}
        try:
            for part in parts:
                exec(compile(part, f"{name}.md", "exec"), known)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.destroy_process_group()
    os.chdir("/")
    return found


@pytest.fixture(scope="module")
def wrong():
    (found,) = in_processes(run_them, 1, SCRIPTS)
    return found


@pytest.mark.parametrize("page", [name for name, parts in SCRIPTS.items() if parts])
def test_python_blocks_run(wrong, page):
    assert page not in wrong, wrong[page]
