"""A file's result in the arena: what was counted, and what follows from that alone, so that anybody can check it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...params import ParamError
from ..run.files.folder import read_json, write_json
from .clock import MACHINE, PARAMETERS, RANKS, Memory, Played, as_fp32, play
from .model import BLOCKS, Block
from .step_log import Event, sent

VERSION = 2
"""Of the rules: the model, the machine and the clock. Results of different versions are not compared."""
MAX_EVENTS = 2_000
"""Of a step. The model has 13 units."""
MAY_BE_0 = ("packed", "packed_of_two", "rounded")
"""Counts of a file that rounds."""
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
with torch.device("meta"):
    ENCODER = BLOCKS * sum(p.nbytes for p in Block().parameters())
"""Bytes of the encoder. No gradient passes through it, so backward needs none of it."""


class Level(NamedTuple):
    """Something that a file can do, and the lesson that teaches it."""

    name: str
    lesson: str
    about: str


LEVELS = (
    Level("shard", "02", "at rest, the ranks share tensors between them"),
    Level("gradient flow", "03", "backward gathers no unit without a gradient, and reduces what trains alone"),
    Level("policy", "03", "fewer bytes are sent than by fully_shard, and it fits"),
    Level("prefetch", "05", "a unit is gathered while another one computes"),
    Level("accumulation", "05", "gradients of two micro-batches are reduced once"),
    Level("4 bits", "11", "frozen weights are kept and sent in less than a third of bf16's bytes"),
    Level("champion", "the final project", "the step is shorter than fully_shard's, and it fits"),
)


@dataclass(frozen=True)
class Counts:
    """Counts of a file, on three ranks where nothing else is said."""

    events: list[Event]
    accumulated: list[Event]
    """Of a step of two micro-batches."""
    whole: int
    rest: int
    rest_of_two: int
    """On two ranks."""
    packed: int
    """Bytes at rest that are not of fp32."""
    packed_of_two: int
    rounded: int
    """The count of numbers in frozen parameters that are rounded."""
    peak: int
    activations: int
    trainable: int
    """Bytes of the parameters that train."""

    @classmethod
    def of(cls, two: Mapping[str, Any], three: Mapping[str, Any]) -> Counts:
        """Return the counts of measurements on two and on three ranks."""
        names = {f.name for f in fields(cls)} - {"rest_of_two", "packed_of_two"}
        counts = {name: three[name] for name in names}
        return cls(**counts, rest_of_two=two["rest"], packed_of_two=two["packed"])

    @property
    def memory(self) -> Memory:
        """The memory that follows for any number of ranks."""
        return Memory.of({"rest": self.rest_of_two, "packed": self.packed_of_two}, vars(self))

    @property
    def stored(self) -> float:
        """The bytes, as in fp32, of all parameters in the form in which they are at rest."""
        memory = self.memory
        return min(self.whole, memory.kept + memory.shared) if self.rounded else self.whole

    @property
    def frozen_in_4_bits(self) -> bool:
        """True if all frozen weights but biases are rounded, and small at rest and in forward's gathers.

        Less than a third of bf16's bytes: 4 bits with a scale for 64 numbers take 28 %, int8 more than half.
        """
        frozen = self.whole - self.trainable
        small = max(self.stored, gathered(self, "forward")) - self.trainable < frozen / 3
        return self.rounded * torch.float32.itemsize >= 0.9 * frozen and small

    @property
    def sent(self) -> dict[str, int]:
        """The bytes that one of three ranks sends in a step, by `kind, phase`."""
        return sent(self.events, 3)


@dataclass(frozen=True)
class Result:
    """A file's counts beside those of torch's fully_shard."""

    file: str
    sha256: str
    mine: Counts
    torchs: Counts

    def played(self) -> Played:
        """Return the file's step, played on the machine."""
        return play(self.mine.events, whole=self.mine.whole)

    def torchs_played(self) -> Played:
        """Return fully_shard's step, played on the machine."""
        return play(self.torchs.events, whole=self.torchs.whole, own_stream=True)

    @property
    def fits(self) -> bool:
        """True if the large model fits into a GPU of the machine."""
        return self.mine.memory.largest >= PARAMETERS

    @property
    def number(self) -> float | None:
        """The number to beat: milliseconds of a step; None for a file with which the model does not fit."""
        return round(1e3 * self.played().seconds, 1) if self.fits else None

    @property
    def levels(self) -> list[str]:
        """The names of LEVELS that the file has reached."""
        mine, torchs = self.mine, self.torchs
        encoder = (mine.stored - mine.trainable) * ENCODER / (mine.whole - mine.trainable)
        own, others = (sum(sent(as_fp32(counts.events), 3).values()) for counts in (mine, torchs))
        alone = play(waiting_at_once(mine.events), whole=mine.whole)
        reached = {
            "shard": mine.memory.shared >= 0.1 * mine.stored,
            "gradient flow": gathered(mine, "backward") <= 1.02 * (mine.stored - encoder)
            and reduced(mine.events) <= 1.1 * mine.trainable,
            "policy": self.fits and own < others,
            "prefetch": self.played().waited < 0.9 * alone.waited,
            "accumulation": reduced(mine.accumulated) <= 1.02 * reduced(mine.events),
            "4 bits": mine.frozen_in_4_bits,
            "champion": self.fits and self.played().seconds < self.torchs_played().seconds,
        }
        return [level.name for level in LEVELS if reached[level.name]]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data: the figures for readers, and the counts from which they follow."""
        return {
            "version": VERSION,
            "machine": f"{RANKS} x {MACHINE}",
            "file": self.file,
            "sha256": self.sha256,
            "step_ms": self.number,
            "torchs_step_ms": round(1e3 * self.torchs_played().seconds, 1),
            "largest_parameters": round(self.mine.memory.largest),
            "levels": self.levels,
            "points": len(self.levels),
            "mine": asdict(self.mine),
            "torchs": asdict(self.torchs),
        }

    def write(self, path: Path) -> None:
        """Write the result."""
        write_json(path, self.to_dict())


def digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def gathered(counts: Counts, phase: str) -> int:
    """Return the bytes, as in fp32, of the whole tensors that are gathered in a phase."""
    sends = [event for event in as_fp32(counts.events) if event[0] == "send"]
    return sum(nbytes for _, kind, nbytes, when, _ in sends if kind == "all-gather" and when == phase)


def reduced(events: list[Event]) -> int:
    """Return the bytes of the whole tensors that are reduced, in forward and backward."""
    sends = [event for event in events if event[0] == "send"]
    return sum(nbytes for _, kind, nbytes, _, _ in sends if kind in ("reduce-scatter", "all-reduce"))


def waiting_at_once(events: list[Event]) -> list[Event]:
    """Return the events with each wait directly behind its send."""
    moved, number = [], 0
    for event in events:
        if event[0] == "wait":
            continue
        moved.append(event)
        if event[0] == "send":
            moved.append(["wait", number])
            number += 1
    return moved


def read_result(path: Path) -> Result:
    """Read a result, and check that its figures follow from its counts.

    Raises ParamError, which says why, for a file that is none, of other rules, or with other figures.
    """
    values = read_json(path)
    try:
        result = _result_of(values or {})
    except (KeyError, TypeError, ValueError) as error:
        raise ParamError(str(path), f"is not a result of the arena ({type(error).__name__}: {error})") from None
    for name, figure in result.to_dict().items():
        if (values or {}).get(name) != figure:
            raise ParamError(
                str(path), f"{name} is {str((values or {}).get(name))[:60]}, and its counts say {str(figure)[:60]}"
            )
    return result


def _result_of(values: Mapping[str, Any]) -> Result:
    if values["version"] != VERSION:
        raise ValueError(f"version is {values['version']!r}, and this mmfsdp has {VERSION}")
    counts = {name: _counts_of(values[name]) for name in ("mine", "torchs")}
    return Result(str(values["file"])[:200], str(values["sha256"])[:64], **counts)


def _counts_of(values: Mapping[str, Any]) -> Counts:
    numbers = {}
    for field in fields(Counts):
        if field.type == "int":
            least = 0 if field.name in MAY_BE_0 else 1
            numbers[field.name] = _natural(values[field.name], least=least)
    return Counts(events=_events_of(values["events"]), accumulated=_events_of(values["accumulated"]), **numbers)


def _events_of(rows: Any) -> list[Event]:
    if not isinstance(rows, list) or len(rows) > MAX_EVENTS:
        raise ValueError(f"events are not a list of at most {MAX_EVENTS}")
    events: list[Event] = []
    sends = 0
    for row in rows:
        match row:
            case ["compute", int(flops), "forward" | "backward" as phase] if flops >= 0:
                events.append(["compute", flops, phase])
            case ["send", str(kind), int(nbytes), "forward" | "backward" as phase, str(dtype)] if (
                kind in KINDS and nbytes >= 0
            ):
                events.append(["send", kind, nbytes, phase, dtype])
                sends += 1
            case ["wait", int(number)] if 0 <= number < sends:
                events.append(["wait", number])
            case _:
                raise ValueError(f"{json.dumps(row)[:60]} is not an event")
    return events


def _natural(value: Any, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 40:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value
