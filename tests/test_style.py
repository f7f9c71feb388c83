"""Sizes and densities of the code, docstrings, and direct dependencies with reasons: README states the figures."""

import ast
import re
from pathlib import Path

from tests.density import Density, measure, measure_all

ROOT = Path(__file__).resolve().parent.parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "mmfsdp").rglob("*.py"))}


def public(node: ast.AST, where: str):
    """(name, node) of classes and functions that others may call, methods too."""
    for inner in getattr(node, "body", ()):
        if (
            isinstance(inner, (ast.ClassDef, ast.FunctionDef))
            and not inner.name.startswith("_")
            and not _is_setter(inner)
        ):
            yield f"{where}: {inner.name}", inner
            if isinstance(inner, ast.ClassDef):
                yield from public(inner, f"{where}: {inner.name}")


def _is_setter(node: ast.AST) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


CORE, PACKAGE = ROOT / "mmfsdp/core", ROOT / "mmfsdp"
SMALL_PACKAGE = [PACKAGE / room for room in ("params", "core", "estimate", "checkpoint")]


# A limit is met by leaving something out, never by squeezing lines: see the densities below.
CORE_LINES, CORE_FILES = 2_300, 17
SMALL_PACKAGE_LINES = 4_200
PACKAGE_LINES, PACKAGE_FILES = 12_500, 125


def test_the_package_is_small():
    core, small, package = measure_all(CORE), measure_all(*SMALL_PACKAGE), measure_all(PACKAGE)
    assert core.code <= CORE_LINES and core.files <= CORE_FILES
    assert small.code <= SMALL_PACKAGE_LINES
    assert package.code <= PACKAGE_LINES and package.files <= PACKAGE_FILES
    assert measure_all(ROOT / "tests").code <= 0.9 * package.code
    for path in CORE.glob("*.py"):
        assert measure(path).code <= 250, path.name


def test_the_code_is_plain():
    core = measure_all(CORE)
    assert core.per_100(core.comprehensions) <= 4
    assert core.nested == 0
    assert core.per_100(core.conditionals) <= 2
    assert core.per_100(core.comments) >= 8
    rest = Density()
    for path in PACKAGE.rglob("*.py"):
        if path.parent != CORE:
            rest.add(measure(path))
    assert rest.per_100(rest.comprehensions) <= 3.7
    assert rest.per_100(rest.nested) <= 0.1


def test_no_two_files_share_a_name():
    """But for __init__.py, slurm.py, __main__.py, and a widget named after the room that it shows."""
    allowed = {"__init__.py", "__main__.py", "slurm.py"}
    homes: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name not in allowed and not (path.parent.name == "widgets" and (PACKAGE / path.stem).is_dir()):
            homes.setdefault(path.name, []).append(path.parent.name)
    assert not {name: rooms for name, rooms in homes.items() if len(rooms) > 1}


def test_docstrings_begin_with_a_verb():
    questions = ("What", "How", "Where", "Whether", "Which", "Who")
    for name, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                assert first not in questions, f"{name}: {getattr(node, 'name', 'the file')} begins with {first}"


def test_what_is_public_says_what_it_does():
    found = [pair for name, text in FILES.items() for pair in public(ast.parse(text), name)]
    assert not [name for name, node in found if not ast.get_docstring(node)]


def test_direct_dependencies_are_few_and_each_has_its_reason():
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    lines = block[1].splitlines()
    assert len(lines) <= 12
    assert not [line for line in lines if not re.fullmatch(r'    "[\w>=<!,.-]+", +# \S.{10,}', line)]
