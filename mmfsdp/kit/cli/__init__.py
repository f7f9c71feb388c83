"""The command line: `main` reads the words by argparse and calls the function of a command.

Flags are the fields of RunParams; a file comes first.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from ...own.calls import OwnCodeError
from ...params import ParamError, preset_names
from ...params.base import did_you_mean, without_controls
from ..run.error_kinds import error_words, kind_of
from ..run.files.reasons import ADVICE, UNKNOWN, Reason
from .flags import read_words
from .json_output import Failure, Mistake, only_json, wants_json, write
from .parser import COMMANDS, EXAMPLES, build_parser

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, as a shell has it."""
interrupts: list[int] = []
"""The signals of Ctrl-C that came. A module that one left half imported fails later, with an error that does not name
the cause."""


def note_interrupt(number: int, frame: Any) -> None:
    """Handle SIGINT as Python does, and note that it came."""
    interrupts.append(number)
    signal.default_int_handler(number, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `mmfsdp` command. Returns the exit status: 0, 1 for a failed run, 2 for a person's mistake."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        # A pipe gets each line immediately; a letter that the terminal lacks must not stop a run.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        if not wants_json(words):
            return _status(words, None)
        with only_json() as stdout:
            return _status(words, stdout)
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _status(words: Sequence[str], stdout: TextIO | None) -> int:
    """Run a command, and return its exit status. stdout: where JSON goes, if the words ask for it."""
    try:
        values = _values(words)
        values.stdout = stdout
        status = values.call(values)
        sys.stdout.flush()
        return status
    except SystemExit as exit:  # after --help
        return int(exit.code or 0)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as interrupt:
        mistake = _interrupted(str(interrupt))
    except Exception as error:
        mistake = _mistake(words[0], error)
    if stdout is not None:
        write(stdout, Failure(ok=False, error=mistake))
    return mistake.exit_code


def _values(words: Sequence[str]) -> Namespace:
    """Return the values of a command's words. Raises ParamError for a mistake in them."""
    if words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        raise ParamError("command", f"{words[0]!r} is not a command{_nearest(words[0])}")
    return read_words(build_parser(), words)


def _nearest(word: str) -> str:
    """Return what somebody may have meant by a first word that is no command."""
    if word in preset_names() or Path(word).is_file():
        name = shlex.quote(word)
        kind = "preset" if word in preset_names() else "file"
        return f" but a {kind}; `mmfsdp plan {name}` plans it, `mmfsdp run {name}` trains it"
    return did_you_mean(word, COMMANDS)


def _interrupted(words: str) -> Mistake:
    """Tell of Ctrl-C in a line, and return it. words: what to tell, if the command knows more."""
    words = words or "interrupted"
    print(f"\nmmfsdp: {words}", file=sys.stderr)
    return Mistake(field="", message=words, kind="interrupted", exit_code=INTERRUPTED)


def _mistake(command: str, error: Exception) -> Mistake:
    """Tell of an error on stderr, in a line if it is a person's to correct, and return it."""
    if interrupts:  # an import that it ended halfway fails with an error of a library
        return _interrupted("")
    message = without_controls(error_words(error))
    reason = Reason(message, kind_of(error))
    # safetensors reports a full disk with an error of its own.
    is_known = isinstance(error, (ParamError, OSError)) or ADVICE.get(reason.kind, UNKNOWN).told
    if not is_known:  # a bug, whose traceback a person should see
        print(without_controls(traceback.format_exc()), file=sys.stderr)
        return Mistake(field="", message=f"{type(error).__name__}: {message}", kind="bug", exit_code=1)
    place = f"mmfsdp {command}" if command in COMMANDS else "mmfsdp"
    print(f"{place}: {reason}", file=sys.stderr)
    if isinstance(error, OwnCodeError) and error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    if isinstance(error, ParamError):
        return Mistake(field=error.field, message=error.message, kind=reason.kind, exit_code=2)
    return Mistake(field="", message=str(reason), kind=reason.kind, exit_code=2)
