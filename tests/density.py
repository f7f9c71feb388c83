"""Count lines of code and what makes them dense: `python -m tests.density` prints a row for each room of the package.

Lines of code leave out blank lines, comments and docstrings. The other columns count, per 100 lines of code, what makes
a reader stop (comprehensions, comprehensions inside others, conditional expressions) and what helps (comments).
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Density:
    """Counts of one file, or of several added up."""

    files: int = 0
    code: int = 0
    comments: int = 0
    comprehensions: int = 0
    nested: int = 0
    conditionals: int = 0

    def add(self, other: Density) -> None:
        """Add another file's counts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def per_100(self, count: int) -> float:
        """Return a count per 100 lines of code."""
        return 100 * count / max(1, self.code)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the line numbers of all docstrings, those under fields included."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def measure(path: Path) -> Density:
    """Count one Python file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = docstring_lines(tree)
    density = Density(files=1)
    for number, line in enumerate(source.splitlines(), 1):
        if number not in docstrings and line.strip() and not line.strip().startswith("#"):
            density.code += 1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type: ignore")):
            density.comments += 1
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            density.conditionals += 1
        elif isinstance(node, COMPREHENSIONS):
            density.comprehensions += 1
            inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
            if len(inner) > 1 or len(node.generators) > 1:
                density.nested += 1
    return density


def measure_all(*folders: Path) -> Density:
    """Count all Python files of some folders."""
    total = Density()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            total.add(measure(path))
    return total


def table() -> str:
    """Return a Markdown table: a row for each room, and one for the whole package."""
    package = ROOT / "mmfsdp"
    inits = [*package.glob("*/__init__.py"), *package.glob("kit/*/__init__.py")]
    rooms = sorted(init.parent for init in inits)
    lines = ["| | files | lines of code | comprehensions | nested | conditional expressions | comments |"]
    lines.append("|---|---|---|---|---|---|---|")
    for folder in [*rooms, package]:
        d = measure_all(folder)
        figures = [f"{d.per_100(n):.1f}" for n in (d.comprehensions, d.nested, d.conditionals, d.comments)]
        lines.append(f"| `{folder.relative_to(ROOT)}/` | {d.files} | {d.code:,} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
