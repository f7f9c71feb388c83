"""The parts of the reference pages that the code itself says: `python -m tests.pages` writes them anew.

A page holds `<!-- made: NAME -->` and `<!-- end -->`; what is between them is made by the function of that name here.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mmfsdp.core.plan import Unit
from mmfsdp.kit.cli import build_parser
from mmfsdp.kit.cli.json_output import Failure
from mmfsdp.kit.data.rows.rows import SHAPES
from mmfsdp.lint.plan import LEVELS
from mmfsdp.params import (
    AutoWrapPolicy,
    Backend,
    DataSource,
    FrozenDtype,
    FrozenPolicy,
    FSDPParams,
    ShardingStrategy,
    SourceParams,
    StateDictType,
)
from mmfsdp.params.fsdp import BACKEND_LIMITS
from mmfsdp.params.run import PRESETS
from mmfsdp.predict import MACHINES, Machine, Times
from mmfsdp.predict.cards import CARDS
from mmfsdp.predict.memory import Memory
from tests.bench import ways_in
from tests.bench.quantize import tables
from tests.bench.waits import STORED, table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "notebooks" / "reference"
MARKED = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def profiles() -> str:
    """The profiles of clusters that come with the package, as they are."""
    parts = []
    for path in sorted((PRESETS / "clusters").glob("*.yaml")):
        parts.append(f"## {path.stem}\n\n```yaml\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def own_loop() -> str:
    """The script beside its page."""
    script = (PAGES / "own_loop.py").read_text(encoding="utf-8")
    return f"```python\n{script}```\n"


def nanovlm() -> str:
    """The script beside its page."""
    return f"```python\n{(PAGES / 'nanovlm.py').read_text(encoding='utf-8')}```\n"


def own_scheduler() -> str:
    """The scheduler that the tests use."""
    return f"```python\n{(ROOT / 'tests/toy_scheduler.py').read_text(encoding='utf-8')}```\n"


def options() -> str:
    """A table of field and backend, from what each backend can honor; the meaning of the fields."""
    rows = []
    for name in FSDPParams.model_fields:
        if name != "backend":
            rows.append([f"`{name}`", *(_cell(name, backend) for backend in Backend)])
    table = _table(["field", "DDP", "FSDP1", "FSDP2"], rows)
    return f"{table}\n## What the fields mean\n\n{_list(FSDPParams)}"


def _cell(name: str, backend: Backend) -> str:
    refused: list[str] = []
    for limit in BACKEND_LIMITS:
        if limit.field == name and backend in limit.backends:
            if not limit.values:
                return "refused"
            refused += map(str, limit.values)
    return f"all but {', '.join(refused)}" if refused else "honored"


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _list(kind: type) -> str:
    if issubclass(kind, Enum):
        texts = {choice.name: choice.description for choice in kind}
    elif issubclass(kind, BaseModel):
        texts = {name: field.description for name, field in kind.model_fields.items()}
    else:
        texts = _field_docs(kind)
    return "".join(f"- `{name}`: {' '.join(text.split())}\n" for name, text in texts.items())


def _field_docs(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass."""
    docs = {}
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[field.target.id] = text.value.value
    return docs


def _described(kind: type) -> Any:
    return lambda: _list(kind)


def machines() -> str:
    """The machines that steps are timed for."""
    names = ("flops", "fp32", "memory", "bandwidth", "inside", "capacity", "context", "fragmentation")
    rows = [[f"`{m.name}`", *(f"{getattr(m, name):.3g}" for name in names)] for m in MACHINES.values()]
    return _table(["machine", *(f"`{name}`" for name in names)], rows)


def cards() -> str:
    """The GPUs whose peak is known."""
    rows = []
    for card in CARDS:
        rows.append([f"[{card.name}]({card.source})", f"{card.half:.4g}", f"{card.fp32:.3g}", f"{card.memory:.3g}"])
    return _table(["card", "`half`", "`fp32`", "memory, bytes/s"], rows)


def lint() -> str:
    """Each finding of the lint, by its code: what it says, and its fix."""
    rows: dict[str, list[str]] = {}
    calls = []
    for file in ("core/guards.py", "lint/plan.py", "lint/cost.py", "kit/compat/describe_lint.py"):
        calls += _calls(ROOT / "mmfsdp" / file, LEVELS)
    for call in calls:
        code, says = _text(call.args[0]), _text(call.args[1], either=True)
        assert isinstance(call.func, ast.Name)
        rows.setdefault(code, [f"`{code}`", call.func.id, _cell_of(says)])
    return _table(
        ["code", "level", "what it says, and what to do"], sorted(rows.values(), key=lambda row: LEVELS.index(row[1]))
    )


def all_texts() -> str:
    """Every text in the package, as it is written."""
    nodes = [node for file in (ROOT / "mmfsdp").rglob("*.py") for node in _nodes(file)]
    return "\n".join(_text(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr)))


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


def shapes() -> str:
    """Each shape of a row, with an example."""
    rows = [[_cell_of(shape.words), f"`{shape.example}`"] for shape in SHAPES]
    return _table(["it has", "a row"], rows)


def quantized() -> str:
    """What `python -m tests.bench.quantize --json notebooks/measured/quantize.json` measured last."""
    return tables(json.loads((ROOT / "notebooks" / "measured" / "quantize.json").read_text()))


def waits() -> str:
    """What `python -m tests.bench.waits` counted last; a test counts again."""
    return table(json.loads(STORED.read_text()))


def ways() -> str:
    """What `python -m tests.bench.ways_in FOLDER` measured last."""
    return ways_in.table(json.loads(ways_in.STORED.read_text()))


def json_fields() -> str:
    """The fields of what each command prints with --json, from its schema."""
    commands = next(action for action in build_parser()._actions if isinstance(action.choices, dict)).choices
    parts = []
    for name, command in commands.items():
        schemas = [action for action in command._actions if "--json-schema" in action.option_strings]
        for answer in schemas[0].const if schemas else ():
            about = " ".join(inspect.getdoc(answer).split())
            parts.append(f"### {name}: {answer.__name__}\n\n{about}\n\n{_schema_list(answer)}")
    return "\n" + "\n".join(parts)


def json_failure() -> str:
    """The fields of a mistake."""
    return _schema_list(Failure)


def _schema_list(answer: type[BaseModel]) -> str:
    """The fields of a model with their types and meaning, and below them those of the models in them."""
    schema = answer.model_json_schema(mode="serialization")
    rows: list[list[str]] = []

    def add(properties: dict[str, Any], before: str) -> None:
        for name, field in properties.items():
            kind, inner = _schema_type(field)
            dots = f"{before}{name}[]" if kind.startswith("list") else f"{before}{name}"
            rows.append([f"`{dots}`", kind, _cell_of(" ".join(field.get("description", "").split()))])
            if inner and dots.count("others") < 1:  # a reason has the reasons of other ranks
                add(schema["$defs"][inner]["properties"], f"{dots}.")

    add(schema["properties"], "")
    return _table(["field", "type", "meaning"], rows)


def _schema_type(field: dict[str, Any]) -> tuple[str, str]:
    """The type of a field of a JSON schema in words, and the name of the model that it holds, if any."""
    if "$ref" in field:
        return "object", field["$ref"].rpartition("/")[2]
    if "anyOf" in field:
        kinds = [_schema_type(each) for each in field["anyOf"]]
        return " or ".join(kind for kind, _ in kinds), "".join(inner for _, inner in kinds)
    if field.get("type") == "array":
        kind, inner = _schema_type(field.get("items") or field["prefixItems"][0])
        return f"list of {kind}", inner
    return field.get("type", "any"), ""


MADE = {
    "json_fields": json_fields,
    "json_failure": json_failure,
    "ways_in": ways,
    "profiles": profiles,
    "waits": waits,
    "quantized": quantized,
    "frozen_dtype": _described(FrozenDtype),
    "options": options,
    "own_loop": own_loop,
    "nanovlm": nanovlm,
    "own_scheduler": own_scheduler,
    "lint": lint,
    "machines": machines,
    "cards": cards,
    "unit": _described(Unit),
    "frozen": _described(FrozenPolicy),
    "wrap": _described(AutoWrapPolicy),
    "sharding": _described(ShardingStrategy),
    "memory": _described(Memory),
    "times": _described(Times),
    "machine": _described(Machine),
    "layouts": _described(StateDictType),
    "shapes": shapes,
    "sources": _described(DataSource),
    "source": _described(SourceParams),
}


def made(text: str) -> str:
    """A page with its marked parts made anew. Raises KeyError for a part of another name."""
    return MARKED.sub(lambda found: f"{found[1]}{MADE[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(made(page.read_text()))
