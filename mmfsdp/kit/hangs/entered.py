"""The collectives that a rank has entered, as its flight recorder lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ...params.base import without_controls

ITEMSIZE = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1, "Long": 8, "Int": 4}
"""Bytes of an element, by the name of a dtype in C++; a dtype of float8 has 1."""
KINDS = {"allreduce": "all-reduce", "allgather": "all-gather"}
MAX_ENTRIES = 1000
"""The newest that are kept: more than a step of most models has."""
MAX_NAME = 100
"""Characters of the name of a group, a kind or a state."""
MAX_NUMBER = 2**63
DEFAULT_GROUP = "0"
"""The name of the group of all ranks."""


class Entry(NamedTuple):
    """A collective that a rank has entered."""

    group: str
    """Name of the process group, the same on all ranks."""
    number: int
    """Number of the collective in its group, from 1."""
    kind: str
    """all-gather, reduce-scatter, all-reduce, broadcast, barrier, ... gloo's reduce-scatter is listed as all-reduce."""
    nbytes: int
    """Bytes of the full tensor: the parts of all ranks together."""
    done: bool
    """True if the collective has ended on this rank."""


@dataclass(frozen=True)
class RankRecord:
    """Hold what is known of a rank that may hang."""

    rank: int
    entries: tuple[Entry, ...] = ()
    """The newest, in the order in which it entered them; none if it did not answer."""
    process: str = ""
    """The state of a process that did not answer, as psutil names it: stopped, disk-sleep, ...; "" if it answered."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a group -> its ranks, where torch tells (not for gloo)."""
    empty: bool = False
    """True if the rank has answered that it entered nothing yet."""

    @property
    def answered(self) -> bool:
        """It has told what it entered."""
        return self.empty or bool(self.entries)

    @property
    def waits_in(self) -> Entry | None:
        """The first collective that it has entered and that has not ended."""
        return next((entry for entry in self.entries if not entry.done), None)

    def last_number(self, group: str) -> int:
        """Return the number of the last collective of a group that it entered; 0 for none."""
        return max((entry.number for entry in self.entries if entry.group == group), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        groups = {name: list(ranks) for name, ranks in self.groups.items()}
        return {
            "rank": self.rank,
            "entries": self.entries,
            "process": self.process,
            "groups": groups,
            "empty": self.empty,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankRecord:
        """Return the record whose `to_dict` gave these values. Raises ValueError for anything else."""
        try:
            entries = []
            for group, number, kind, nbytes, done in values["entries"][-MAX_ENTRIES:]:
                entries.append(_entry_of(group, number, kind, nbytes, done))
            groups = {_name(name): tuple(map(int, ranks)) for name, ranks in values["groups"].items()}
            process = _name(values["process"])
            return cls(int(values["rank"]), tuple(entries), process, groups, bool(values["empty"]))
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no record of a rank: {error}") from error


def parse(rank: int, *answers: bytes) -> RankRecord:
    """Return what a rank's server answered, which is JSON. Raises ValueError for anything else.

    answers: torch keeps NCCL's collectives in a list of their own.
    """
    rows: list[dict[str, Any]] = []
    ranks_of_groups: dict[str, tuple[int, ...]] = {}
    for answer in answers:
        try:
            values = json.loads(answer)
            rows += [row for row in values.get("entries", []) if isinstance(row, dict)]
            ranks_of_groups |= _ranks_of_groups(values.get("pg_config"))
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no list of collectives: {error}") from error
    rows.sort(key=_created)
    entries: dict[tuple[str, int], Entry] = {}
    groups: dict[str, int] = {}
    for row in rows:
        try:
            entry, group_id, is_p2p = _entry(row), int(row["pg_id"]), bool(row["is_p2p"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # a later version of torch
        if is_p2p:
            continue
        if groups.setdefault(entry.group, group_id) != group_id:  # that group was destroyed: this is another one
            entries = {key: older for key, older in entries.items() if key[0] != entry.group}
            groups[entry.group] = group_id
        entries.setdefault((entry.group, entry.number), entry)  # coalesced collectives share a number
    newest = tuple(entries.values())[-MAX_ENTRIES:]
    return RankRecord(rank, newest, groups=ranks_of_groups, empty=bool(answers) and not newest)


def _entry(row: dict[str, Any]) -> Entry:
    nbytes = max(
        _nbytes(row["input_sizes"], row["input_dtypes"]),
        _nbytes(row["output_sizes"], row["output_dtypes"]),
    )
    done = row["retired"] or row["state"] == "completed"  # gloo has no states
    group = row["process_group"][0]
    return _entry_of(group, row["collective_seq_id"], kind_of(row["profiling_name"]), nbytes, done)


def _entry_of(group: Any, number: Any, kind: Any, nbytes: Any, done: Any) -> Entry:
    """Return an entry. Raises ValueError, TypeError and OverflowError for what is no number, or none of an entry."""
    entry = Entry(_name(group), int(number), _name(kind), int(nbytes), bool(done))
    if not (0 <= entry.number < MAX_NUMBER and 0 <= entry.nbytes < MAX_NUMBER):
        raise ValueError("a number that no collective has")
    return entry


def _created(row: dict[str, Any]) -> float:
    """Return when a collective was entered, to sort by."""
    time = row.get("time_created_ns", 0)
    return time if isinstance(time, (int, float)) else 0


def _name(value: Any) -> str:
    """Return a name that comes from a file, as a person may read it: short, without control sequences."""
    return without_controls(str(value)[:MAX_NAME])


def kind_of(name: str) -> str:
    """Return the kind of a collective by its name in the list, such as all-gather of `nccl:_all_gather_base`."""
    words = name.partition(":")[2].strip("_").lower()
    for ending in ("_base", "_coalesced", "_into_tensor", "_tensor", "_single"):
        words = words.removesuffix(ending)
    return KINDS.get(words, words.replace("_", "-"))


def _nbytes(sizes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    return sum(prod(size) * ITEMSIZE.get(dtype, 1) for size, dtype in zip(sizes, dtypes, strict=False))


def _ranks_of_groups(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group. torch writes them as a text such as `[0, 1]`."""
    groups: dict[str, tuple[int, ...]] = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        try:
            ranks = tuple(map(int, json.loads(group["ranks"])))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if name and ranks:
            groups[_name(name)] = ranks
    return groups
