"""Parameters as flags of a command line. tyro makes the flags from the models; it is imported when needed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import NoReturn

from .base import ParamError, read_yaml
from .run import RunParams, load

YAML_FLAGS = ("data.more", "model.config", "model.picture", "model.vision.config", "model.language.config")
"""Fields that hold mappings, and can be given as YAML: --data.more '[{source: json, path: docs.jsonl}]'."""


class Flags(argparse.ArgumentParser):
    """Flags that are no parameters. `parse_known_args` takes them out of the words and returns the other words."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ParamError rather than exit."""
        raise ParamError("command line", message)


def count(text: str) -> int:
    """Return the number from 1 that a flag gives; argparse words the error."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def read_words(
    words: Sequence[str], *, default: RunParams | None = None, prog: str = "mmfsdp"
) -> tuple[RunParams, str | None]:
    """Return the parameters that flags say on top of --config, or else of `default`; and the value of --config.

    --help prints all flags with the values of --config, and exits. Raise ParamError for a mistake.
    """
    import tyro

    flags = Flags()
    flags.add_argument("--config")
    for name in YAML_FLAGS:
        flags.add_argument(f"--{name}", dest=name)
    taken, others = flags.parse_known_args(list(words))
    base = load(taken.config) if taken.config else default or RunParams()
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            choices = tyro.conf.EnumChoicesFromValues
            params = tyro.cli(RunParams, args=others, default=base, prog=prog, config=(choices,))
    except SystemExit as exit:
        if exit.code == 0:  # after --help
            raise
        raise _explain(printed.getvalue()) from None
    from_yaml = {}
    for name in YAML_FLAGS:
        text = getattr(taken, name)
        if text is not None:
            from_yaml[name] = read_yaml(text, name=name)
    return params.change(**from_yaml), taken.config


def _explain(printed: str) -> ParamError:
    """Return the error that tyro printed as several lines in a frame."""
    lines = [line.strip(" │|") for line in printed.splitlines()[1:]]  # the first is a title
    text = " ".join(line for line in lines if re.search(r"\w", line))
    text = re.split(" (?:For full|Argument) helptext", text)[0]
    about_value = re.fullmatch(r"Error parsing (?:RunParams: |--)?([\w.-]+): (?:([\w.]+): )?(.*)", text)
    if about_value:
        name, field, message = about_value.groups()
        if field:  # of a ParamError, in the section of this name
            name = f"{name}.{field}"
        return ParamError(name.replace("-", "_"), message)
    unknown = re.fullmatch(r"(.*) Perhaps you meant: (--\S+) .*", text)
    if unknown:
        text = f"{unknown[1]}; did you mean {unknown[2]}?"
    elif text.startswith("Unrecognized options: --conf"):  # not one of tyro's flags
        text += "; did you mean --config?"
    return ParamError("command line", text)
