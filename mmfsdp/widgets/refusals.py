"""What cannot be chosen now, and why: found by asking the parameters' own checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ..params import ParamError, RunParams
from .fields import Field, at, names

_SAMPLES: dict[Any, tuple[Any, ...]] = {int: (0, 1, 2, 3), float: (0.5, 1.0, 2.0), str: ("x", "1", "2")}
_MANY = 10**9


def refused(params: RunParams, field: Field) -> dict[str, str]:
    """Choice -> why it cannot be made, for the choices of a field that its own check refuses beside the others."""
    found = {choice: _why(params, field, field.read(choice)) for choice in field.choices}
    return {choice: why for choice, why in found.items() if why}


def closed(params: RunParams, field: Field) -> str | None:
    """Why a field that is at its default can have no other value; None where it can."""
    value = at(params, field.name)
    if value != field.default:
        return None
    samples: list[Any] = [field.read(choice) for choice in field.choices] or list(_SAMPLES.get(field.kind, ()))
    if field.words:
        samples = [["x"], ["y"]]
    if field.kind in (int, float) and value is not None:
        samples += [field.kind(value * 2), field.kind(value / 2)]
    reasons = [_why(params, field, sample) for sample in samples if sample != value]
    if not reasons or not all(reasons):
        return None
    # a complaint about the value names it; the same complaint about all of them is about the field
    ((reason, times),) = Counter(reasons).most_common(1)
    return reason if times > 1 or len(reasons) == 1 else None


def span(params: RunParams, field: Field) -> str:
    """The numbers that a field may hold beside the other choices, in words; empty where it holds none."""
    value = at(params, field.name)
    if field.kind not in (int, float) or field.optional or _why(params, field, value):
        return ""

    def fits(number: float) -> bool:
        return not _why(params, field, field.kind(number))

    lows = [-1, 0, 1, 2, 3, 4] if field.kind is int else [-1, 0, 1e-9]
    low = next((n for n in lows if fits(n)), value)
    least = {-1: "", 1e-9: "above 0"}.get(low, f"from {low}")
    if fits(_MANY):
        return least
    inside, outside = float(value), float(_MANY)
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if fits(middle) else (inside, middle)
    most = round(outside if field.kind is float else int(inside), 6)
    return f"{least} {'to' if fits(most) else 'below'} {most:g}".strip()


def _why(params: RunParams, field: Field, value: Any, also: dict[str, Any] | None = None) -> str | None:
    """What the field's check says of a value; None where it accepts it, or where another field would have to change.

    Where that other one is merely missing yet, it is given a value, to see whether there is more against this choice.
    """
    try:
        _with(params, {field.name: value} | (also or {}))
    except ParamError as error:
        if error.field == field.name:
            first = error.message.split(";")[0]
            words = [f"{v!r} " for v in (value, tuple(value), value[0])] if isinstance(value, list) else []
            words += [f"{value!r} ", f"{value} "]
            return next((first.removeprefix(word) for word in words if first.startswith(word)), first)
        if not also and error.field in names() and at(params, error.field) is None:
            return _why(params, field, value, {error.field: _SAMPLES.get(Field.named(error.field).kind, ("x",))[1]})
    return None


def _with(obj: Any, changes: dict[str, Any]) -> Any:
    """A copy with other values, by dotted name; quicker than `change`, which goes through plain data."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        parts.setdefault(head, {})[rest] = value
    values = {}
    for head, inner in parts.items():
        try:
            values[head] = inner[""] if "" in inner else _with(getattr(obj, head), inner)
        except ParamError as error:
            raise error.under(head) from None
    return replace(obj, **values)
