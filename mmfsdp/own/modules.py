"""Import a person's own modules: those in the current folder first, as in a notebook, then as Python finds them.

A kernel keeps what it has imported. So before own code runs again, modules whose files were edited since are forgotten,
with all that belong to them, and imported afresh; what was executed is what is copied into a run folder. The ranks of a
run find that copy, its code/, first.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

from ..params.in_words import size

PACKAGE = tuple({f"{file.parent.parent}/" for file in (Path(__file__), Path(__file__).resolve())})
"""The folder of this package, as files name it: as Python found it and, if a link led there, where it is."""
MAX_BYTES = 5 << 20
"""Bytes of own code that a run folder takes."""

_lock = threading.RLock()
_instead: ContextVar[Path | None] = ContextVar("_instead", default=None)
"""The copy of own code that `code_from` names."""
_code: Path | None = None
"""The copy of the own code in a rank, which is first on sys.path; None elsewhere."""
_loaded: dict[str, tuple[str, bytes]] = {}
"""Module -> its file, and the source that was executed."""
_owner: ContextVar[str] = ContextVar("_owner", default="")
"""The module of own code that is imported or runs now."""
_late: dict[str, set[str]] = {}
"""Module -> modules that its import and its calls have imported, those included that its source does not show."""


def use_code(folder: Path) -> None:
    """Make a copy of own code the first place of imports, for the rest of this process: a rank, or its data worker."""
    global _code
    if _code != folder:
        _code = folder
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True  # a digest covers all that the copy holds


def code_in_use() -> Path | None:
    """Return the folder of `use_code`; None before it was called."""
    return _code


@contextmanager
def code_from(folder: Path | None) -> Iterator[None]:
    """Find own modules in a folder, such as a run's code/, before the current one. None: change nothing."""
    token = _instead.set(folder or _instead.get())
    try:
        yield
    finally:
        _instead.reset(token)


def first_folders() -> list[str]:
    """Return where modules are looked for before sys.path: a copy of own code, the current folder."""
    copy = _instead.get() or _code
    return [*([str(copy)] if copy else []), str(Path.cwd())]


def folders() -> list[str]:
    """Return where modules are looked for, in order."""
    return [*first_folders(), *filter(None, sys.path)]


def module_names() -> list[str]:
    """Return the modules that are files of the current folder, for hints."""
    return sorted(path.stem for path in Path.cwd().glob("*.py") if path.stem.isidentifier())


def is_of_package(file: str) -> bool:
    """Return True for a file of this package."""
    return file.startswith(PACKAGE)


def is_persons_file(file: str) -> bool:
    """Return True for a file of a person's own code: not of this package, Python's library or an installed package.

    A person's own folder may be called mmfsdp, too.
    """
    return not (file.startswith("<frozen ") or is_of_package(file) or is_installed(file))


@cache
def is_installed(file: str) -> bool:
    """Return True for a file of Python's library or of an installed package: a version names what it holds."""
    parts = Path(file).parts
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return "site-packages" in parts or "dist-packages" in parts or any(file.startswith(f"{each}/") for each in standard)


def is_own(module: str, file: str, entry: str) -> bool:
    """Return True for a module of a person's own code, of which `entry` is the module that a field names.

    Not for what is installed; nor for an editable installation, whose folder may be large, unless it holds the entry.
    """
    if is_installed(file) or is_of_package(file):
        return False
    name = module.partition(".")[0]
    is_near = any(file.startswith(f"{folder}/") for folder in first_folders())
    return is_near or name == entry.partition(".")[0] or name not in distributions()


@cache
def distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each top-level module that is installed: finding them takes half a second."""
    return packages_distributions()


class _Loader(SourceFileLoader):
    """Compiles a module's source whenever it is imported, and keeps it.

    Python's cache of bytecode would miss an edit within the same second that does not change the file's length.
    """

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Raise OSError: there is no cache."""
        raise OSError(path)

    def get_data(self, path: Any) -> bytes:
        """Return the source."""
        data = super().get_data(path)
        _loaded[self.name] = (str(path), data)
        _late.setdefault(_owner.get(), set()).add(self.name)
        return data


class _Finder:
    """Finds own modules in `folders`, and leaves those that are installed to Python."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the module is; see importlib.abc.MetaPathFinder."""
        spec = PathFinder.find_spec(name, folders() if path is None else path, target)
        for finder in sys.meta_path if spec is None else ():  # such as that of an editable installation
            if finder is not self and finder is not PathFinder:
                spec = spec or finder.find_spec(name, path, target)
        origin = spec.origin if spec else None
        if spec is None or (origin and not is_own(name, origin, _owner.get())):
            return None
        if origin and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, origin)
        return spec


_FINDER: Any = _Finder()


@contextmanager
def finding(owner: str = "") -> Iterator[None]:
    """Let imports find own modules. In a rank nothing changes: they are on sys.path there.

    owner: the module of own code that runs, if it is known; what it imports now is copied with it.
    """
    if _code is not None:
        yield
        return
    token = _owner.set(owner or _owner.get())
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, _FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)
        _owner.reset(token)


def import_own(name: str) -> ModuleType:
    """Return a module, imported afresh if its file, or one of its own that it imports, was edited since.

    Raises what the import raises, and ImportError for a file that has the name of a module of others.
    """
    if _code is not None:
        return import_module(name)
    with _lock:
        invalidate_caches()  # a file may have been written a moment ago
        sources = _sources(name)[0]
        for each, file in sources.items():
            if each in sys.stdlib_module_names or _is_of_others(sys.modules.get(each)):
                raise ImportError(f"{file} has the name of another module, {each}, so one hides the other; rename it")
        modules = {*sources, *_late.get(name, ()), name, *_parents(name)}
        if any(map(_is_stale, modules)):
            for each in modules:
                sys.modules.pop(each, None)
                _loaded.pop(each, None)
        if name not in sys.modules:
            _late[name] = set()
        with finding(name):
            return import_module(name)


def _parents(name: str) -> list[str]:
    """Return the packages that a module is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _is_of_others(module: ModuleType | None) -> bool:
    """Return True for a module that was imported, and is installed or built into Python."""
    file = getattr(module, "__file__", None)
    if module is None or (file is None and hasattr(module, "__path__")):
        return False
    return file is None or is_installed(file) or is_of_package(file)


def _is_stale(name: str) -> bool:
    """Return True for a module that was imported from another file or text than is there now, as far as is known."""
    module = sys.modules.get(name)
    if module is None or _is_of_others(module):
        return False
    spec = _FINDER.find_spec(name, getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", None))
    if getattr(module, "__file__", None) is None:  # a folder without __init__.py
        return spec is None or list(spec.submodule_search_locations or ()) != list(module.__path__)
    file, data = _loaded.get(name, ("", b""))
    try:
        return spec is None or spec.origin != file or Path(file).read_bytes() != data
    except OSError:
        return True


def _sources(name: str) -> tuple[dict[str, Path], set[str]]:
    """Return the file of each own module that a module imports, itself included, and which installed ones they import.

    Reads the sources without running them, functions too, so that it knows of imports that only a rank will reach.
    """
    own_folders = [folder for folder in folders() if not is_installed(f"{folder}/")]
    files: dict[str, Path] = {}
    others: set[str] = set()
    waiting, met = [name], {name}
    while waiting:
        module = waiting.pop()
        spec = _spec(module, own_folders)
        if spec is None:
            others.add(module.partition(".")[0])
        elif spec.origin and not is_own(module, spec.origin, name):
            others.add(module.partition(".")[0])
        elif spec.origin and spec.origin.endswith(".py"):
            files[module] = Path(spec.origin)
            package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
            names = {*_imports(files[module].read_bytes(), package), *_parents(module)} - met
            waiting += names
            met |= names
    return files, others - {module.partition(".")[0] for module in files}


def _spec(module: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return where a module is in these folders; None if it is not there."""
    path: Sequence[str] | None = folders
    spec = None
    for name in [*_parents(module), module]:
        spec = PathFinder.find_spec(name, path) if path else None
        path = spec.submodule_search_locations if spec else None
    return spec


@lru_cache(1000)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Return the modules that a source may import, functions included, and names in them, which may be modules."""
    names: list[str] = []
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # who imports it says so
        return ()
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name and not name.startswith("."))


@dataclass(frozen=True)
class OwnSources:
    """The own code that a run needs: what is copied into its folder, and what is known by a version."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Path below the folder of the modules -> content."""
    packages: dict[str, str] = field(default_factory=dict)
    """Installed package that the files import -> its version."""


def own_sources(modules: Iterable[str]) -> OwnSources:
    """Return the sources of these modules, and of all own modules that they import, as they were executed.

    Raises ValueError if they are larger than a run folder takes.
    """
    files: dict[str, bytes] = {}
    others: set[str] = set()
    for name in dict.fromkeys(modules):
        sources, imported = _sources(name)
        others |= imported
        for late in _late.get(name, set()) & _loaded.keys():
            sources[late] = Path(_loaded[late][0])
        for each, file in sources.items():
            end = "/__init__.py" if file.name == "__init__.py" else ".py"
            executed, content = _loaded.get(each, ("", b""))
            files[each.replace(".", "/") + end] = content if executed == str(file) else file.read_bytes()
    total = sum(map(len, files.values()))
    if total > MAX_BYTES:
        words = f"the own code and what it imports are {len(files)} files of {size(total)}; a run folder takes"
        raise ValueError(
            f"{words} {size(MAX_BYTES)}: install what does not change as a package, or launch from another folder"
        )
    packages = {}
    for other in sorted(others):
        for distribution in distributions().get(other, ()):
            packages[distribution] = version(distribution)
    return OwnSources(dict(sorted(files.items())), packages)
