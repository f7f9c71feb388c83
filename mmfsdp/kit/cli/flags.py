"""Parameters as flags of a command line: `--train.lr 1e-3` for each field, made from the models by argparse.

argparse only splits the words. The values go to pydantic as text, so that an error is worded as it is for YAML.
"""

from __future__ import annotations

import argparse
import re
import shutil
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ...params.base import ParamError, Params, did_you_mean, read_yaml
from ...params.in_words import WIDTH
from ...params.own import names_own_code
from ...params.run import RunParams, load

MAIN_FLAGS = (
    "model.kind",
    "model.name",
    "model.weights",
    "model.freeze",
    "model.lora_rank",
    "data.source",
    "data.path",
    "data.reader",
    "data.max_length",
    "train.steps",
    "train.batch_size",
    "train.accumulation",
    "train.lr",
    "fsdp.backend",
    "fsdp.sharding_strategy",
    "fsdp.frozen_policy",
    "fsdp.mixed_precision",
    "fsdp.activation_checkpointing",
    "launch.name",
    "launch.ranks",
    "launch.cluster",
)
"""Fields that `--help` shows; `--help-all` shows all."""
TITLES = {
    "model": "the model",
    "data": "the data",
    "train": "the training",
    "fsdp": "sharding",
    "launch": "the start of the ranks",
}
ENTRY = re.compile(r"--[\w.-]+\.\d+\.[\w.-]+")
"""A flag of an entry of a list, such as --data.more.0.weight."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ParamError for a mistake, and whose help fits 80 columns."""

    def __init__(self, **options: Any):
        columns = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)

        def formatter(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=22, width=columns)

        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        # argparse's own pattern has no exponent, so it takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        """Raise ParamError rather than exit."""
        raise ParamError("command line", f"{message}; `{self.prog} --help` shows the usage")

    def known_words(self) -> list[str]:
        """Return the options of this parser."""
        return [word for word in self._option_string_actions if word.startswith("--")]


def read_words(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Return the values of a command's words. Raise ParamError that names an unknown option, and the nearest one."""
    plain = []
    for word in words:
        if word == "--":
            continue
        if word.startswith("--"):  # --train.batch_size is --train.batch-size
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        plain.append(word)
    values, others = parser.parse_known_args(plain)
    values.entries = {}
    while others and ENTRY.fullmatch(others[0].partition("=")[0]):
        flag, equals, value = others[0].partition("=")
        if not equals and len(others) > 1 and not others[1].startswith("--"):
            value = others.pop(1)
        elif not equals:
            raise ParamError(flag.removeprefix("--"), "a value is missing")
        values.entries[flag.removeprefix("--").replace("-", "_")] = value
        del others[0]
    if others:
        word = next((word for word in others if word.startswith("-")), others[0])
        if not word.startswith("-"):
            raise ParamError("command line", f"{word!r} is one word too many; remove it")
        known = values.parser.known_words() if hasattr(values, "parser") else parser.known_words()
        raise ParamError("command line", f"{word} is not an option{did_you_mean(word.partition('=')[0], known)}")
    return values


def add_flags(parser: Parser) -> None:
    """Add --config, a flag for each field of RunParams, and --help-all, which shows them all."""
    parser.add_argument("--config", metavar="C", help="a YAML file or the name of a preset; flags change its values")
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
    groups = {section: parser.add_argument_group(title) for section, title in TITLES.items()}
    for name, field in fields(RunParams):
        group, flag = groups[name.partition(".")[0]], f"--{name.replace('_', '-')}"
        # Shown by --help-all, which puts the text back.
        text = " ".join((field.description or "").split()).replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        shown = _first_sentence(text) if name in MAIN_FLAGS else argparse.SUPPRESS
        if field.annotation is bool:
            group.add_argument(flag, action="store_const", const=True, help=shown, **options).full_help = text  # type: ignore[attr-defined]
            section, _, last = flag.rpartition(".")
            off = group.add_argument(f"{section}.no-{last}", action="store_const", const=False, **options)
            off.help = argparse.SUPPRESS
            off.full_help = f"the opposite of {flag}"  # type: ignore[attr-defined]
            continue
        if get_origin(_without_none(field.annotation)) is tuple and not is_yaml(field):
            options["nargs"] = "*"
        action = group.add_argument(flag, metavar=_metavar(field), help=shown, **options)
        action.full_help = text  # type: ignore[attr-defined]


class _HelpAll(argparse.Action):
    """Print the help with all flags and their whole texts, and exit."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for action in parser._actions:
            action.help = getattr(action, "full_help", action.help)
        parser.print_help()
        parser.exit()


def params_of(values: argparse.Namespace, *, default: RunParams | None = None) -> RunParams:
    """Return the parameters that the flags say on top of --config, or else of `default`. Raise ParamError."""
    params = load(values.config) if values.config else default or RunParams()
    changes = {}
    for name, field in fields(RunParams):
        if hasattr(values, name):
            value = getattr(values, name)
            if value in ("None", ["None"]) and type(None) in get_args(field.annotation):
                value = None
            elif isinstance(value, str) and is_yaml(field):
                value = read_yaml(value, name=name)
            changes[name] = value
    return params.change(**changes).change(**values.entries)


def fields(cls: type[Params], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted name, field) of each field that is not a group of fields itself."""
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Params):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def is_yaml(field: FieldInfo) -> bool:
    """Return whether the field holds mappings, which a flag takes as YAML: '[{source: json, path: docs.jsonl}]'."""
    kind = field.annotation
    if names_own_code(kind):
        return True
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return any(get_origin(each) is dict or (isinstance(each, type) and issubclass(each, Params)) for each in kinds)


def _without_none(annotation: Any) -> Any:
    """Return the type of a field that may be unset; of several, the first."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    return next(kind for kind in get_args(annotation) if kind is not type(None))


def _metavar(field: FieldInfo) -> str:
    """Return the choices of a field, or the kind of its values."""
    kind = _without_none(field.annotation)
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = ",".join(choice.value for choice in kind)
        names = f"{{{choices}}}" if len(choices) < WIDTH // 2 else "NAME"  # else the help lists them
        return f"{names}|MODULE:NAME" if names_own_code(field.annotation) else names
    if names_own_code(field.annotation):
        return "MODULE:NAME"
    if is_yaml(field):
        return "YAML"
    words = {int: "N", float: "X", bool: "{True,False}"}
    return words.get(kind, "TEXT")


def _first_sentence(text: str) -> str:
    return re.split(r"\.\s+(?=[A-Z])", text)[0].removesuffix(".")
