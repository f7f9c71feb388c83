"""Base of all parameter models: strict fields with help, one clear error for a mistake, YAML, and `change`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import to_jsonable_python
from typing_extensions import Self

T = TypeVar("T")

MAX_LISTED_CHOICES = 50
MAX_MESSAGE_LENGTH = 1200
MAX_YAML_BYTES = 1 << 20
MAX_YAML_SIZE, YAML_VALUE_SIZE = 1 << 26, 64
"""Characters of all texts of a YAML file together, once its aliases are replaced; and as how many a value counts."""
MAX_YAML_BITS = 2048
"""Bits of a whole number: Python writes no number with thousands of digits, not even into an error."""
ANY_OTHER = object()
"""Stands for every value of a field but its default."""


_ONE_CONTROL = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u202a-\u202e\u2066-\u2069"  # these write backwards: a line would not say what it seems to say
    r"\ud800-\udfff]"  # halves of a character, which no file and no terminal takes
)
_ANY_CONTROL = re.compile(_ONE_CONTROL)
"""Finds any control seven times as fast as `_CONTROL`: most texts have none."""
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colors, movements of the cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window titles, the clipboard, links and the like, with their text
    r"|\x1b[ -/]*[0-~]?|" + _ONE_CONTROL
)


def without_controls(text: str) -> str:
    """Return a text without what a terminal would obey: colors, titles, the clipboard. Tabs and line ends stay."""
    return _CONTROL.sub("", text) if _ANY_CONTROL.search(text) else text


class ParamError(ValueError):
    """A mistake in one parameter: `field` is its dotted name, `message` says in one line what is wrong and the fix.

    Both may quote a file that somebody else wrote, so control sequences are left out.
    """

    def __init__(self, field: str, message: str):
        self.field, self.message = without_controls(field), without_controls(" ".join(message.split()))
        if len(self.message) > MAX_MESSAGE_LENGTH:  # its end names the fix
            self.message = f"{self.message[: MAX_MESSAGE_LENGTH // 2]} [...] {self.message[-MAX_MESSAGE_LENGTH // 2 :]}"
        super().__init__(f"{self.field}: {self.message}")

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback: the mistake is in what a person wrote, not in ours."""
        return [f"{type(self).__name__}: {self}"]

    def under(self, prefix: str) -> ParamError:
        """Return the same error with the field named from one level up."""
        return ParamError(f"{prefix}.{self.field}", self.message)


class Params(BaseModel):
    """Frozen fields and no unknown ones; the docstring under a field is its help, `model_fields[name].description`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {}
    """Field -> (another field, the values of it with which the field has an effect)."""
    SETS_BACK: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Field -> the fields that `change` sets back to their defaults when it sets this one, unless it sets them, too."""

    def __init__(self, /, **values: Any):
        """Raise ParamError for the first mistake, rather than pydantic's error of many lines."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(type(self), error) from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the model for nested plain values; absent fields keep their defaults. Raise ParamError."""
        if not isinstance(values, Mapping):
            raise ParamError(cls.__name__, f"{values!r} is not a mapping of field names to values")
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file. Raise FileNotFoundError, or ParamError for a mistake in the file."""
        return cls.from_dict(read_yaml(Path(path).read_bytes(), name=str(path)) or {})

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values: dicts, lists, strings, numbers, None."""
        return self.model_dump(mode="json")

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return all values as YAML, and write them to `path` if there is one."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def change(self, **changes: Any) -> Self:
        """Return a validated copy with other values: `train.change(lr=1e-3)`, `run.change(**{"train.lr": 1e-3})`.

        An entry of a list has its number for a name: data.more.0.weight. A field may be changed together with the
        section that it is in: the section is taken first. Raise ParamError.
        """
        values = self.to_dict()
        for name in sorted(changes, key=lambda name: name.count(".")):
            section, _, last = name.rpartition(".")
            parent, kind = _section(type(self), values, section)
            fields = _fields(kind)
            if last not in _children(parent) and not (last in fields and isinstance(parent, dict)):
                raise unknown_key(name, leaves(self.to_dict()))
            value = _with_dicts(changes[name])
            if fields and section not in changes and value is not None and value != parent.get(last):
                for other in kind.SETS_BACK.get(last, ()):
                    if f"{section}.{other}".lstrip(".") not in changes:
                        parent.pop(other, None)
            parent[int(last) if isinstance(parent, list) else last] = value
        return self.from_dict(values)

    def unavailable(self, name: str, value: Any = ANY_OTHER) -> str:
        """Return why the field cannot have this value with the other fields and what to change, or "" where it can."""
        return "; ".join(filter(None, self.why_unavailable(name, value)))

    def why_unavailable(self, name: str, value: Any = ANY_OTHER) -> tuple[str, str]:
        """Return why the field cannot have this value with the other fields, and what to change; "" where it can.

        Without a value: why the field cannot have any other value than its default. Files hold all fields, so a default
        may stand for a field that nobody has set, and it is never refused: it must mean the same as no value. A field
        with a default that depends on others has None for it (`ModelParams.freeze`). An empty list asks for nothing.
        """
        if value == type(self).model_fields[name].get_default(call_default_factory=True) or name not in self.NEEDS:
            return "", ""
        if value == ():
            return "", ""
        needed, values = self.NEEDS[name]
        now = getattr(self, needed)
        if now in values:
            return "", ""
        choices = " or ".join("unset" if value is None else str(value) for value in values)
        return f"has no effect unless {needed} is {choices}", f"remove it, or change {needed} from {now}"

    def why_idle(self, name: str) -> str:
        """Return why no value of the field changes anything beside the other fields; "" if one does."""
        return self.why_unavailable(name)[0]

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the fields that are set and taken although they have no effect with the others."""
        return ()

    @model_validator(mode="after")
    def _check_available(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            reason = self.unavailable(name, value)
            if reason and name not in self.without_effect:
                shown = value.value if isinstance(value, Enum) else repr(value)
                raise ParamError(name, f"{shown} {reason}")
        return self


def explain(cls: type[BaseModel], error: ValidationError) -> ParamError:
    """Return pydantic's first complaint as one line: field, value, the choices or limits, near names."""
    first = error.errors(include_url=False)[0]
    kind, place, value = first["type"], first["loc"], first["input"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ParamError):  # of a model inside this one, or of a check across fields
        return ParamError(".".join(map(str, (*place, cause.field))), cause.message)
    name = str(place[0])
    if name in cls.model_fields and get_origin(cls.model_fields[name].annotation) is dict:
        name = ".".join(map(str, place[:2]))
    if kind == "extra_forbidden":
        return unknown_key(name, cls.model_fields)
    if kind == "value_error":
        return ParamError(name, str(cause))
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return ParamError(name, f"{value!r} is not allowed{did_you_mean(str(value), choices)}")
    if kind == "string_pattern_mismatch":
        examples = " or ".join(map(str, cls.model_fields[name].examples or ()))
        return ParamError(name, f"{value!r} is not allowed; write it as in {examples}")
    if kind.startswith("model"):
        name = ".".join(map(str, place))
    # pydantic's messages begin with a noun: "Input should be a valid integer", "String should match pattern ...".
    return ParamError(name, f"{value!r} {first['msg'].partition(' ')[2]}")


_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses tags such as !!timestamp, and a key that a mapping has twice.

    PyYAML drops the first value of such a key.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _PLAIN_TAGS:
            words = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed; remove it, or quote a text"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
            keys.add(key)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}  # as in JSON


def read_yaml(text: str | bytes, *, name: str) -> Any:
    """Return the plain data of a YAML text. Raise ParamError; name: what the error calls the text."""
    if len(text) > MAX_YAML_BYTES:  # PyYAML needs seconds for a megabyte
        raise ParamError(name, f"has {len(text):,} bytes, and parameters have at most {MAX_YAML_BYTES:,}")
    try:
        values = yaml.load(text, _Loader)  # a SafeLoader
        _check_size(values)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError, KeyError) as error:  # KeyError: `!!bool maybe`
        raise ParamError(name, f"is not YAML of plain data: {error}") from None
    return values


def _check_size(values: Any) -> None:
    """Raise ValueError for values that are too large as a whole: with aliases, a short text can stand for any number.

    A list that contains itself has no end.
    """
    left, size = [values], 0
    while left:
        value = left.pop()
        size += YAML_VALUE_SIZE + (len(value) if isinstance(value, str) else 0)
        if size > MAX_YAML_SIZE:
            raise ValueError("it stands for too many values, or a list contains itself")
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int) and value.bit_length() > MAX_YAML_BITS:
            raise ValueError("a whole number in it is too large")


def plain(value: Any) -> Any:
    """Return enums as strings, models and dataclasses as dicts and tuples as lists, all the way down."""
    return to_jsonable_python(value)


def from_plain(kind: type[T], values: Any) -> T:
    """Return an object of a dataclass or model from what `plain` returns: as its types say, all the way down.

    Raises ValueError for values of other types.
    """
    any_kind: Any = kind  # a type is hashable, which mypy does not know of type[T]
    return _adapter(any_kind).validate_python(values)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a type; making one takes a millisecond."""
    return TypeAdapter(kind)


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of everything in nested mappings but the non-empty mappings themselves."""
    by_name: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            by_name |= leaves(value, f"{prefix}{key}.")
        else:
            by_name[f"{prefix}{key}"] = value
    return by_name


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return how an error about an unknown word goes on: the nearest known word, and all unless there are too many."""
    by_lower = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.4)
    choices = f"choose {', '.join(by_lower.values())}"
    if not near:
        return f"; {choices}"
    hint = f"; did you mean {by_lower[near[0]]}?"
    return hint if len(by_lower) > MAX_LISTED_CHOICES else f"{hint} C{choices[1:]}"


def unknown_key(key: str, known: Iterable[str]) -> ParamError:
    """Return the error for a key that no field has, with near names."""
    return ParamError(key, f"no such field{did_you_mean(key, known)}")


def _with_dicts(value: Any) -> Any:
    """Return a value with the parameters in it as dicts, and tuples as lists, so that `change` can go into them."""
    if isinstance(value, Params):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _with_dicts(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_dicts(inner) for inner in value]
    return value


def _section(kind: Any, values: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Return the plain values of a section by its dotted name, and its type; None for what is not there.

    Sections that lack in values that were given in part are put there, with their defaults.
    """
    parent: Any = values
    for part in filter(None, name.split(".")):
        fields = _fields(kind)
        if part in fields and isinstance(parent, dict):
            parent.setdefault(part, plain(fields[part].get_default(call_default_factory=True)))
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]  # of each entry of a list
        else:
            kind = fields[part].annotation if part in fields else None
        parent = _children(parent).get(part)
    return parent, kind


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields of a type of parameters; none of another type."""
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, Params) else {}


def _children(value: Any) -> dict[str, Any]:
    """Return what a dotted name may go on with."""
    if isinstance(value, list):
        return {str(i): item for i, item in enumerate(value)}
    return value if isinstance(value, dict) else {}
