"""The layers of the package: a room, a folder or the file planning.py, imports only rooms before it in ROOMS."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import in_fresh_python

PACKAGE = Path(__file__).resolve().parent.parent / "mmfsdp"

ROOMS = (
    "params own core backends quantized lint predict planning checkpoint "
    "kit.data kit.hangs kit.run kit.spawn_ranks kit.models kit.shapes kit.train kit.compat "
    "kit.bench kit.verify kit.check kit.widgets kit.arena kit.cli widgets"
).split()
"""From the bottom up."""
SMALL = ROOMS[: ROOMS.index("kit.data")]
"""The small package: torch and parameters, and nothing of the kit above."""
FILES = ("planning", "kit.spawn_ranks", "widgets")
"""Rooms that are one file."""
NO_TORCH = ("params", "own", "kit.hangs", "kit.run", "kit.check", "kit.widgets", "kit.cli")
"""Rooms that a person imports in a notebook or terminal: they start in well under a second."""
LATE = {("kit.run", "kit.train"), ("kit.models", "kit.compat"), ("kit.models", "kit.shapes"), ("kit.run", "kit.shapes")}
LATE |= {("kit.bench", "kit.widgets"), ("kit.run", "kit.models"), ("kit.check", "kit.widgets")}
"""Upward imports, inside a function: a run is prepared before it starts; Flamingo.wrap_fsdp is OpenFlamingo's; a
backbone to pretrain has a tokenizer before that; a bench draws plans; a process imports a run's model before its ranks
are forked; a report of a check is a table in a notebook."""
ONLY_ON_GPUS = "quantized.nf4_kernel"
"""The one file of the small package that is imported inside a function: it needs triton, of torch's builds for GPUs."""
NEVER = {
    ("checkpoint", "predict"),
    ("kit.widgets", "kit.compat"),
    ("kit.widgets", "kit.bench"),
    ("kit.widgets", "kit.verify"),
}
"""Downward imports that no file needs."""


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return (module below mmfsdp, inside a function) for each import of ours in a file."""
    tree = ast.parse(path.read_text())
    inside = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside |= {id(node) for node in ast.walk(function)}
    package = ("mmfsdp", *path.relative_to(PACKAGE).parts[:-1])
    modules = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        target = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            path_of = PACKAGE.parent / f"{target}.{alias.name}".replace(".", "/")
            is_module = path_of.with_suffix(".py").exists() or (path_of / "__init__.py").exists()
            name = f"{target}.{alias.name}" if is_module else target
            if name.startswith("mmfsdp."):
                modules.append((name.removeprefix("mmfsdp."), id(node) in inside))
    return tuple(modules)


def room_of(module: str) -> str:
    """Return the room of a module below mmfsdp, such as `core` or `kit.run`."""
    first, *others = module.split(".")
    return f"kit.{others[0]}" if first == "kit" and others else first


def files(room: str) -> list[Path]:
    path = PACKAGE / room.replace(".", "/")
    return [path.with_suffix(".py")] if room in FILES else sorted(path.rglob("*.py"))


def test_every_folder_is_a_room():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {"kit"}
    rooms |= {f"kit.{path.name}" for path in (PACKAGE / "kit").iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    rooms |= {f"kit.{path.stem}" for path in (PACKAGE / "kit").glob("*.py") if not path.stem.startswith("__")}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room):
    before = {other for other in ROOMS[: ROOMS.index(room) + 1] if (room, other) not in NEVER}
    for path in files(room):
        for module, inside in imports_of(path):
            other = room_of(module)
            assert other in before or (inside and (room, other) in LATE), f"{path.name} imports {module}"


@pytest.mark.parametrize("room", SMALL)
def test_the_small_package_has_no_late_imports(room):
    """Inside a function an import would climb, or hide a circle: whoever reads straight down would have to go back."""
    for path in files(room):
        late = [module for module, inside in imports_of(path) if inside and module != ONLY_ON_GPUS]
        assert not late, f"{path.name} imports {', '.join(late)} inside a function"


def test_the_reading_list_of_the_core_names_each_file_once_and_never_climbs():
    contents = ast.get_docstring(ast.parse((PACKAGE / "core/__init__.py").read_text())) or ""
    listed = re.findall(r"^- (\w+): ", contents, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in files("core") if path.stem != "__init__")
    for place, name in enumerate(listed):
        needed = {module for module, _ in imports_of(PACKAGE / f"core/{name}.py") if module.startswith("core.")}
        assert needed <= {f"core.{other}" for other in listed[:place]}, f"core/{name}.py uses a file that comes later"


def test_no_file_imports_itself_by_way_of_others():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        graph[name] = {module for module, inside in imports_of(path) if not inside and module != name}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("room", [room for room in SMALL if room not in ("params", "checkpoint")])
def test_planning_and_stepping_needs_torch_only(room):
    """And one file triton, which comes with torch's builds for GPUs; it is imported where a GPU first needs it.

    Another file safetensors, of which it is the format: it is imported where ranks read such files.
    """
    more = {"nf4_kernel.py": "triton", "tensor_files.py": "safetensors"}
    for path in files(room):
        allowed = {"torch", more.get(path.name)}
        for node in ast.walk(ast.parse(path.read_text())):
            roots = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            roots += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for root in roots:
                name = root.partition(".")[0]
                assert name in sys.stdlib_module_names or name in allowed, f"{path.name} imports {root}"


@pytest.mark.parametrize("room", NO_TORCH)
def test_light_rooms_do_not_import_torch(room):
    modules = [f"mmfsdp.{room}"] + [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in files(room)
        if room in ("kit.hangs", "kit.run", "kit.widgets")
    ]
    code = "import sys, importlib\n"
    code += f"for name in {[m for m in modules if not m.endswith('__')]}: importlib.import_module(name)\n"
    code += "print([m for m in ('torch', 'transformers', 'open_clip') if m in sys.modules])"
    assert in_fresh_python(code).strip() == "[]"
