"""The parts of the reference pages that the code itself says: `python -m tests.pages` writes them anew.

A page holds `<!-- made: NAME -->` and `<!-- end -->`; what is between them is made by the function of that name here.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mmfsdp.estimate import MACHINES, Machine, Memory, Peak, Times
from mmfsdp.params import (
    AutoWrapPolicy,
    Backend,
    DataSource,
    FrozenPolicy,
    FSDPParams,
    ParamError,
    ShardingStrategy,
    SourceParams,
    StateDictType,
)
from mmfsdp.params.docs import field_docs
from mmfsdp.plan.units import Unit

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "notebooks" / "reference"
MARKED = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", flags=re.S)

_WITH: dict[str, dict[str, Any]] = {
    "min_num_params": {"auto_wrap_policy": "SIZE_BASED_WRAP"},
    "transformer_layer_cls": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "memory_budget_gib": {"frozen_policy": "AUTO"},
    "dp_replicate": {"sharding_strategy": "HYBRID_SHARD"},
    "dp_shard": {"sharding_strategy": "HYBRID_SHARD"},
}
"""What else a field needs to have a meaning."""
_NEEDED: dict[str, dict[str, Any]] = {
    "TRANSFORMER_BASED_WRAP": {"transformer_layer_cls": "LlamaDecoderLayer"},
    "AUTO": {"memory_budget_gib": 16},
}
"""What else a value needs."""
_TEXTS = {"transformer_layer_cls": ["LlamaDecoderLayer"], "activation_checkpointing": ["all", "every:2", "*.layers.*"]}


def options() -> str:
    """A table of field and backend: honored, or the values that are refused; why; what the fields mean."""
    names = [f.name for f in fields(FSDPParams) if f.name != "backend"]
    why: dict[str, None] = {}
    rows = [[f"`{name}`", *(_cell(name, backend, why) for backend in Backend)] for name in names]
    reasons = "\n".join(f"- {reason}" for reason in why)
    table = _table(["field", "DDP", "FSDP1", "FSDP2"], rows)
    return f"{table}\n## What a refusal says\n\n{reasons}\n\n## What the fields mean\n\n{_list(FSDPParams)}"


def _cell(name: str, backend: Backend, why: dict[str, None]) -> str:
    values = _values(name)
    refused = {str(value): reason for value in values if (reason := _refusal(name, value, backend))}
    why |= dict.fromkeys(refused.values())
    if len(refused) == len(values):
        return "refused"
    return f"all but {', '.join(refused)}" if refused else "honored"


def _refusal(name: str, value: Any, backend: Backend) -> str:
    wanted: dict[str, Any] = {"backend": backend, **_WITH.get(name, {}), name: value}
    for v in list(wanted.values()):
        wanted |= {k: other for k, other in _NEEDED.get(str(v), {}).items() if k not in wanted}
    try:
        FSDPParams(**wanted)
    except ParamError as error:
        return str(error)
    return ""


def _values(name: str) -> list[Any]:
    hint = get_type_hints(FSDPParams)[name]
    kind = next(t for t in get_args(hint) or (hint,) if t is not type(None))
    if issubclass(kind, Enum):
        return list(kind)
    plain: dict[type, list[Any]] = {bool: [True, False], int: [2], float: [16.0]}
    return _TEXTS.get(name) or plain[kind]


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _list(kind: type) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in field_docs(kind).items())


def _described(kind: type) -> Any:
    return lambda: _list(kind)


def machines() -> str:
    """The machines that steps are timed for."""
    names = ("flops", "fp32", "memory", "bandwidth", "inside", "capacity")
    rows = [[f"`{m.name}`", *(f"{getattr(m, name):.3g}" for name in names)] for m in MACHINES.values()]
    return _table(["machine", *(f"`{name}`" for name in names)], rows)


def lint() -> str:
    """Each finding of the lint, by its code: what it says, and its fix."""
    rows: dict[str, list[str]] = {}
    for call in _calls(ROOT / "mmfsdp/plan/lint.py", ("_error", "_warn")):
        code, says = _text(call.args[0]), _text(call.args[1], either=True)
        assert isinstance(call.func, ast.Name)
        level = {"_error": "error", "_warn": "warning"}[call.func.id]
        rows.setdefault(code, [f"`{code}`", level, _cell_of(says)])
    return _table(["code", "level", "what it says, and what to do"], sorted(rows.values(), key=lambda row: row[1]))


ROOMS = {
    "What you type: fields, files, flags": ("params", "cli", "freeze", "widgets"),
    "Models and weights": ("models", "build", "pretrain", "export"),
    "Plan, estimate, wrapping": ("plan", "estimate", "wrap", "step"),
    "Data": ("data",),
    "Launch and runs": ("launch", "runs", "train", "watch", "report"),
    "Checkpoints": ("checkpoint", "evaluate"),
}
_RAISED = {"ParamError": (0, 1), "need": (1, 2), "DamagedCheckpoint": (0, 1), "ValueError": (None, 0)}
"""Where their calls have field and message. A ValueError begins with its field."""
_NAMED = re.compile(r"([\w.…-]+): (.+)")


def errors() -> str:
    """Every mistake that is answered with an error, by room and field: what it says, with its fix."""
    parts = []
    for title, rooms in ROOMS.items():
        rows: dict[str, dict[str, None]] = {}
        for file in sorted(f for room in rooms for f in _files(room)):
            for call in _calls(file, _RAISED):
                field, message = _error(call)
                if re.search(r"\w", message.replace("is not", "")):
                    rows.setdefault(field, {})[_cell_of(message)] = None
        table = [[f"`{field}`" if field else "", "<br>".join(found)] for field, found in sorted(rows.items())]
        parts.append(f"## {title}\n\n{_table(['about', 'what it says, and what to do'], table)}")
    rows = {_error(call)[1]: None for file in _files("data") for call in _calls(file, {"CorruptRecord"})}
    corrupt = " · ".join(_cell_of(text) for text in rows if len(text) > 3) + "\n"
    about = "Skipped, counted, and named in the run's result with one of these reasons; a run goes on without them."
    return "\n".join([*parts, f"## Records that cannot be used\n\n{about}\n\n{corrupt}"])


def rooms() -> set[str]:
    """Names of all rooms that raise an error."""
    found = {file: _calls(file, _RAISED) for file in (ROOT / "mmfsdp").rglob("*.py")}
    return {file.relative_to(ROOT / "mmfsdp").parts[0].removesuffix(".py") for file, calls in found.items() if calls}


def all_texts() -> str:
    """Every text in the package, as it is written."""
    nodes = [node for file in (ROOT / "mmfsdp").rglob("*.py") for node in _nodes(file)]
    return "\n".join(_text(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr)))


def _error(call: ast.Call) -> tuple[str, str]:
    """(field, message) of a call that makes an error."""
    assert isinstance(call.func, ast.Name)
    place, says = _RAISED.get(call.func.id, (None, 1))
    message = _text(call.args[says])
    if place is not None:
        return _text(call.args[place]), message
    named = _NAMED.fullmatch(message)
    return (named[1], named[2]) if named else ("", message)


def _files(room: str) -> list[Path]:
    """A room's files, without what FSDPParams refuses: that has a page of its own."""
    folder = ROOT / "mmfsdp" / room
    found = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sorted(file for file in found if file.name != "fsdp.py")


@cache
def _nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def _calls(file: Path, names: Any) -> list[ast.Call]:
    """The calls of these names in a file, in its order, that have a field or code and a message."""
    calls = [n for n in _nodes(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return sorted((c for c in calls if c.func.id in names and c.args), key=lambda c: c.lineno)  # type: ignore[attr-defined]


def _text(node: ast.expr, *, either: bool = False) -> str:
    """A text as it is written, with … for what it is told. either: with both sides of an `if`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, either=either) + _text(node.right, either=either)
    if isinstance(node, ast.IfExp) and either:
        return f"{_text(node.body, either=True)}; or {_text(node.orelse, either=True)}"
    return "…"


def _cell_of(text: str) -> str:
    """A message as a cell of a table."""
    return re.sub(r"…(…)+", "…", text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


MADE = {
    "options": options,
    "lint": lint,
    "errors": errors,
    "machines": machines,
    "unit": _described(Unit),
    "frozen": _described(FrozenPolicy),
    "wrap": _described(AutoWrapPolicy),
    "sharding": _described(ShardingStrategy),
    "memory": _described(Memory),
    "peak": _described(Peak),
    "times": _described(Times),
    "machine": _described(Machine),
    "layouts": _described(StateDictType),
    "sources": _described(DataSource),
    "source": _described(SourceParams),
}


def made(text: str) -> str:
    """A page with its marked parts made anew. Raises KeyError for a part of another name."""
    return MARKED.sub(lambda found: f"{found[1]}{MADE[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(made(page.read_text()))
