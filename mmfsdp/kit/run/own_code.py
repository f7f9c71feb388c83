"""code/ of a run folder: the person's own modules as they were at the launch, which the ranks find first.

So an edit does not change a job that waits, is requeued or is resumed. code.json, next to it, has the versions of the
installed packages that they import.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...own.calls import OwnCodeError
from ...own.modules import MAX_BYTES, OwnSources, code_from, code_in_use, own_sources, use_code
from ...params import ParamError, RunParams
from ...params.own import module_of, own_fields
from .files.folder import PathLike, make_inner_folder, read_file, read_json, write_bytes, write_json

CODE, VERSIONS = "code", "code.json"
MAX_FILES = 10_000
"""Files that are looked at in a folder that somebody handed over."""


def sources_of(params: RunParams) -> OwnSources:
    """Return the sources of the own code that parameters name. Raises OwnCodeError if a run folder takes less."""
    fields = own_fields(params)
    try:
        return own_sources([module_of(value) for _, value in fields])
    except ValueError as error:
        raise OwnCodeError(fields[0][0], str(error)) from None


def write_code(folder: Path, sources: OwnSources) -> None:
    """Write own code into a run folder, in place of what its code/ held. Nothing, where there is none."""
    if (folder / CODE).exists():
        shutil.rmtree(folder / CODE)  # raises OSError for a link
    if not sources.files and not sources.packages:
        return
    make_inner_folder(folder / CODE)
    for name, content in sources.files.items():
        make_inner_folder((folder / CODE / name).parent)
        write_bytes(folder / CODE / name, content)
    write_json(folder / VERSIONS, {"files": sorted(sources.files), "packages": sources.packages})


def read_code(folder: Path) -> dict[str, bytes]:
    """Return the files of code/ by their path below it; {} if there is none.

    Raises ParamError for what no launch writes: a link, anything but a regular file, more than a run folder takes.
    """
    files: dict[str, bytes] = {}
    size = 0
    for path in _walk(folder):
        status = os.lstat(path)
        name = path.relative_to(folder).as_posix()
        if stat.S_ISLNK(status.st_mode):
            raise ParamError("run", f"{name} of {folder} is a link; remove it")
        if stat.S_ISDIR(status.st_mode):
            continue
        size += status.st_size
        if not stat.S_ISREG(status.st_mode) or size > MAX_BYTES or len(files) >= MAX_FILES:
            raise ParamError("run", f"{folder / CODE} holds what no launch writes there, such as {name}; remove it")
        files[path.relative_to(folder / CODE).as_posix()] = read_file(path)
    return files


def read_versions(folder: Path) -> dict[str, str]:
    """Return the versions of the installed packages that the own code of a run imports, by name."""
    packages = (read_json(folder / VERSIONS) or {}).get("packages")
    packages = packages if isinstance(packages, dict) else {}
    return {name: value for name, value in packages.items() if isinstance(value, str)}


def writable_by_others(folder: Path) -> str:
    """Return the first path in code/, that included, that is not this user's alone to write; "" if all are."""
    for path in _walk(folder):
        status = os.lstat(path)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return path.relative_to(folder).as_posix()
    return ""


def _walk(folder: Path) -> Iterator[Path]:
    """Yield code/ and all that is in it, without following links."""
    top = folder / CODE
    if not os.path.lexists(top):
        return
    yield top
    if top.is_symlink():
        return
    for parent, folders, files in os.walk(top):
        for name in sorted([*folders, *files]):
            yield Path(parent, name)


def changes(before: OwnSources, now: OwnSources) -> str:
    """Return what differs, in words: `changed my_data.py; added helper.py; gone old.py; numpy 2.1 was 2.0`; or ""."""
    both = before.files.keys() & now.files.keys()
    kinds = {
        "changed": {name for name in both if before.files[name] != now.files[name]},
        "added": now.files.keys() - both,
        "gone": before.files.keys() - both,
    }
    words = [f"{kind} {', '.join(sorted(names))}" for kind, names in kinds.items() if names]
    for name, version in before.packages.items():
        if now.packages.get(name, version) != version:
            words.append(f"{name} {now.packages[name]} was {version}")
    return "; ".join(words)


def use_code_of(folder: Path) -> None:
    """Find own code in a run's code/ first, for the rest of this process: one of its ranks."""
    if (folder / CODE).is_dir():
        use_code(folder / CODE)


@contextmanager
def code_of(folder: PathLike) -> Iterator[None]:
    """Find own code in a run's code/ first, in this process: to caption, export or plan what the run has trained."""
    code = Path(folder) / CODE
    with code_from(code if code.is_dir() and code_in_use() is None else None):
        yield
