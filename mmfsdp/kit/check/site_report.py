"""SiteReport: the lines of a check, as text, as JSON and as a table for a notebook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ...params.base import without_controls
from ..verify.lines import WRONG, Report, to_plain

_LEFT = "text-align:left;vertical-align:top"
"""Style of a cell, written out: a notebook need not have a style sheet of ours."""


@dataclass(frozen=True, repr=False)
class SiteReport(Report):
    """The lines of a check. Its text is what `mmfsdp check` prints; a notebook shows a table."""

    places: tuple[str, ...] = ()
    """The place at which each line was found."""
    folder: str = ""
    """The run folder of the ranks, with their logs and facts; empty if it is deleted."""
    machine: Mapping[str, float] = field(default_factory=dict)
    """Figures for plans that the ranks have measured, by the names of `predict.Machine`'s fields."""

    def __str__(self) -> str:
        text, before = [], ""
        for place, line in zip(self.places, self.lines, strict=True):
            if place != before:
                text.append(heading(place))
            text.append(str(line))
            before = place
        return "\n".join([*text, self.summary()])

    def __repr__(self) -> str:
        return str(self)

    def summary(self) -> str:
        """Return how many lines are wrong, and where the logs are."""
        if self.ok:
            return f"nothing is wrong in {len(self.lines)} checks"
        names = ", ".join(dict.fromkeys(line.code for line in self.wrong))
        logs = f"; the ranks' logs are in {self.folder}/logs" if self.folder else ""
        return without_controls(f"{len(self.wrong)} of {len(self.lines)} checks failed: {names}{logs}")

    def to_json(self) -> str:
        """Return the report as JSON; see `to_dict`."""
        return json.dumps(self.to_dict(), indent=1)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values: ok, folder, machine, and the lines, each with `where`."""
        lines = []
        for place, line in zip(self.places, to_plain(self.lines), strict=True):
            lines.append({"where": place, **line})
        return {"ok": self.ok, "folder": self.folder, "machine": dict(self.machine), "lines": lines}

    def table(self) -> str:
        """Return the lines as a table of HTML. A place is named in its first line; without a fix there is no column."""
        from ..widgets.markup import table_of_cells  # of notebooks, which a terminal does without

        heads = ["state", "where", "check", "found"]
        if any(line.fix for line in self.lines):
            heads.append("what to do")
        rows, before = [], ""
        for place, line in zip(self.places, self.lines, strict=True):
            state = f"<b>{escape(line.level)}</b>" if line.level == WRONG else escape(line.level)
            texts = ("" if place == before else place, line.code, line.message, line.fix)
            before = place
            cells = [state, *(escape(without_controls(text)) for text in texts[: len(heads) - 1])]
            rows.append("".join(f"<td style='{_LEFT}'>{cell}</td>" for cell in cells))
        head = [f"<div style='{_LEFT}'>{name}</div>" for name in heads]
        return table_of_cells(head, rows, label="what the check has found", look="mm-check-table")

    def _repr_html_(self) -> str:
        """Return the table, and how many lines are wrong, as a notebook shows them."""
        return f"{self.table()}<p role='status'>{escape(self.summary())}</p>"


def heading(place: str) -> str:
    """Return the line above those that were found in one place."""
    return without_controls(f"-- {place} --")
