"""The docstrings under fields and enum members, read from their source: one text for form, help and pages."""

from __future__ import annotations

import ast
import inspect
from dataclasses import is_dataclass
from functools import cache


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Name of a field or of an enum's member -> its docstring on one line."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        docs |= field_docs(base) if is_dataclass(base) else {}
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    for here, below in zip(node.body, node.body[1:], strict=False):
        target = getattr(here, "target", None) or getattr(here, "targets", [None])[0]
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[target.id] = " ".join(str(below.value.value).split())
    return docs
