"""Folders and the hub, as a process finds them: can it write there, is there room, does the hub answer."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...params.variables import backbone_cache
from ..run.error_kinds import SHM as SHARED_MEMORY
from ..run.hub_cache import cache, is_cached, why_no_answer

PROBE_BYTES = 16 << 20
"""Bytes that are written into a folder and deleted: a quota shows only then."""
RUN_FOLDER, CACHE, HUB_CACHE, TEMPORARY, SHM = "run folder", "cache", "hub cache", "temporary files", "shared memory"


def places_of(run_folder: str | Path) -> dict[str, str]:
    """Return the folders that a run writes into, by what they are for."""
    places = {RUN_FOLDER: os.path.abspath(os.path.expanduser(run_folder)), CACHE: str(backbone_cache())}
    places |= {HUB_CACHE: cache(), TEMPORARY: tempfile.gettempdir()}
    if os.path.isdir(SHARED_MEMORY):
        places[SHM] = SHARED_MEMORY
    return places


def probe(folder: str) -> dict[str, Any]:
    """Write PROBE_BYTES into a folder, read them back and delete them. Return what happened, as JSON holds it.

    Of a folder that is not there yet, its nearest parent that is. In shared memory nothing is written: that would be
    taken from the ranks.
    """
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    found: dict[str, Any] = {"path": folder, "error": ""}
    try:
        if folder != SHARED_MEMORY:
            _write_and_read(path)
        usage = shutil.disk_usage(path)
        found |= {"free": usage.free, "total": usage.total}
    except OSError as error:
        found["error"] = f"{error.strerror or error} ({path})"
    return found


def _write_and_read(folder: Path) -> None:
    """Raise OSError if a file cannot be written into a folder and read back."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".mmfsdp-check-") as file:
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())  # a network file system may tell only now that it is full
        if Path(file.name).read_bytes()[: len(block)] != block:
            raise OSError("the data that were read back differ from those that were written")


def hub_facts(names: Iterable[str], *, ask: bool = True) -> dict[str, Any]:
    """Return whether the hub answers, and which of these names it is that the cache lacks, as JSON holds it."""
    from huggingface_hub import constants

    found: dict[str, Any] = {"address": constants.ENDPOINT, "cache": cache(), "offline": constants.HF_HUB_OFFLINE}
    found["missing"] = [name for name in names if not is_cached(name)]
    # One rank of a node asks: a hub may refuse hundreds of requests at once.
    found["unreachable"] = "" if constants.HF_HUB_OFFLINE or not ask else why_no_answer(constants.ENDPOINT)
    return found
