"""Line and Report: what each check found, and what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...params.base import without_controls
from ...params.findings import Finding
from ...params.in_words import WIDTH

OK: Final = "ok"
WRONG: Final = "wrong"
NOTE: Final = "note"


@dataclass(frozen=True)
class Line(Finding):
    """Say what one check found: `code` is the name of the check, and `level` is ok, wrong or note.

    A note is for what was not checked, and for what is no fault.
    """

    def __str__(self) -> str:
        fix = f" Fix: {self.fix}." if self.fix else ""
        text = without_controls(f"{self.level:5}  {self.code}: {self.message}.{fix}")
        return textwrap.fill(text, WIDTH, subsequent_indent=" " * 7, break_on_hyphens=False, break_long_words=False)


@dataclass(frozen=True, repr=False)
class Report:
    """The lines of all checks. Its text is what `mmfsdp verify` prints."""

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Return True if no check found a fault."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Line, ...]:
        """Return the lines of the checks that found a fault."""
        return tuple(line for line in self.lines if line.level == WRONG)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def __repr__(self) -> str:
        return f"Report({len(self.lines)} checks, {len(self.wrong)} wrong)"


def to_plain(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return lines as JSON holds them."""
    return [asdict(line) for line in lines]


def from_plain(values: Sequence[dict[str, Any]]) -> list[Line]:
    """Return the lines that `to_plain` wrote."""
    return [Line(**value) for value in values]


def merge(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """Return one line for each check: of the first rank that found a fault, else rank 0's."""
    merged = []
    for of_check in zip(*by_rank, strict=True):
        wrong = [rank for rank, line in enumerate(of_check) if line.level == WRONG]
        if not wrong:
            merged.append(of_check[0])
            continue
        line = of_check[wrong[0]]
        where = "" if len(wrong) == len(of_check) else f"rank {wrong[0]}: "
        merged.append(Line(line.level, line.code, where + line.message, line.fix))
    return merged
