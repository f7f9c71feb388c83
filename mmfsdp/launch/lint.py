"""What a plan shows to be wrong with a run stops it before any rank starts: here, or where they are started."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import mmfsdp

from ..loading import collector_paused
from ..places import cache_folder

if TYPE_CHECKING:
    from ..params import RunParams

MISTAKE = 3
"""Exit status of `linted` for a mistake, told on its output."""
TRAINING = ("mmfsdp.train:run", "mmfsdp.evaluate:train_and_caption")
"""What ranks may call of which the plan is known here."""


def lint_here(params: RunParams) -> bool:
    """Lint a run if that takes no time: where it was found sound before, or planning is imported, as by a form or the
    command line, and the model is known or needs no look at a hub. False if not. Raises ParamError for errors."""
    if os.path.exists(_note(params)):
        return True
    if "mmfsdp.preview" not in sys.modules:
        return False
    from ..preview import known

    parts = (params.model.vision, params.model.language, *params.model.encoders)
    if not (known(params) or all(part.config for part in parts)):
        return False
    _look(params)
    return True


def mistake(params: RunParams) -> str:
    """What is wrong with a run, by a plan of it in this process; empty if nothing."""
    from ..params import ParamError

    try:
        if not os.path.exists(_note(params)):
            _look(params)
    except ParamError as error:
        return str(error)
    return ""


def _look(params: RunParams) -> None:
    with collector_paused():
        from ..preview import check

        with suppress(OSError, ImportError):  # the ranks may be where there is what is not here: they lint, too
            check(params)
            note = _note(params)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


def _note(params: RunParams) -> Path:
    """The file that says that such a run was found sound: a script's next launch of it, by all that a plan asks of a
    run, need not plan it again."""
    parts, data, train = params.to_dict(), params.data, params.train
    asked = [parts["model"], parts["fsdp"], params.launch.ranks, data.max_length, len(data.sources())]
    asked += [train.batch_size, train.accumulation, train.device.value]
    asked += [mmfsdp.__version__, version("torch"), version("transformers")]
    return cache_folder() / "linted" / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]


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
    from ..params import RunParams

    words = mistake(RunParams.from_yaml(folder / "params.yaml"))
    print(words)
    return MISTAKE if words else 0
