"""`--json`: a command prints JSON objects on stdout, and nothing else there; errors are objects, too.

A command that has `--json` names its Answer in `add_json`, and ends with `return reply(values, ItsAnswer(...))`.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import UnsupportedOperation
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, TypeAdapter

HELP = {"-h", "--help", "--help-all", "--json-schema"}
"""Options that end a command before it does anything."""


class Answer(BaseModel):
    """The findings of a command, as one JSON object; a number that is not finite is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ok: bool
    """The exit code is 0."""


class Mistake(BaseModel):
    """The reason why a command could not do its work."""

    model_config = Answer.model_config

    field: str
    """The parameter, option or file that is wrong; empty where it is none of them."""
    message: str
    """The cause, and the fix where it is known."""
    kind: str
    """Kind of the cause, such as disk for a full disk, by which a program knows it; empty where nobody knows it."""
    exit_code: int
    """Exit code of the command: 2 for a mistake, 1 for a bug of mmfsdp, 130 after Ctrl-C."""


class Failure(Answer):
    """Say why a command could not do its work. Every command may answer with it in place of its own object."""

    error: Mistake


def schema_of(*answers: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of each object that a command prints: one of its answers, or a Failure."""
    printed: Any = Failure
    for answer in answers:
        printed = printed | answer
    return TypeAdapter(printed).json_schema(mode="serialization")


def add_json(
    command: ArgumentParser, *answers: type[BaseModel], about: str = "print one JSON object on stdout, for programs"
) -> None:
    """Add --json and --json-schema to a command, which replies with one of `answers`. about: the help of --json."""
    command.add_argument("--json", action="store_true", help=about)
    about = "print the JSON schema of what --json prints, and exit"
    command.add_argument("--json-schema", nargs=0, const=answers, action=_PrintSchema, help=about)


class _PrintSchema(Action):
    """Print the schema of the answers in its `const`, and exit."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        print(json.dumps(schema_of(*self.const), indent=1))
        parser.exit()


def reply(values: Namespace, answer: Answer) -> int:
    """Print an answer as one line of JSON on stdout, and return the exit code that it says: 0 if it is ok, else 1."""
    write(values.stdout, answer)
    return 0 if answer.ok else 1


def write(stdout: TextIO, answer: BaseModel) -> None:
    """Print an answer as one line of JSON. Letters that are not ASCII are escaped, so that any terminal takes them."""
    print(json.dumps(json.loads(answer.model_dump_json())), file=stdout, flush=True)


def wants_json(words: Sequence[str]) -> bool:
    """Return True if the words of a command ask for JSON on stdout."""
    # --help prints its text for a person, whatever else is asked.
    return "--json" in words and not HELP.intersection(words)


@contextmanager
def only_json() -> Iterator[TextIO]:
    """Give the stdout for JSON. All else that this process and its children print goes to stderr meanwhile."""
    stdout = sys.stdout
    stdout.flush()
    try:
        number = stdout.fileno()
    except UnsupportedOperation:  # no file of the system, as in a notebook: no child prints there
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    with open(os.dup(number), "w", encoding="ascii") as kept, redirect_stdout(sys.stderr):
        # Children inherit the descriptor 1, not sys.stdout: so that goes to stderr, too.
        os.dup2(sys.stderr.fileno(), number)
        try:
            yield kept
        finally:
            os.dup2(kept.fileno(), number)
