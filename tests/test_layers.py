"""Which room may import which, and what must not be imported early. To see it: python -m tests.test_layers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mmfsdp"

MAY_IMPORT = {
    "places": set(),
    "loading": set(),
    "params": set(),
    "runs": {"places"},
    "freeze": {"params"},
    "data": {"params"},
    "models": {"params"},
    "build": {"places", "params", "data", "models"},
    "pretrain": {"params", "data", "models", "build"},
    "plan": {"params"},
    "estimate": {"params", "plan"},
    "wrap": {"params", "plan"},
    "measure": {"wrap"},
    "checkpoint": {"params", "wrap", "runs"},
    "step": {"params", "data"},
    "preview": {"params", "build", "freeze", "plan", "estimate"},
    "evaluate": {"params", "data", "models", "build", "freeze", "checkpoint", "runs"},
    "export": {"params", "data", "models", "build", "evaluate"},
    "train": {
        "loading",
        "params",
        "runs",
        "freeze",
        "data",
        "models",
        "build",
        "plan",
        "estimate",
        "wrap",
        "measure",
        "checkpoint",
        "step",
        "preview",
    },
    "watch": {"runs"},
    "launch": {"places", "loading", "params", "runs", "watch"},
    "plots": {"plan"},
    "report": {"params", "plan", "runs", "watch", "plots"},
}
ABOVE_ALL = {"widgets", "cli", "bench"}
LATE = {
    ("launch", "preview"),
    ("plan", "estimate"),
    ("step", "plan"),
    ("train", "pretrain"),
    ("evaluate", "train"),
    ("models", "wrap"),
    ("models", "export"),
}
"""Inside a function only: the jobs, and two methods: Flamingo.wrap_fsdp as in OpenFlamingo, from_pretrained."""


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).parts[0]
        found.setdefault(first.removesuffix(".py"), []).append(path)
    return found


def imports_of(path: Path) -> set[tuple[str, bool]]:
    """(room, inside a function) for each import of ours in a file."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(outer)
    }
    here = ("mmfsdp", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(tree):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            names = [base] if len(base) > 1 else [(*base, alias.name) for alias in node.names]
        found |= {(n[1], id(node) in late) for n in names if n[0] == "mmfsdp" and len(n) > 1}
    return found


def uses(room: str) -> tuple[set[str], set[str]]:
    """The other rooms that a room imports: early, and inside a function only."""
    found = {pair for path in rooms()[room] for pair in imports_of(path) if pair[0] != room}
    now = {other for other, late in found if not late}
    return now, {other for other, _ in found} - now


def from_below() -> list[str]:
    """The table's rooms, each after all that it may import."""
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        ready = [room for room, needs in MAY_IMPORT.items() if room not in done and needs <= {*done}]
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - {*done})}"
        done += ready
    return done


def test_every_room_is_in_the_table():
    assert set(rooms()) - {"__init__", "__main__"} <= set(MAY_IMPORT) | ABOVE_ALL


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_the_table_allows(room):
    for path in rooms().get(room, []):
        for other, late in imports_of(path):
            allowed = other == room or other in MAY_IMPORT[room] or (late and (room, other) in LATE)
            assert allowed, f"{path.relative_to(PACKAGE)} imports {other}; {room} may import {sorted(MAY_IMPORT[room])}"


def test_the_table_allows_nothing_that_is_not_used():
    for room in MAY_IMPORT:
        now, late = uses(room)
        assert now >= MAY_IMPORT[room], f"{room} imports no {sorted(MAY_IMPORT[room] - now)}; take that off the table"
        assert late >= {other for one, other in LATE if one == room}, f"{room} imports less of LATE: {late}"


def test_the_table_has_no_cycle():
    assert sorted(from_below()) == sorted(MAY_IMPORT)


@pytest.mark.parametrize("room", ["params", "runs", "watch", "launch", "plots", "report", "widgets", "cli"])
def test_light_rooms_do_not_import_torch(room):
    heavy = ("torch", "transformers", "open_clip")
    code = f"import mmfsdp.{room}, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


if __name__ == "__main__":
    for name in [*from_below(), *sorted(ABOVE_ALL)]:
        early, inside = ("  ".join(sorted(found)) for found in uses(name))
        print(f"{name:11} <-  {early}" + f"    (late: {inside})" * bool(inside))
