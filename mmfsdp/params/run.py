"""RunParams: everything about a run, and its way to and from YAML and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from .check import ParamError, type_hints, unknown_key
from .data import DataParams
from .enums import Backend
from .fsdp import FSDPParams
from .launch import LaunchParams
from .model import ModelParams
from .train import TrainParams

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunParams:
    """One training run, whole. The same object drives the form, the command line and every rank."""

    model: ModelParams = ModelParams()
    """What is trained: backbones and what is added to them."""

    data: DataParams = DataParams()
    """What it is trained on."""

    train: TrainParams = TrainParams()
    """For how long, and how fast it learns."""

    fsdp: FSDPParams = FSDPParams()
    """How it is sharded over the ranks."""

    launch: LaunchParams = LaunchParams()
    """Where the ranks and the run folder are."""

    def __post_init__(self) -> None:
        replicate, shard = self.fsdp.dp_replicate, self.fsdp.dp_shard
        if replicate and shard and replicate * shard != self.launch.ranks:
            raise ParamError(
                "fsdp.dp_replicate",
                f"{replicate} x dp_shard {shard} makes {replicate * shard} ranks, but launch.ranks is "
                f"{self.launch.ranks}; change one of the three",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunParams:
        """From nested plain values; what is absent keeps its default. Raises ParamError with the dotted field name."""
        return build(cls, values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> RunParams:
        """Read a YAML file. Raises FileNotFoundError, or ParamError for what is wrong in it."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ParamError(str(path), f"is not YAML: {error}") from None
        except (IsADirectoryError, PermissionError) as error:
            raise ParamError(str(path), f"cannot be read: {error.strerror}") from None
        return cls.from_yaml_text(text, name=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, name: str = "YAML") -> RunParams:
        """Read a YAML text. Raises ParamError for what is wrong in it; name: what errors call the text."""
        values = read_yaml(text, name=name)
        return cls.from_dict({} if values is None else values)

    @classmethod
    def from_json(cls, text: str) -> RunParams:
        """Read a JSON text. Raises ParamError for what is wrong in it."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ParamError("json", f"is not JSON: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values: dicts, lists, strings, numbers, None."""
        return plain(asdict(self))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The whole configuration as YAML; written to `path` too if one is given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_json(self) -> str:
        """The whole configuration as JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def change(self, **changes: Any) -> RunParams:
        """A copy with other values, given by dotted name: `params.change(**{"train.lr": 3e-4})`."""
        values = self.to_dict()
        for name, value in changes.items():
            *parents, last = name.split(".")
            place = values
            for parent in parents:
                place = _items(place).get(parent, {})
            if not isinstance(place, dict) or last not in place:
                raise unknown_key(name, _dotted(self.to_dict()))
            place[last] = plain(value)
        return RunParams.from_dict(values)

    @property
    def backend(self) -> Backend:
        """The backend that really runs."""
        return self.fsdp.effective_backend


def read_yaml(text: str, *, name: str) -> Any:
    """Plain data from a YAML text. Raises ParamError for what is none; name: what the error calls the text."""
    try:
        values = yaml.safe_load(text)
        json.dumps(values)  # refuses dates and what contains itself
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ParamError(name, f"is not YAML: {where}{error.problem}") from None
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise ParamError(name, f"is not YAML of plain data: {error}") from None
    return values


def build(cls: type[T], values: Any) -> T:
    """A parameter dataclass from nested plain values, every mistake named by its dotted field."""
    if not isinstance(values, Mapping):
        raise ParamError(cls.__name__, f"{values!r} is not a mapping of field names to values")
    hints = type_hints(cls)  # type: ignore[arg-type]
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in known:
            raise unknown_key(str(key), known)
        of = get_args(hints[key])
        if is_dataclass(hints[key]):
            value = _part(hints[key], str(key), value)
        elif of and is_dataclass(of[0]):
            if not isinstance(value, (list, tuple)):
                raise ParamError(str(key), f"{value!r} is not a list of mappings of field names to values")
            value = tuple(_part(of[0], f"{key}.{i}", one) for i, one in enumerate(value))
        arguments[key] = value
    return cls(**arguments)


def _part(cls: Any, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ParamError(name, f"{values!r} is not a mapping of field names to values")
    try:
        return build(cls, values)
    except ParamError as error:
        raise error.under(name) from None


def _items(place: Any) -> dict[str, Any]:
    """What a dotted name may go on with."""
    if isinstance(place, list):
        return {str(i): value for i, value in enumerate(place)}
    return place if isinstance(place, dict) else {}


def plain(value: Any) -> Any:
    """Enums to strings and tuples to lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        names.append(prefix + key)
        names += _dotted(_items(value), f"{prefix}{key}.")
    return names
