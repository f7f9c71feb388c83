"""Mutants of a solution: each leaves out, weakens or swaps one thing in a line that the learner writes."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from copy import deepcopy
from typing import NamedTuple

MODULES = {"torch", "dist", "nn", "math", "F"}
SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""Each operator -> the one that it is mistaken for."""
NAMES = {"world": "rank", "rank": "world", "outputs": "output", "shard": "whole", "whole": "shard", "args": "kwargs"}
"""Names and attributes that are mistaken for each other."""


class Mutant(NamedTuple):
    """A changed solution: the lines that are changed, as they are now; those of the solution; and the whole text."""

    now: str
    before: str
    code: str


def mutants(code: str, given: str = "") -> Iterator[Mutant]:
    """Yield the mutants of a solution. given: the exercise as it stands; its own lines are not changed."""
    tree = ast.parse(code)
    lines, solution = own_lines(code, given), ast.unparse(tree)
    seen = {solution}
    printed = {id(inner) for node in ast.walk(tree) if is_print(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) not in lines or id(node) in printed:
            continue
        for changed in changes_of(node):
            text = replaced(tree, node, changed)
            if text not in seen:
                seen.add(text)
                yield Mutant(different(solution, text), different(text, solution), text)


def is_print(node: ast.AST) -> bool:
    """Return True for a call of print: what a learner prints is not graded."""
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("print(")


def own_lines(code: str, given: str) -> set[int]:
    """Return the numbers of the lines that the exercise does not give, from 1 on."""
    lines = set()
    difference = difflib.SequenceMatcher(None, given.splitlines(), code.splitlines(), autojunk=False)
    for kind, _, _, first, last in difference.get_opcodes():
        if kind != "equal":
            lines |= set(range(first + 1, last + 1))
    return lines


def different(other: str, text: str) -> str:
    """Return the lines of a text that another one has not, on one line."""
    rows = difflib.ndiff(other.splitlines(), text.splitlines())
    return "; ".join(row[2:].strip() for row in rows if row.startswith("+ "))


def replaced(tree: ast.AST, node: ast.AST, changed: ast.AST) -> str:
    """Return the code of a tree in which one node is another one."""
    copied = deepcopy(tree)
    for old, new in zip(ast.walk(tree), ast.walk(copied), strict=True):
        if old is node:
            target = new
    for parent in ast.walk(copied):
        for field, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, field, changed)
            elif isinstance(value, list) and target in value:
                value[value.index(target)] = changed
    return ast.unparse(ast.fix_missing_locations(copied))


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.For, ast.If, ast.With)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            yield ast.Pass()
    changes = {
        ast.If: _of_a_test,
        ast.IfExp: _of_a_test,
        ast.For: _of_a_loop,
        ast.BoolOp: _of_an_and,
        ast.Compare: _of_a_comparison,
        ast.BinOp: _of_a_sum,
        ast.Call: _of_a_call,
        ast.Subscript: _of_an_index,
        ast.Attribute: _of_an_attribute,
        ast.ListComp: _of_a_list,
        ast.Constant: _of_a_constant,
        ast.Name: _of_a_name,
        ast.UnaryOp: _of_a_sign,
    }.get(type(node))
    if changes is not None:
        yield from changes(node)


def copied(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    other = deepcopy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _of_a_test(node: ast.If | ast.IfExp) -> Iterator[ast.AST]:
    for value in (True, False):
        yield copied(node, test=ast.Constant(value))


def _of_a_loop(node: ast.For) -> Iterator[ast.AST]:
    """The first or the last only."""
    for index in (0, -1):
        items = ast.Call(ast.Name("list"), [node.iter], [])
        yield copied(node, iter=ast.List([ast.Subscript(items, ast.Constant(index))]))


def _of_an_and(node: ast.BoolOp) -> Iterator[ast.AST]:
    for value in node.values:
        others = [other for other in node.values if other is not value]
        yield others[0] if len(others) == 1 else copied(node, values=others)
    yield copied(node, op=SWAPPED[type(node.op)]())


def _of_a_comparison(node: ast.Compare) -> Iterator[ast.AST]:
    yield copied(node, ops=[SWAPPED[type(node.ops[0])]()])


def _of_a_sum(node: ast.BinOp) -> Iterator[ast.AST]:
    yield node.left
    yield node.right
    if type(node.op) in SWAPPED:
        yield copied(node, op=SWAPPED[type(node.op)]())


def _of_a_call(node: ast.Call) -> Iterator[ast.AST]:
    for keyword in node.keywords:
        yield copied(node, keywords=[other for other in node.keywords if other is not keyword])
    func = node.func
    if isinstance(func, ast.Attribute) and not (isinstance(func.value, ast.Name) and func.value.id in MODULES):
        yield func.value  # x.flatten() -> x
    elif len(node.args) == 1:
        yield node.args[0]  # dict(sent) -> sent
    for index, argument in enumerate(node.args):
        if isinstance(argument, ast.Name) and argument.id.endswith("s"):
            first = ast.Subscript(argument, ast.Slice(upper=ast.Constant(1)))
            yield copied(node, args=[*node.args[:index], first, *node.args[index + 1 :]])


def _of_an_index(node: ast.Subscript) -> Iterator[ast.AST]:
    if isinstance(node.ctx, ast.Store):
        return
    if isinstance(node.slice, ast.Slice):
        yield node.value
        for bound in ("lower", "upper"):
            if getattr(node.slice, bound) is not None:
                yield copied(node, slice=copied(node.slice, **{bound: None}))
        return
    number = ast.unparse(node.slice)
    yield copied(node, slice=ast.Constant(-1 if number == "0" else 0))


def _of_an_attribute(node: ast.Attribute) -> Iterator[ast.AST]:
    if isinstance(node.value, ast.Name) and node.value.id in MODULES:
        return
    if node.attr == "data":
        yield node.value
    if node.attr in NAMES:
        yield copied(node, attr=NAMES[node.attr])


def _of_a_list(node: ast.ListComp) -> Iterator[ast.AST]:
    generator = node.generators[0]
    if generator.ifs:
        yield copied(node, generators=[copied(generator, ifs=[]), *node.generators[1:]])


def _of_a_constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)


def _of_a_name(node: ast.Name) -> Iterator[ast.AST]:
    if node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id])


def _of_a_sign(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand
