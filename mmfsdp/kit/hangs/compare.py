"""Compare what the ranks have entered: which rank is missing, in which collective the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .entered import DEFAULT_GROUP, Entry, RankRecord

MISSING, DIFFERENT, STOPPED, NO_END = "missing", "different", "stopped", "no end"
"""Kinds of hang: a rank never entered a collective; it is in another one; its process does not run; all have entered
the same collective, which does not end."""
CROSSED, UNKNOWN_GROUP = "crossed", "unknown group"
"""Two more: ranks wait for each other, in collectives of different groups; and ranks wait in a group of which nobody
knows all ranks, so that nobody knows who is missing."""
SAME_BYTES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
"""Collectives in which the full tensor has the same size on all ranks."""
ENDED = "ended"
"""State of a rank that came to its end, in the place of the state of its process."""
STOPPED_PROCESS = ("stopped", "tracing-stop", "disk-sleep", "dead", "zombie")

LAST_ENTRIES = 3
"""Collectives that a rank may have started since the one that failed."""

Fit = Callable[[Sequence[Entry]], int]
"""The number of last entries of a list that follow each other in the plan; 0 if the last one is not in it."""


@dataclass(frozen=True)
class Hang:
    """A hang, and the rank that the others wait for."""

    kind: str
    missing: tuple[int, ...]
    """The ranks that the others wait for; none where all wait in the same collective."""
    waiting: tuple[int, ...]
    """The ranks that wait in the collective."""
    history: tuple[Entry, ...] = ()
    """Collectives that the first of them has entered; in the last of them it waits. Empty if nobody waits."""
    instead: tuple[Entry, ...] = ()
    """Collectives that the missing rank has entered, up to the one that differs. Empty if it is in none, or not known.
    Of ranks that wait for each other: what the second of them has entered."""
    process: str = ""
    """The state of the process of a rank that is stopped."""

    @property
    def rank(self) -> int | None:
        """The first of the ranks that the others wait for."""
        return self.missing[0] if self.missing else None


def find_hang(records: Mapping[int, RankRecord], fit: Fit) -> Hang | None:
    """Return who is missing among the ranks of a run that hangs; None if the lists do not tell.

    records: by rank, of all ranks. fit: how well a list of entries fits the plan.
    """
    answered = {rank: record for rank, record in records.items() if record.answered}
    for rank, record in records.items():
        if record.process in STOPPED_PROCESS:
            return _stopped((rank,), record.process, answered)
    ended = tuple(rank for rank, record in records.items() if record.process == ENDED)
    if ended:
        return _stopped(ended, ENDED, answered)
    if len(answered) < len(records) or len(answered) < 2:
        return None
    return _different(answered, fit) or _missing(answered)


def find_departure(records: Mapping[int, RankRecord], fit: Fit, crashed: Collection[int] = ()) -> Hang | None:
    """Return which rank left the others' order, where the ranks have failed and some of them cannot be asked any more.

    gloo ends a process that gets more bytes than it awaits, as in a collective of another size.

    crashed: the ranks that were ended so. Others that did not answer were stopped for the failure, and may be innocent.
    """
    answered = {rank: record for rank, record in records.items() if record.entries}
    if len(answered) > 1 and (hang := _different(answered, fit)):
        left_in = hang.instead[-1]._replace(done=False)  # it ended since it failed
        return replace(hang, instead=(*hang.instead[:-1], left_in))
    for rank, record in answered.items():
        others = tuple(other for other in records if other != rank)
        for end in range(max(1, len(record.entries) - LAST_ENTRIES), len(record.entries)):
            before, entry = record.entries[:end], record.entries[end]
            expected = expected_next(before)
            if expected is not None and _signature(expected) != _signature(entry):
                expected = expected._replace(number=entry.number)
                return Hang(DIFFERENT, (rank,), others, (*before, expected), (*before, entry._replace(done=False)))
    silent = tuple(rank for rank in records if rank not in answered)
    if not answered or not silent or not set(silent) <= set(crashed):
        return None
    # Those that could tell did what they had done in earlier steps.
    return Hang(DIFFERENT, silent, tuple(answered), next(iter(answered.values())).entries)


def find_ended(records: Mapping[int, RankRecord]) -> Hang | None:
    """Return which rank came to its end before the others, whose collectives then failed; None if none did."""
    ended = tuple(rank for rank, record in records.items() if record.process == ENDED)
    answered = tuple(rank for rank, record in records.items() if record.entries)
    if not ended:
        return None
    history = records[answered[0]].entries if answered else ()
    return Hang(STOPPED, ended, answered, history, process=ENDED)


def expected_next(history: Sequence[Entry]) -> Entry | None:
    """Return what came after these entries the last time that as many as possible of them came in this order."""
    best, longest = None, 0
    for end in range(len(history) - 1, 0, -1):
        length = 0
        while length < end and _signature(history[end - 1 - length]) == _signature(history[-1 - length]):
            length += 1
        if length > longest:
            best, longest = history[end], length
    return best


def _stopped(ranks: tuple[int, ...], process: str, answered: Mapping[int, RankRecord]) -> Hang:
    waiting = _waiting(answered)
    history = _until(answered[waiting[0]].entries, answered[waiting[0]].waits_in) if waiting else ()
    return Hang(STOPPED, ranks, waiting, history, process=process)


def _different(records: Mapping[int, RankRecord], fit: Fit) -> Hang | None:
    """Return the first collective of a group in which the ranks have entered different ones under one number."""
    by_number: dict[tuple[str, int], dict[int, Entry]] = {}
    for rank, record in records.items():
        for entry in record.entries:
            by_number.setdefault((entry.group, entry.number), {})[rank] = entry
    for entries in by_number.values():  # in the order in which the first rank has entered them
        if len({_signature(entry) for entry in entries.values()}) < 2:
            continue
        histories = {rank: _until(records[rank].entries, entry) for rank, entry in entries.items()}
        alike: dict[tuple[str, int], list[int]] = {}
        for rank, entry in entries.items():
            alike.setdefault(_signature(entry), []).append(rank)
        # Right is what came next in earlier steps; else what follows the plan for longest; else what most have entered.
        order = sorted(
            alike.values(),
            key=lambda ranks: (repetition(histories[ranks[0]]), fit(histories[ranks[0]]), len(ranks)),
            reverse=True,
        )
        right, wrong = order[0], order[-1]
        return Hang(DIFFERENT, tuple(wrong), tuple(right), histories[right[0]], histories[wrong[0]])
    return None


def repetition(history: Sequence[Entry]) -> int:
    """Return 1 if the last entry is what came next in earlier steps, else 0."""
    expected = expected_next(history[:-1])
    return int(expected is not None and _signature(expected) == _signature(history[-1]))


def _signature(entry: Entry) -> tuple[str, int]:
    return entry.kind, entry.nbytes if entry.kind in SAME_BYTES else 0


def _missing(records: Mapping[int, RankRecord]) -> Hang | None:
    """Return the rank at the end of the chain of those that wait for each other."""
    waiting = _waiting(records)
    if not waiting:
        return None
    first, chain = waiting[0], list[int]()
    while first not in chain:
        chain.append(first)
        entry = records[first].waits_in
        assert entry is not None
        members, all_known = _members(records, entry.group)
        absent = [rank for rank in members if records[rank].last_number(entry.group) < entry.number]
        history = _until(records[first].entries, entry)
        if not absent:
            return Hang(NO_END if all_known else UNKNOWN_GROUP, (), waiting if all_known else (first,), history)
        free = [rank for rank in absent if records[rank].waits_in is None]
        if free:
            in_it = tuple(rank for rank in records if rank not in absent and records[rank].waits_in == entry)
            # The first collective that the rank lacks: others may have started more than one before they wait.
            return Hang(MISSING, tuple(free), in_it or (first,), history)
        first = absent[0]
    cycle = chain[chain.index(first) :]
    first, second = (cycle * 2)[:2]
    history = _until(records[first].entries, records[first].waits_in)
    instead = _until(records[second].entries, records[second].waits_in)
    return Hang(CROSSED, (), tuple(cycle), history, instead)


def _waiting(records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    return tuple(rank for rank, record in records.items() if record.waits_in is not None)


def _members(records: Mapping[int, RankRecord], group: str) -> tuple[list[int], bool]:
    """Return the ranks of a group, and whether these are all; else they are those that have entered its collectives."""
    if group == DEFAULT_GROUP:
        return list(records), True
    named = {rank for record in records.values() for rank in record.groups.get(group, ())}
    members = []
    for rank, record in records.items():
        if rank in named or record.last_number(group):
            members.append(rank)
    return members, bool(named)


def _until(entries: Sequence[Entry], last: Entry | None) -> tuple[Entry, ...]:
    """Return the entries up to one of them."""
    return tuple(entries[: entries.index(last) + 1]) if last is not None else ()
