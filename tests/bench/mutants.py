"""`python -m tests.bench.mutants --number 100`: change single lines of the core and the estimate; does a test fail?

A changed program is called a mutant, and one that no test fails for a survivor. One process imports the package and
collects the fast tests. For each mutant, a fork of it puts the changed function in place of the other and runs the
tests that call it, the fastest first, so most mutants take a second. What is outside of functions (constants,
defaults) is not changed. `--real` runs survivors against real tests, too, in a copy of the repository: that takes
minutes for each. `--again OUT` tries the survivors of an earlier run, such as against all fast tests (`--tests tests`).
Survivors in tests/files/equal_mutants.yaml are not tried: they have the same effect, and the file says why.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("mmfsdp/core", "mmfsdp/backends", "mmfsdp/quantized", "mmfsdp/lint", "mmfsdp/predict")
EQUAL = "tests/files/equal_mutants.yaml"
CPU_LIMIT_S = 300
"""Processor time of one mutant's tests: a change may make a loop that never ends."""

FAST_TESTS = [
    "tests/core/test_plan.py",
    "tests/core/test_lint.py",
    "tests/core/test_model_record.py",
    "tests/core/test_token_loss.py",
    "tests/predict/test_estimate.py",
    "tests/predict/test_gathers.py",
    "tests/predict/test_plan_loss.py",
    "tests/core/test_fake_ranks.py",
    "tests/core/test_freeze.py",
    "tests/models/test_loading.py",
    "tests/train/test_measure.py",
    "tests/core/test_options.py",
    "tests/core/test_quantize.py",
    "tests/core/test_scaler.py",
    "tests/core/test_several_sources.py",
    "tests/core/test_step.py",
    "--deselect=tests/predict/test_vlms.py",
    "--deselect=tests/core/test_plan.py::test_every_presets_plan_fits_the_page_and_tells_what_is_gathered_ahead",
    "--deselect=tests/predict/test_estimate.py::test_the_chapter_on_scaling_shows_what_its_code_prints",
]
"""The fast tests that concern these rooms; without 50 model families and the large presets, which take a minute."""

REAL_TESTS = {
    "mmfsdp/core/collectives.py": ["tests/checkpoint/test_checkpoint.py", "tests/core/test_own_loop.py"],
    "mmfsdp/core/before_step.py": ["tests/core/test_scaler.py", "tests/core/test_own_loop.py"],
    "mmfsdp/core/checksums.py": ["tests/models/test_loading.py"],
    "mmfsdp/core/freeze.py": ["tests/core/test_wrap.py"],
    "mmfsdp/core/even_batches.py": ["tests/core/test_several_optimizers.py"],
    "mmfsdp/core/several_optimizers.py": ["tests/core/test_several_optimizers.py"],
    "mmfsdp/core/fsdp2.py": ["tests/core/test_wrap.py", "tests/core/test_reshard.py"],
    "mmfsdp/core/gradient_sync.py": ["tests/core/test_random_trees.py", "tests/core/test_own_loop.py"],
    "mmfsdp/core/group.py": ["tests/core/test_random_trees.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/inference.py": ["tests/core/test_own_loop.py", "tests/core/test_wrap.py"],
    "mmfsdp/quantized/int8.py": ["tests/core/test_quantize.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/guards.py": ["tests/core/test_wrap.py", "tests/core/test_random_trees.py"],
    "mmfsdp/core/unit_rules.py": ["tests/predict/test_predicted_equals_measured.py"],
    "mmfsdp/core/micro_batch.py": ["tests/core/test_several_sources.py", "tests/core/test_own_loop.py"],
    "mmfsdp/core/model_record.py": ["tests/core/test_own_loop.py"],
    "mmfsdp/core/names.py": ["tests/core/test_wrap.py"],
    "mmfsdp/quantized/nf4.py": ["tests/core/test_quantize.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/optimizer_states.py": ["tests/core/test_wrap.py", "tests/train/test_optimizers.py"],
    "mmfsdp/quantized/nf4_kernel.py": ["tests/core/test_quantize.py"],
    "mmfsdp/core/parameters.py": ["tests/core/test_parameters.py"],
    "mmfsdp/core/plan.py": ["tests/core/test_random_trees.py", "tests/train/test_measure.py"],
    "mmfsdp/core/planner.py": ["tests/core/test_random_trees.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/fake_tensors.py": ["tests/core/test_random_trees.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/precision.py": ["tests/train/test_own_model.py"],
    "mmfsdp/core/quantize.py": ["tests/core/test_wrap.py"],
    "mmfsdp/core/recompute.py": ["tests/core/test_recompute.py", "tests/predict/test_predicted_equals_measured.py"],
    "mmfsdp/core/reshard.py": ["tests/core/test_own_loop.py"],
    "mmfsdp/core/same_parts.py": ["tests/core/test_same_parts.py"],
    "mmfsdp/core/shared_files.py": ["tests/models/test_loading.py"],
    "mmfsdp/core/step.py": [
        "tests/core/test_several_sources.py",
        "tests/core/test_scaler.py",
        "tests/core/test_own_loop.py",
    ],
    "mmfsdp/core/step_batch.py": ["tests/core/test_several_sources.py", "tests/models/test_loss_in_head.py"],
    "mmfsdp/core/token_loss.py": ["tests/models/test_loss_in_head.py"],
    "mmfsdp/core/trace.py": ["tests/core/test_random_trees.py", "tests/core/test_wrap.py"],
    "mmfsdp/core/units.py": ["tests/core/test_random_trees.py", "tests/predict/test_predicted_equals_measured.py"],
    "mmfsdp/core/weights.py": ["tests/core/test_wrap.py", "tests/models/test_loading.py"],
    "mmfsdp/core/written_state.py": ["tests/core/test_written_state.py"],
    "mmfsdp/core/wrap.py": ["tests/core/test_wrap.py", "tests/models/test_wrap_fsdp.py"],
    "mmfsdp/backends": ["tests/core/test_wrap.py", "tests/predict/test_predicted_equals_measured.py"],
    "mmfsdp/lint": ["tests/core/test_random_trees.py"],
    "mmfsdp/predict": ["tests/predict/test_predicted_equals_measured.py", "tests/train/test_measure.py"],
}
"""Real tests of a file, or of all files of a folder."""
COMPILED = "mmfsdp/quantized/nf4_kernel.py"
"""triton compiles this file from its source, so its mutants are tried in a copy of the repository only."""


# ---- mutants ----


@dataclass(frozen=True)
class Mutant:
    """One line of a file, changed between two columns; and the function or method that it is in."""

    file: str
    line: int
    start: int
    end: int
    text: str
    function: str

    def apply(self, source: str) -> str:
        """Return the changed source."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()  # the columns of `ast` count bytes
        lines[self.line - 1] = (line[: self.start] + self.text.encode() + line[self.end :]).decode()
        return "".join(lines)

    def lines(self, source: str) -> tuple[str, str]:
        """Return the line before and after the change, without its indentation."""
        return source.splitlines()[self.line - 1].strip(), self.apply(source).splitlines()[self.line - 1].strip()


OPERATORS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "sorted": "list"}


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a file."""
    tree = ast.parse(source)
    functions: dict[ast.AST, str] = {}
    classes: list[ast.Module | ast.ClassDef] = [tree]
    while classes:
        for node in classes.pop().body:
            if isinstance(node, ast.ClassDef):
                classes.append(node)
            elif isinstance(node, ast.FunctionDef):
                functions |= dict.fromkeys(ast.walk(node), node.name)  # with the functions inside it
    mutants = []
    for node in _executed(tree):
        for line, start, end, text in _changes(node, source):
            if node in functions:
                mutants.append(Mutant(file, line, start, end, text, functions[node]))
    return sorted(mutants, key=lambda m: (m.line, m.start, m.end, m.text))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something: no annotations, decorators, defaults, imports and messages."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
                yield child
                yield from _executed(child)


def _changes(node: ast.AST, source: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield (line, first column, last column, new text) for each way to change a node within one line."""

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[tuple[int, int, int, str]]:
        if left.end_lineno == right.lineno and type(operator) in OPERATORS:
            line = source.splitlines()[right.lineno - 1].encode()
            gap = line[left.end_col_offset : right.col_offset].decode()  # the operator, and parentheses around it
            yield right.lineno, left.end_col_offset, right.col_offset, gap.replace(*OPERATORS[type(operator)], 1)

    def whole(inner: ast.AST, text: str) -> Iterator[tuple[int, int, int, str]]:
        if inner.lineno == inner.end_lineno:
            yield inner.lineno, inner.col_offset, inner.end_col_offset, text

    if isinstance(node, ast.Compare):
        yield from between(node.left, node.comparators[0], node.ops[0])
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from between(left, right, node.op)
    elif isinstance(node, ast.BinOp):
        yield from between(node.left, node.right, node.op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from whole(node, ast.get_source_segment(source, node.operand) or "")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield from whole(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from whole(node, str(node.value + 1))
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield from whole(node, NAMES[node.id])
    elif isinstance(node, ast.AugAssign):
        yield from whole(node, "pass")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from whole(node, "pass")
    elif isinstance(node, (ast.Continue, ast.Break)):
        yield from whole(node, "pass")
    elif isinstance(node, (ast.If, ast.IfExp)):
        for value in ("True", "False"):
            yield from whole(node.test, value)


def draw(mutants: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """Return so many of the mutants, no two on one line, and at least two of each file."""
    random.Random(seed).shuffle(mutants)
    lines: dict[tuple[str, int], Mutant] = {}
    for mutant in mutants:
        lines.setdefault((mutant.file, mutant.line), mutant)
    first: list[Mutant] = []
    others: list[Mutant] = []
    taken: dict[str, int] = defaultdict(int)
    for mutant in lines.values():
        taken[mutant.file] += 1
        (first if taken[mutant.file] <= 2 else others).append(mutant)
    return sorted((first + others)[:number], key=lambda m: (m.file, m.line))


# ---- which tests call which function ----


def noting_calls(file: str, source: str) -> str:
    """Return a source in which each function notes its call in a set, which all such files share."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            after_docstring = 1 if ast.get_docstring(node) is not None else 0
            node.body[after_docstring:after_docstring] = ast.parse(f"_called.add({f'{file}:{node.name}'!r})").body
    after_future = 0
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            after_future = index + 1
    first = ast.parse("import builtins\n_called = vars(builtins).setdefault('_called', set())")
    tree.body[after_future:after_future] = first.body
    return ast.unparse(ast.fix_missing_locations(tree))


class Mutants:
    """A plugin of pytest that tries mutants in place of running the collected tests once.

    out: the file that has the rows of all mutants tried so far, as JSON.
    """

    def __init__(self, mutants: list[Mutant], copy: Path, out: Path, *, real: bool) -> None:
        self.mutants, self.copy, self.out, self.real = mutants, copy, out, real
        self.equal = equal_mutants()
        self.rows: list[dict[str, Any]] = []
        self.calls: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember the test that failed, and how long each took."""
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run all tests once to see what they call, then try each mutant."""
        found = in_child(lambda: self._look(session.items), limit_s=3600)
        if found is None:
            raise RuntimeError("the tests crash without any change")
        for test in found["failed"]:
            print(f"left out, since it fails without any change: {test}")
        self.calls = {test: set(names) for test, names in found["calls"].items() if test not in found["failed"]}
        self.seconds = found["seconds"]
        for mutant in self.mutants:
            start = time.monotonic()
            before, after = mutant.lines((ROOT / mutant.file).read_text())
            reason = self.equal.get((mutant.file, before, after))
            end = f"equal: {reason}" if reason else self._try(mutant, session.items)
            self.rows.append({"file": mutant.file, "number": mutant.line, "line": before, "changed": after, "end": end})
            print(f"{mutant.file}:{mutant.line} ({time.monotonic() - start:.0f} s)\n  - {before}\n  + {after}\n  {end}")
            sys.stdout.flush()
            self.out.write_text(json.dumps(self.rows, indent=1))
        return True

    def _look(self, items: list[Any]) -> dict[str, Any]:
        called = vars(builtins)["_called"]
        calls = {}
        failed = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            called.clear()
            self.failed = ""
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            calls[item.nodeid] = sorted(called)
            if self.failed:
                failed.append(item.nodeid)
        return {"calls": calls, "seconds": self.seconds, "failed": failed}

    def _try(self, mutant: Mutant, items: list[Any]) -> str:
        """Return what became of a mutant: the first test that failed, or 'survived'."""
        calling = [item for item in items if f"{mutant.file}:{mutant.function}" in self.calls.get(item.nodeid, ())]
        calling.sort(key=lambda item: self.seconds.get(item.nodeid, 0))

        if mutant.file == COMPILED:
            return first_failure_in_copy(mutant, self.copy, "not extended") or "survived the tests in a copy"
        replacements = list(changed_functions(mutant))

        def run() -> str:
            self.failed = ""
            for function, code in replacements:
                function.__code__ = code
            for item in calling:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if self.failed:
                    break
            return self.failed

        end = in_child(run, limit_s=CPU_LIMIT_S)
        if end is None:
            return "its tests ended by a crash or after their time"
        if end:
            return str(end)
        if self.real and (end := first_failure_in_copy(mutant, self.copy, "real and not extended")):
            return end
        return f"survived {len(calling)} fast tests"


def in_child(work: Callable[[], Any], *, limit_s: int) -> Any:
    """Return what `work()` returns in a fork of this process; None if the fork is killed or runs for too long."""
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
                signal.alarm(3 * limit_s)  # of time: a change may make a wait that never ends
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                Path(file.name).write_text(json.dumps(work()))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        text = Path(file.name).read_text()
        return json.loads(text) if text else None


def changed_functions(mutant: Mutant) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """Yield the imported functions of a mutant's name with the code of the changed file.

    Raises LookupError if there is none.
    """
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    codes = dict(_codes(compile(mutant.apply((ROOT / mutant.file).read_text()), str(module.__file__), "exec")))
    functions = [f for f in _functions(vars(module).values(), module.__name__) if f.__name__ == mutant.function]
    functions = [f for f in functions if f.__qualname__ in codes]  # a dataclass has methods that stand in no file
    if not functions:
        raise LookupError(f"{mutant.file}: no function {mutant.function}")
    for function in functions:
        yield function, codes[function.__qualname__]


def _codes(code: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Yield (qualified name, code) of the functions in a module's or a class's code."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield prefix + inner.co_name, inner
            if not inner.co_flags & inspect.CO_NEWLOCALS:  # a class
                yield from _codes(inner, f"{prefix}{inner.co_name}.")


def _functions(values: Iterable[Any], module: str) -> Iterator[types.FunctionType]:
    """Yield the module's functions among these values: those in its classes, and those that decorators wrap."""
    for value in list(values):
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value).values(), module)
            continue
        for attribute in ("fget", "__func__", "func"):  # of properties, of static and class methods, of cached ones
            value = getattr(value, attribute, value)
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, types.FunctionType) and function.__module__ == module:
            yield function


def first_failure_in_copy(mutant: Mutant, copy: Path, marks: str) -> str:
    """Run tests of a mutant's file, from REAL_TESTS and with these marks, in a copy of the repository.

    Returns the first that fails, or ''.
    """
    if not copy.exists():
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "node_modules", ".mypy_cache")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    source = (copy / mutant.file).read_text()
    (copy / mutant.file).write_text(mutant.apply(source))
    try:
        files = REAL_TESTS.get(mutant.file) or REAL_TESTS[mutant.file.rpartition("/")[0]]
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", marks, *files]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        (copy / mutant.file).write_text(source)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return "fails" if done.returncode else ""


class NotingLoader(importlib.machinery.SourceFileLoader):
    """Loads a file so that each of its functions notes its calls."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the noting source; nothing is cached."""
        path = self.get_filename(fullname)
        file = Path(path).resolve().relative_to(ROOT).as_posix()
        return compile(noting_calls(file, Path(path).read_text()), path, "exec")


class NotingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of ROOMS for NotingLoader."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for a module of ROOMS, None for others and for COMPILED."""
        file = ROOT / (fullname.replace(".", "/") + ".py")
        if file.parent not in {ROOT / room for room in ROOMS} or not file.exists():
            return None
        if file == ROOT / COMPILED:
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=NotingLoader(fullname, str(file)))


def equal_mutants() -> dict[tuple[str, str, str], str]:
    """Return why the mutants that are known to have the same effect do, by (file, line, changed line)."""
    rows = yaml.safe_load((ROOT / EQUAL).read_text(encoding="utf-8"))
    return {(row["file"], row["line"], row["changed"]): row["why"] for row in rows}


def all_mutants(file: str = "") -> list[Mutant]:
    """Return the mutants of all files of ROOMS, or of those with this in their path."""
    mutants = []
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if file in name:
                mutants += mutants_of(name, path.read_text())
    return mutants


def main() -> None:
    """Draw mutants, try each, print and write what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="of this file only, such as core/group.py")
    parser.add_argument("--again", type=Path, metavar="OUT", help="the survivors in this file, in place of a draw")
    parser.add_argument("--real", action="store_true", help="run survivors against real tests, too")
    parser.add_argument("--tests", nargs="+", default=FAST_TESTS, help="files of fast tests")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()

    mutants = all_mutants(options.file)
    if options.again:
        rows = json.loads(options.again.read_text())
        survivors = {(row["file"], row["line"], row["changed"]) for row in rows if row["end"].startswith("survived")}
        mutants = [m for m in mutants if (m.file, *m.lines((ROOT / m.file).read_text())) in survivors]
    else:
        mutants = draw(mutants, options.number, options.seed)

    sys.meta_path.insert(0, NotingFinder())
    with tempfile.TemporaryDirectory() as folder:
        plugin = Mutants(mutants, Path(folder) / "copy", options.out, real=options.real)
        arguments = ["-q", "-m", "not real", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
        status = pytest.main([*arguments, *options.tests], plugins=[plugin])
    ends = [row["end"].partition(" ")[0] for row in plugin.rows]
    equal, survivors = ends.count("equal:"), ends.count("survived")
    print(f"{len(ends)} of {len(mutants)} mutants: {equal} are equal, {survivors} survive (pytest: {int(status)})")


if __name__ == "__main__":
    main()
