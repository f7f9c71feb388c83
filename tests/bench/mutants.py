"""`python -m tests.bench.mutants --number 100`: change single lines of the core and the estimate; does a test fail?

A changed program is called a mutant, and one that no test fails for a survivor. One process imports the package and
collects the tests of the changed folders (`covering_tests`). They run once unchanged; each function notes its calls.
For each mutant, a fork of the process puts the changed function in place of the other and runs the tests that call it,
the fastest first, so most mutants take a second. What is outside of functions (constants, defaults) is not changed.

Survivors of the fast tests are tried with `--real` against the real tests, too, and with `--extended` against those
that only `make test-all` has: what only these kill is a hole in `make test`. Ranks of `on_ranks` are forks here, so
they run the changed function; what starts in another way (runs, kernels, jobs of Slurm) runs the unchanged one.
`--again OUT` tries the survivors of an earlier run, such as against all tests (`--tests tests`).
Survivors in tests/files/equal_mutants.yaml are not tried: they have the same effect, and the file says why.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("mmfsdp/core", "mmfsdp/backends", "mmfsdp/quantized", "mmfsdp/lint", "mmfsdp/predict")
EQUAL = "tests/files/equal_mutants.yaml"
LIMIT_S = 300
"""Processor time of one mutant's tests of one stage: a change may make a loop that never ends."""
STAGES = {"fast": "not real and not extended", "real": "real and not extended", "extended": "extended"}
"""What a mutant is tried against, in this order, and the marks of these tests."""

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

    stages: those of STAGES that are tried, each only with the survivors of the one before.
    out: the file that has the rows of all mutants, as JSON.
    """

    def __init__(self, mutants: list[Mutant], folder: Path, out: Path, *, stages: list[str], limit_s: int) -> None:
        self.mutants, self.folder, self.out = mutants, folder, out
        self.stages, self.limit_s = stages, limit_s
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
        """Try each mutant against each stage's tests, which run once before to see what they call."""
        fork_ranks(self.folder)
        all_items = list(session.items)
        for mutant in self.mutants:
            before, after = mutant.lines((ROOT / mutant.file).read_text())
            reason = self.equal.get((mutant.file, before, after))
            end = f"equal: {reason}" if reason else "survived:"
            self.rows.append({"file": mutant.file, "number": mutant.line, "line": before, "changed": after, "end": end})
        for stage in self.stages:
            session.items = [item for item in all_items if stage_of(item) == stage]  # fixtures ask which are selected
            survivors = [(m, row) for m, row in zip(self.mutants, self.rows, strict=True) if survived(row)]
            if survivors and session.items:
                self._look(session.items)
                for mutant, row in survivors:
                    self._try_stage(mutant, row, stage, session.items)
        return True

    def _look(self, items: list[Any]) -> None:
        """Run all tests once, without a change, to see what each calls and how long it takes."""
        found = in_child(lambda: self._calls_of(items), limit_s=3600)
        for test in found["failed"]:
            print(f"left out, since it fails without any change: {test}")
        self.calls = {test: set(names) for test, names in found["calls"].items() if test not in found["failed"]}
        self.seconds = found["seconds"]

    def _calls_of(self, items: list[Any]) -> dict[str, Any]:
        called = vars(builtins).setdefault("_called", set())
        calls = {}
        failed = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            called.clear()
            self.failed = ""
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            calls[item.nodeid] = sorted(called | calls_of_ranks(self.folder))
            if self.failed:
                failed.append(item.nodeid)
        # A fixture of a file is set up in the first test that uses it, and all that use it see the result.
        for item in items:
            shared = calls_in_fixtures(item, items, calls)
            calls[item.nodeid] = sorted({*calls[item.nodeid], *shared})
        return {"calls": calls, "seconds": self.seconds, "failed": failed}

    def _try_stage(self, mutant: Mutant, row: dict[str, Any], stage: str, items: list[Any]) -> None:
        start = time.monotonic()
        end = self._try(mutant, stage, items)
        row["end"] = f"{row['end']} {end}" if end[0].isdigit() else f"{stage}: {end}"
        took = f"{mutant.file}:{mutant.line} ({time.monotonic() - start:.0f} s)"
        print(f"{took}\n  - {row['line']}\n  + {row['changed']}\n  {row['end']}")
        sys.stdout.flush()
        self.out.write_text(json.dumps(self.rows, indent=1))

    def _try(self, mutant: Mutant, stage: str, items: list[Any]) -> str:
        """Return the first test that failed, or how many were tried."""
        if mutant.file == COMPILED:
            return (
                first_failure_in_copy(mutant, self.folder / "copy", STAGES[stage])
                or f"0 {stage} tests here, and all in a copy"
            )
        calling = [item for item in items if f"{mutant.file}:{mutant.function}" in self.calls.get(item.nodeid, ())]
        if stage == "fast":
            calling.sort(key=lambda item: self.seconds.get(item.nodeid, 0))
        else:  # tests of one file share a start of ranks: file by file
            seconds: dict[Path, float] = defaultdict(float)
            for item in calling:
                seconds[item.path] += self.seconds.get(item.nodeid, 0)
            calling.sort(key=lambda item: (seconds[item.path], str(item.path)))
        replacements = list(changed_functions(mutant))
        if not calling:
            return f"0 of 0 {stage} tests"

        def run() -> dict[str, Any]:
            self.failed = ""
            tried = 0
            calling[0].session.items = calling
            for function, code in replacements:
                function.__code__ = code
            for item, following in zip(calling, [*calling[1:], None], strict=True):
                if sum(os.times()[:4]) > self.limit_s:
                    break
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                tried += 1
                if self.failed:
                    break
            return {"failed": self.failed, "tried": tried}

        try:
            end = in_child(run, limit_s=self.limit_s)
        except KilledError as killed:
            if killed.number == signal.SIGALRM:  # perhaps the machine is busy: no test has failed
                return f"0 of {len(calling)} {stage} tests ended within {3 * self.limit_s} s"
            return f"its tests ended by {killed.number.name}"
        return end["failed"] or f"{end['tried']} of {len(calling)} {stage} tests"


def survived(row: dict[str, Any]) -> bool:
    """Return whether no test has failed for a mutant yet."""
    return row["end"].startswith("survived")


def stage_of(item: Any) -> str:
    """Return the stage of STAGES that a collected test belongs to."""
    if item.get_closest_marker("extended"):
        return "extended"
    return "real" if item.get_closest_marker("real") else "fast"


def calls_in_fixtures(item: Any, items: list[Any], calls: dict[str, Any]) -> set[str]:
    """Return what the tests call that set up the shared fixtures of this one: the first of its file that use them."""
    shared = set()
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if definitions[-1].scope == "module":
            first = next(other for other in items if other.path == item.path and name in other.fixturenames)
            shared |= set(calls[first.nodeid])
    return shared


class KilledError(RuntimeError):
    """A fork of this process has ended by a signal, of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = signal.Signals(number)


def in_child(work: Callable[[], Any], *, limit_s: int) -> Any:
    """Return what `work()` returns in a fork of this process.

    Ranks that the fork has forked end with it.

    Args:
        work: The function; returns plain data.
        limit_s: Its processor time; of time on the clock it has three times as many, since a change may make a wait
            that never ends.

    Raises:
        KilledError: The fork has ended by a signal: SIGXCPU and SIGALRM after these times.
        RuntimeError: `work` has raised an exception.
    """
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s + 10, limit_s + 15))  # by SIGXCPU, then SIGKILL
                signal.alarm(3 * limit_s)
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                Path(file.name).write_text(json.dumps({"result": work()}))
            except BaseException:  # of this tool: pytest has noted those of tests
                Path(file.name).write_text(json.dumps({"error": traceback.format_exc()}))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        text = Path(file.name).read_text()
    if os.WIFSIGNALED(status):
        raise KilledError(os.WTERMSIG(status))
    end = json.loads(text or '{"error": "a fork has ended without a result"}')
    if "error" in end:
        raise RuntimeError(end["error"])
    return end["result"]


def fork_ranks(folder: Path) -> None:
    """Have `on_ranks` fork its ranks from this process, so that they run changed functions; they note what they call.

    folder: where their notes are, for `calls_of_ranks`.
    """
    from mmfsdp.kit import spawn_ranks  # only now, when NotingFinder loads what it imports

    start_processes = mp.start_processes

    def start(work: Callable[..., None], *args: Any, **options: Any) -> Any:
        def noting(*values: Any) -> None:
            called = vars(builtins).setdefault("_called", set())
            called.clear()
            try:
                work(*values)
            finally:
                (folder / f"{os.getpid()}.calls").write_text(json.dumps(sorted(called)))

        return start_processes(noting, *args, **options | {"start_method": "fork"})

    mp.start_processes = start
    spawn_ranks.start_fork_server = lambda: None


def calls_of_ranks(folder: Path) -> set[str]:
    """Return what the ranks have called that ended since the last time."""
    calls: set[str] = set()
    for notes in folder.glob("*.calls"):
        calls |= set(json.loads(notes.read_text()))
        notes.unlink()
    return calls


def changed_functions(mutant: Mutant) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """Yield the imported functions of a mutant's name with the code of the changed file.

    Raises LookupError if there is none.
    """
    name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = importlib.import_module(name)
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
    """Run the tests of a mutant's folder, with these marks, in a copy of the repository.

    Returns the first that fails, or ''.
    """
    if not copy.exists():
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "node_modules", ".mypy_cache")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    source = (copy / mutant.file).read_text()
    (copy / mutant.file).write_text(mutant.apply(source))
    try:
        files = covering_tests([mutant.file.rpartition("/")[0]])
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", marks, *files]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        (copy / mutant.file).write_text(source)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1]
    if done.returncode not in (0, 1, 5):  # 5: no test has these marks
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return "fails" if done.returncode == 1 else ""


class NotingLoader(importlib.machinery.SourceFileLoader):
    """Loads a file so that each of its functions notes its calls."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the noting source; nothing is cached."""
        path = self.get_filename(fullname)
        file = Path(path).resolve().relative_to(ROOT).as_posix()
        return compile(noting_calls(file, Path(path).read_text()), path, "exec")


class NotingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of some files for NotingLoader."""

    def __init__(self, files: set[str]) -> None:
        self.files = files - {COMPILED}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for a module of these files, None for others."""
        for file in (fullname.replace(".", "/") + ".py", fullname.replace(".", "/") + "/__init__.py"):
            if file in self.files:
                return importlib.util.spec_from_file_location(
                    fullname, ROOT / file, loader=NotingLoader(fullname, str(ROOT / file))
                )
        return None


def covering_tests(rooms: Iterable[str]) -> list[str]:
    """Return the files of tests that concern some folders of the package, such as mmfsdp/core.

    They stand in a folder of the same name, or import a module of these folders.
    """
    names = {Path(room).name for room in rooms}
    modules = "|".join(re.escape(room.replace("/", ".")) for room in rooms)
    imports = re.compile(rf"^\s*(from|import) ({modules})\b", re.MULTILINE)
    files = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.parent.name in names or imports.search(path.read_text(encoding="utf-8")):
            files.append(path.relative_to(ROOT).as_posix())
    return files


def equal_mutants() -> dict[tuple[str, str, str], str]:
    """Return why the mutants that are known to have the same effect do, by (file, line, changed line)."""
    rows = yaml.safe_load((ROOT / EQUAL).read_text(encoding="utf-8"))
    return {(row["file"], row["line"], row["changed"]): row["why"] for row in rows}


def all_mutants(parts: Sequence[str] = ()) -> list[Mutant]:
    """Return the mutants of all files of ROOMS, or of those of the package with one of these parts in their path."""
    if parts:
        everything = sorted((ROOT / "mmfsdp").rglob("*.py"))
        paths = [path for path in everything if any(part in path.relative_to(ROOT).as_posix() for part in parts)]
    else:
        paths = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
    mutants = []
    for path in paths:
        mutants += mutants_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    return mutants


def main() -> None:
    """Draw mutants, try each, print and write what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", nargs="+", default=[], help="of files with this in their path, such as core/group.py")
    parser.add_argument("--again", type=Path, metavar="OUT", help="the survivors in this file, in place of a draw")
    parser.add_argument("--real", action="store_true", help="try survivors against real tests, too")
    parser.add_argument("--extended", action="store_true", help="and then against tests that make test leaves out")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="processor seconds of a mutant's tests of each kind")
    parser.add_argument("--tests", nargs="+", default=[], help="tests; default: those of the changed folders")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()

    mutants = all_mutants(options.file)
    if options.again:
        rows = json.loads(options.again.read_text())
        survivors = {(row["file"], row["line"], row["changed"]) for row in rows if survived(row)}
        mutants = [m for m in mutants if (m.file, *m.lines((ROOT / m.file).read_text())) in survivors]
    else:
        mutants = draw(mutants, options.number, options.seed)

    stages = ["fast", *["real"] * options.real, *["extended"] * options.extended]
    files = {mutant.file for mutant in mutants}
    tests = options.tests or covering_tests({*ROOMS, *(file.rpartition("/")[0] for file in files)})
    sys.meta_path.insert(0, NotingFinder(files))
    with tempfile.TemporaryDirectory() as folder:
        plugin = Mutants(mutants, Path(folder), options.out, stages=stages, limit_s=options.limit)
        marks = " or ".join(f"({STAGES[stage]})" for stage in stages)
        arguments = ["-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
        status = pytest.main([*arguments, *tests], plugins=[plugin])
    counts = Counter(row["end"].partition(":")[0] for row in plugin.rows)
    ends = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    print(f"{len(mutants)} mutants: {ends} (pytest: {int(status)})")


if __name__ == "__main__":
    main()
