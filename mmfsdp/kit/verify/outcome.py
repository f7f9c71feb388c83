"""Run checks on ranks of this process: the lines come back, or a person's mistake, or that a rank was left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.multiprocessing import ProcessExitedException

from ...own.calls import OwnCodeError, own_errors
from ...params import ParamError
from ..spawn_ranks import on_ranks
from .lines import WRONG, Line, from_plain, to_plain

RANKS = 2
LOST_RANKS = "ranks"
"""The check of lines where a rank was left alone."""
LOST = ("Timed out", "timed out", "Connection closed", "Connection reset", "op.preamble.length")
"""Words of gloo's errors in a rank that another one has left alone."""


def as_result(work: Callable[[], list[Line]]) -> dict[str, Any]:
    """Return the lines of some checks, or a person's mistake in them, as JSON holds it."""
    try:
        return {"lines": to_plain(work())}
    except ParamError as error:
        return {"error": [error.field, error.message, getattr(error, "traceback", "")]}
    except RuntimeError as error:
        if not is_lost(str(error)):
            raise
        return {"lost": str(error).splitlines()[0]}


def lines_from_ranks(work: Callable[..., dict[str, Any]], *args: Any, timeout_s: float) -> list[Line]:
    """Run `work(*args)`, which ends with `as_result`, on two ranks, and return the lines.

    timeout_s: seconds that a rank waits for the other one in a collective. Raises a person's mistake.
    """
    try:
        return from_plain(first_result(on_ranks(work, RANKS, *args, timeout_s=timeout_s)))
    except ProcessExitedException as error:  # gloo ends a process that gets more bytes than it waits for
        return [lost(str(error))]


def first_result(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of ranks. Raises the first person's mistake among their results."""
    for result in results:
        if "error" in result:
            field, message, text = result["error"]
            raise OwnCodeError(field, message, text) if text else ParamError(field, message)
    for result in results:
        if "lost" in result:
            return to_plain([lost(result["lost"])])
    return results[0]["lines"]


def lost(error: str) -> Line:
    """Return the line for ranks that were not in the same collective."""
    words = f"a rank was in a collective in which the other one was not ({error})"
    fix = "look for code that only one rank runs: a part that depends on the batch, a save, an evaluation"
    return Line(WRONG, LOST_RANKS, words, fix)


@contextmanager
def persons_code(field: str, words: str) -> Iterator[None]:
    """Run a person's code as `own_errors`, but leave the error of a rank that waited for another one as it is."""
    try:
        with own_errors(field, words):
            yield
    except OwnCodeError as error:
        if is_lost(error.message):
            raise RuntimeError(error.message) from None
        raise


def is_lost(message: str) -> bool:
    """Return True for gloo's error in a rank that another one has left alone."""
    return any(words in message for words in LOST)
