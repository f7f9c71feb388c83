"""What a plan shows to be wrong with a run stops it before any rank starts: here, or where they are started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..params import RunParams

MISTAKE = 3
"""Exit status of `linted` for a mistake, told on its output."""


def lint_here(params: RunParams) -> bool:
    """Lint a run if that takes no time: where planning is imported, as by a form or the command line, and the model is
    known or needs no look at a hub. False if not. Raises ParamError for errors."""
    if "mmfsdp.preview" not in sys.modules:
        return False
    from ..preview import check, known

    parts = (params.model.vision, params.model.language, *params.model.encoders)
    if not (known(params) or all(part.config for part in parts)):
        return False
    with suppress(OSError, ImportError):  # the ranks may be where there is what is not here: they lint, too
        check(params)
    return True


def refusal(folder: Path, *, stop: Callable[[], bool] = bool) -> str:
    """What is wrong with the run in a folder, by a process of its own; empty if nothing. stop: no more asked for."""
    command = [sys.executable, "-m", "mmfsdp.launch", str(folder), "lint"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while child.poll() is None and not stop():
        time.sleep(0.05)
    child.kill()
    said, _ = child.communicate()
    return said.strip() if child.returncode == MISTAKE else ""


def lint_folder(folder: Path) -> int:
    """That process: its exit status."""
    from ..params import ParamError, RunParams
    from ..preview import check

    try:
        with suppress(OSError, ImportError):
            check(RunParams.from_yaml(folder / "params.yaml"))
    except ParamError as error:
        print(error)
        return MISTAKE
    return 0
