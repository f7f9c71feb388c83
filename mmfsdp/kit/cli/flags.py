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
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ...params.base import ParamError, Params, did_you_mean, plain, read_yaml
from ...params.in_words import WIDTH
from ...params.own import names_own_code
from ...params.run import RunParams, load, preset_names

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
    "fsdp.memory_budget_gib",
    "fsdp.frozen_dtype",
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


class _Help(argparse.HelpFormatter):
    """Help whose texts keep their line ends, as of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            before = " " * (len(line) - len(line.lstrip()))
            lines.append(super()._fill_text(line, width, indent + before))
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ParamError for a mistake, and whose help fits 80 columns."""

    takes_config = False
    """A word directly after the command is its --config."""

    def __init__(self, **options: Any):
        self.commands: dict[str, Parser] = {}
        columns = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)

        def formatter(prog: str) -> argparse.HelpFormatter:
            return _Help(prog, max_help_position=22, width=columns)

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
    # argparse knows each flag in one spelling only.
    spelled = []
    for word in words:
        if word == "--":
            continue
        if word.startswith("--"):  # --train.batch_size is --train.batch-size
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        spelled.append(word)
    # Taken out here: argparse would fill a word of its own with any later word that no flag takes.
    command = parser.commands.get(words[0]) if words else None
    config = None
    if command is not None and command.takes_config and len(spelled) > 1 and not spelled[1].startswith("-"):
        config = spelled.pop(1)
    values, others = parser.parse_known_args(spelled)
    values.entries = {}
    # Lists may be of any length, so their entries cannot be flags that argparse knows.
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
            raise _too_many(word, command)
        known = values.parser.known_words() if hasattr(values, "parser") else parser.known_words()
        raise ParamError("command line", f"{word} is not an option{did_you_mean(word.partition('=')[0], known)}")
    if config is not None:
        if values.config:
            raise ParamError("--config", f"and {config!r} are two configurations; give only one")
        values.config = config
    return values


def _too_many(word: str, command: Parser | None) -> ParamError:
    """Return the error of a word that nothing takes."""
    fix = "remove it"
    if command is not None and command.takes_config and (word in preset_names() or Path(word).is_file()):
        fix = "a preset or a file stands directly after the command, before all flags"
    return ParamError("command line", f"{word!r} is one word too many; {fix}")


def add_flags(parser: Parser, *, takes_config: bool = False) -> None:
    """Add --config, a flag for each field of RunParams, and --help-all, which shows them all.

    takes_config: the command takes C directly after it, too.
    """
    parser.takes_config = takes_config
    about = "a YAML file or the name of a preset; flags change its values"
    if takes_config:
        about += ". The same as C directly after the command"
    parser.add_argument("--config", metavar="C", help=about)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
    groups = {section: parser.add_argument_group(title) for section, title in TITLES.items()}
    for name, field in fields(RunParams):
        group, flag = groups[name.partition(".")[0]], f"--{name.replace('_', '-')}"
        # Shown by --help-all, which puts the text back.
        text = " ".join((field.description or "").split()).replace("%", "%%")
        # SUPPRESS: a flag that is not given leaves no value, so that --config decides.
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        shown = _short_help(text, field) if name in MAIN_FLAGS else argparse.SUPPRESS
        if field.annotation is bool:
            group.add_argument(flag, action="store_const", const=True, help=shown, **options).full_help = text  # type: ignore[attr-defined]
            section, _, last = flag.rpartition(".")
            off = group.add_argument(f"{section}.no-{last}", action="store_const", const=False, **options)
            off.help = argparse.SUPPRESS
            off.full_help = f"the opposite of {flag}"  # type: ignore[attr-defined]
            continue
        # A list of texts takes several words; a list of mappings is one word of YAML.
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
            # As the help shows an unset field.
            if value in ("None", ["None"]) and type(None) in get_args(field.annotation):
                value = None
            elif isinstance(value, str) and is_yaml(field):
                value = read_yaml(value, name=name)
            changes[name] = value
    # Entries last: they change an entry of a list that another flag may have set.
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


def _short_help(text: str, field: FieldInfo) -> str:
    """Return the first sentence of a field's help, and the one that says its default; else the default itself."""
    # A sentence ends before a capital letter, so not after `e.g.` or in `0.1`.
    first, *others = re.split(r"\.\s+(?=[A-Z])", text.removesuffix("."))
    words = next((sentence for sentence in others if sentence.startswith("Default ")), "")
    words = words.removeprefix("Default ") or str(plain(field.get_default(call_default_factory=True)))
    return f"{first} (default: {words})"
