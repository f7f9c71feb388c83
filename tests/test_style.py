"""What style asks of every file, as far as it can be counted: sizes, docstrings, direct dependencies with reasons."""

import ast
import re
from pathlib import Path
from statistics import median

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


def test_files_are_small():
    lines = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert not {name: n for name, n in lines.items() if n > 400}
    assert median(lines.values()) < 200


def test_what_is_public_says_what_it_does():
    found = [pair for name, text in FILES.items() for pair in public(ast.parse(text), name)]
    assert not [name for name, node in found if not ast.get_docstring(node)]


def test_direct_dependencies_are_few_and_each_has_its_reason():
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    lines = block[1].splitlines()
    assert len(lines) <= 12
    assert not [line for line in lines if not re.fullmatch(r'    "[\w>=.-]+", +# \S.{10,}', line)]
