"""Lines on the machine that `check` is called on, without starting a rank: packages, cores, folders, the hub."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import psutil

import mmfsdp

from ...params import RunParams
from ...params.in_words import size
from ..run.hub_cache import hub_weights, is_offline
from ..run.local import available_cores
from ..run.rank_count import count_gpus, has_driver
from ..verify.lines import NOTE, OK, WRONG, Line
from .places import CACHE, HUB_CACHE, RUN_FOLDER, SHM, TEMPORARY, hub_facts, places_of, probe

LITTLE_BYTES = 5 << 30
"""Free bytes of a folder's disk: with less than this, checkpoints or weights may not fit."""
LITTLE_SHARED_MEMORY, TOO_LITTLE_SHARED_MEMORY = 1 << 30, 32 << 20
"""Containers have 64 MiB unless somebody says more."""
PLACE_FIXES = {
    RUN_FOLDER: "set launch.folder to a writable folder with free space",
    CACHE: "export MMFSDP_CACHE=FOLDER, a writable folder with free space",
    HUB_CACHE: "export HF_HOME=FOLDER, a writable folder with free space",
    TEMPORARY: "export TMPDIR=FOLDER, a writable folder with free space",
    SHM: "start the container with more shared memory (docker run --shm-size=8g), or set data.workers to 0",
}
INSTALL = "run `make`, or `python3 install.py`, in the folder of mmfsdp"


def machine_lines(params: RunParams) -> Iterator[Line]:
    """Yield a line for each check of this machine."""
    yield _python()
    yield _packages()
    yield _cores()
    yield _gpus()
    for name, folder in places_of(params.launch.folder).items():
        yield place_line(name, probe(folder))
    yield _hub(params)


def _python() -> Line:
    words = f"{platform.python_version()} ({sys.executable}), mmfsdp {mmfsdp.__version__} in {mmfsdp.__path__[0]}"
    return Line(OK, "python", f"{words}, on {socket.gethostname()}")


def _packages() -> Line:
    """Return whether each package that mmfsdp needs is there, in a version that it can use."""
    try:
        needed = requires("mmfsdp") or []
    except PackageNotFoundError:
        return Line(
            NOTE, "packages", "mmfsdp is imported from its folder and not installed, so the versions are not compared"
        )
    from packaging.requirements import Requirement

    wrong, versions = [], []
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if not found or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement} is required, and {found or 'none'} is installed")
        elif requirement.name in ("torch", "transformers"):
            versions.append(f"{requirement.name} {found}")
    if wrong:
        return Line(WRONG, "packages", "; ".join(wrong), INSTALL)
    return Line(OK, "packages", ", ".join(versions))


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cores() -> Line:
    memory = psutil.virtual_memory()
    words = f"{available_cores()} for this process, memory {size(memory.total)}, {size(memory.available)} of it free"
    return Line(OK, "cores", words)


def _gpus() -> Line:
    gpus = count_gpus()
    if gpus:
        return Line(OK, "GPUs", f"torch sees {gpus}")
    if not has_driver():
        return Line(OK, "GPUs", "none, and no GPU driver")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return Line(NOTE, "GPUs", f"CUDA_VISIBLE_DEVICES={hidden} hides all GPUs", "unset it to train on them")
    words = f"there is a GPU driver, but torch {version_of('torch')} sees no GPU"
    fix = "install a torch that is built for it: `python3 install.py --torch-index URL` or `--system-torch`"
    return Line(WRONG, "GPUs", words, fix)


def _hub(params: RunParams) -> Line:
    try:
        fields = hub_weights(params)
        return hub_line(hub_facts(fields.values()), fields, job_is_offline=is_offline(params))
    except ImportError as error:  # of huggingface_hub or open_clip, with all that they import
        return Line(WRONG, "hub", f"its packages cannot be imported: {error}", INSTALL)


def place_line(name: str, found: dict[str, Any]) -> Line:
    """Return the line of a folder, of what `probe` has found."""
    fix, path = PLACE_FIXES.get(name, ""), found.get("path", "")
    if found.get("error"):
        return Line(WRONG, name, f"{path} cannot be written: {found['error']}", fix)
    free = found.get("free", 0)
    words = f"{path}, {size(free)} free"
    if name == SHM and free < TOO_LITTLE_SHARED_MEMORY:
        return Line(WRONG, name, f"{words}: data workers and NCCL need more", fix)
    if free < (LITTLE_SHARED_MEMORY if name == SHM else LITTLE_BYTES):
        return Line(NOTE, name, f"{words}, which may be too little", fix)
    return Line(OK, name, words)


def hub_line(found: dict[str, Any], fields: dict[str, str], *, job_is_offline: bool = False, where: str = "") -> Line:
    """Return the line of the Hugging Face hub. fields: the names that the run needs, by their field.

    job_is_offline: the ranks of the job will take all from the cache.
    """
    missing = [f"{name} ({field})" for field, name in fields.items() if name in found.get("missing", ())]
    address, error = found.get("address", ""), found.get("unreachable", "")
    answer = f"{address} does not answer ({error})" if error else f"{address} answers"
    if found.get("offline"):
        answer = "HF_HUB_OFFLINE is set, so the hub is not contacted"
    words = f"{where}{answer}"
    if missing:
        words += f"; not in the cache {found.get('cache', '')}: {', '.join(missing)}"
        if error or found.get("offline") or job_is_offline:
            fix = (
                "run `mmfsdp fetch` with the same parameters on a machine with internet; all nodes must see its HF_HOME"
            )
            return Line(WRONG, "hub", words, fix)
        return Line(OK, "hub", f"{words}; the first run downloads them")
    words += "; all weights of this run are in the cache" if fields else "; this run needs no weights from it"
    return Line(NOTE if error else OK, "hub", words)
