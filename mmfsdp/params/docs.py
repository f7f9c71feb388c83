"""The docstrings under the fields of a parameter dataclass, read from its source: one text for form, help and pages."""

from __future__ import annotations

import ast
import inspect
from functools import cache


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> its docstring on one line."""
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for here, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[here.target.id] = " ".join(str(below.value.value).split())
    return docs
