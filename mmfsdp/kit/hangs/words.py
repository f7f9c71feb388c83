"""Say what hangs: who is missing, from which collective of which unit, and what that rank does instead."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.plan import ROOT
from ...params.in_words import size
from .compare import CROSSED, DIFFERENT, ENDED, MISSING, NO_END, STOPPED, UNKNOWN_GROUP, Hang
from .entered import DEFAULT_GROUP, Entry
from .order import StepOrder
from .stacks import Frame, own_frame, waits_for_workers

STOPPED_WORDS = {
    "stopped": "is stopped (SIGSTOP)",
    "tracing-stop": "is stopped by a debugger",
    "disk-sleep": "waits for a disk or a network file system",
}
NO_ORDER = StepOrder((), in_order=False)


def hang_words(hang: Hang, order: StepOrder, frames: Sequence[Frame] = ()) -> str:
    """Return a hang in a sentence. frames: the stack of the first missing rank, the innermost frame first."""
    where = f"{collective_words(hang.history, order, 'the')} ({_number(hang.history[-1])})" if hang.history else ""
    missing = ranks_words(hang.missing) if hang.missing else ""
    waiting = f"{ranks_words(hang.waiting)} {'wait' if len(hang.waiting) > 1 else 'waits'}" if hang.waiting else ""
    if hang.kind == STOPPED:
        words = f"the process of {missing} {STOPPED_WORDS.get(hang.process, 'has ended')}"
        if hang.process == ENDED:
            words = f"{missing} came to the end before the others"
        return f"{words}; {waiting} for {'it' if len(hang.missing) == 1 else 'them'} in {where}" if where else words
    if hang.kind == NO_END:
        return f"all ranks have entered {where}, and it does not end"
    if hang.kind == UNKNOWN_GROUP:
        return f"{waiting} in {where}, and which other ranks belong to that group is not known"
    if hang.kind == CROSSED:
        return _crossed_words(hang, order, where)
    words = f"{missing} never entered {where}, in which {waiting}"
    who = "it" if len(hang.missing) == 1 else f"rank {hang.rank}"
    frame = own_frame(list(frames))
    if hang.kind == DIFFERENT:
        other = collective_words(hang.instead, order) if hang.instead else "another collective"
        if hang.instead and hang.instead[-1].done:  # it has gone on since, so that its stack shows another line
            words += f"; {who} had entered {other} instead"
            return f"{words}, and is now in {frame}" if frame else words
        words += f"; {who} is in {other} instead"
        return f"{words}, called in {frame}" if frame else words
    assert hang.kind == MISSING, hang.kind
    if frame is None:
        return words
    words += f"; {who} is in {frame}"
    return f"{words}, where it waits for its data workers" if waits_for_workers(list(frames)) else words


def _crossed_words(hang: Hang, order: StepOrder, where: str) -> str:
    """Return that ranks wait for each other. where: the collective in which the first of them waits."""
    first, second = hang.waiting[:2]
    other = f"{collective_words(hang.instead, order, 'the')} ({_number(hang.instead[-1])})"
    return (
        f"rank {first} waits in {where} for rank {second}, and rank {second} waits in {other}: "
        "they use these process groups in different orders, or one of them makes a call that the other does not"
    )


def collective_words(history: Sequence[Entry], order: StepOrder, article: str = "") -> str:
    """Return the last collective of a list, such as `the all-gather of layers.7 in backward` or `an all-reduce of 4 B`.

    The unit is named only where kind and size fit the plan. article: before one that is not in the plan.
    """
    entry, planned = history[-1], order.locate(history)
    if planned is None:
        kind = entry.kind or "collective"
        article = article or ("an" if kind[0] in "aeiou" else "a")
        words = f"{article} {kind}"
        return f"{words} of {size(entry.nbytes)}" if entry.nbytes else words
    what = "the root unit" if planned.what == ROOT else planned.what
    words = f"the {planned.kind} of {what}"
    return f"{words} in {planned.phase}" if planned.phase else words


def _number(entry: Entry) -> str:
    words = f"collective {entry.number}"
    return words if entry.group == DEFAULT_GROUP else f"{words} of process group {entry.group}"


def ranks_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 0`, `ranks 0 and 2` or `ranks 0 to 6`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    if len(numbers) > 8:
        return f"{len(numbers)} ranks"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
