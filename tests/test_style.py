"""Limits on the size of files and of functions; docstrings; direct dependencies with their reasons."""

import ast
import re
from pathlib import Path

from tests.density import docstring_lines, measure

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


PACKAGE = ROOT / "mmfsdp"
FILE_LINES, FUNCTION_LINES = 300, 50
"""Limits on lines of code. A folder has none: nothing moves out of the core because of a number."""
LONG_FUNCTIONS: dict[str, str] = {}
"""File and function -> why it is not in parts."""


def test_no_file_is_long():
    lengths = {path.relative_to(ROOT).as_posix(): measure(path).code for path in PACKAGE.rglob("*.py")}
    assert not {name: lines for name, lines in lengths.items() if lines > FILE_LINES}


def test_no_function_is_long_without_a_reason():
    long = set()
    for name, text in FILES.items():
        tree = ast.parse(text)
        docstrings = docstring_lines(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                numbered = enumerate(lines, node.lineno)
                code = [line for n, line in numbered if n not in docstrings and line.strip(" )]}")]
                if len([line for line in code if not line.lstrip().startswith("#")]) > FUNCTION_LINES:
                    long.add(f"{name}: {node.name}")
    assert long == set(LONG_FUNCTIONS)


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Those of files, classes, functions and fields: each text that stands as a statement."""
    questions = ("What", "How", "Where", "Whether", "Which", "Who", "When", "Why")
    for name, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                first = str(node.value.value).partition(" ")[0]
                assert first not in questions, f"{name}, line {node.lineno}: begins with {first}"


def test_what_is_public_says_what_it_does():
    found = [pair for name, text in FILES.items() for pair in public(ast.parse(text), name)]
    assert not [name for name, node in found if not ast.get_docstring(node)]


def test_each_direct_dependency_has_its_reason():
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    lines = block[1].splitlines()
    assert not [line for line in lines if not re.fullmatch(r'    "[\w>=<!,.-]+", +# \S.{10,}', line)]
