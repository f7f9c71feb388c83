"""check: look at this machine, then at ranks on it or in a Slurm job; a line for each finding, with what to do."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from ..checks.lines import WRONG, Line, Report, to_plain
from ..params import ParamError, RunParams, load
from ..params.base import without_controls
from ..params.variables import with_variables
from ..run.interrupt import interruptible
from .check_run import LOCAL_WAIT_S, CheckRun
from .places import RUN_FOLDER
from .this_machine import machine_lines

MACHINE = "this machine"
COLORS = {"ok": "#1a7f37", "wrong": "#b42318", "note": "#6b7280"}

Show = Callable[[str, Line], object]
"""Called with where a line was found, and the line, as soon as it is there."""
Tell = Callable[[str], object]
"""Called with what the check does now."""


@dataclass(frozen=True, repr=False)
class SiteReport(Report):
    """The lines of a check. Its text is what `mmfsdp check` prints; a notebook shows a table."""

    places: tuple[str, ...] = ()
    """Of each line: where it was found."""
    folder: str = ""
    """The run folder of the ranks, with their logs and facts; empty if it is deleted."""

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
        names = ", ".join(dict.fromkeys(line.check for line in self.wrong))
        logs = f"; the ranks' logs are in {self.folder}/logs" if self.folder else ""
        return without_controls(f"{len(self.wrong)} of {len(self.lines)} checks are wrong: {names}{logs}")

    def to_json(self) -> str:
        """Return the report as JSON: ok, folder, and the lines, each with `where`."""
        lines = []
        for place, line in zip(self.places, to_plain(self.lines), strict=True):
            lines.append({"where": place, **line})
        return json.dumps({"ok": self.ok, "folder": self.folder, "lines": lines}, indent=1)

    def _repr_html_(self) -> str:
        """Return a table of the lines."""
        rows = ""
        for place, line in zip(self.places, self.lines, strict=True):
            cells = [f"<b style='color:{COLORS.get(line.state, '')}'>{escape(line.state)}</b>"]
            cells += [escape(without_controls(text)) for text in (place, line.check, line.text, line.fix)]
            rows += "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"
        heads = ""
        for name in ("", "where", "check", "found", "what to do"):
            heads += f"<th style='text-align:left'>{name}</th>"
        table = f"<table class='mm-check'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return f"{table}<p>{escape(self.summary())}</p>"


def heading(place: str) -> str:
    """Return the line above those that were found in one place."""
    return without_controls(f"-- {place} --")


def check(
    params: RunParams | str | None = None, *, cluster: str | None = None, show: Show | None = None, tell: Tell = print
) -> SiteReport:
    """Check this machine, then ranks that are started as those of a run: here, or in a Slurm job of about a minute.

    Args:
        params: The parameters of a run, or a preset or YAML file: where its ranks start, where it writes, what it needs
            of the Hugging Face hub. Default: two ranks here.
        cluster: The profile of a cluster: the ranks are a Slurm job with it.
        show: Called with where a line was found, and the line, as soon as it is there.
        tell: Called with what takes the next seconds. Default: print.

    Returns:
        The report: `.ok`, `.lines`; as text and in a notebook it is a table with what to do.

    Raises:
        ParamError: If the parameters cannot be read, or there is no such profile.
    """
    chosen = with_variables(load(params) if isinstance(params, str) else params or RunParams())
    if cluster is not None:
        chosen = chosen.change(**{"launch.executor": "slurm", "launch.cluster": cluster})
    return SiteCheck(chosen, show or (lambda place, line: None), tell).report()


class SiteCheck:
    """One check, line after line."""

    def __init__(self, params: RunParams, show: Show, tell: Tell):
        self.params, self.show, self.tell = params, show, tell
        self.found: list[tuple[str, Line]] = []
        self.folder = ""

    def report(self) -> SiteReport:
        """Do all checks. An interrupt ends the ranks, too."""
        for line in machine_lines(self.params):
            self.add(MACHINE, line)
        self.check_local_ranks()
        places, lines = zip(*self.found, strict=True)
        return SiteReport(lines=lines, places=places, folder=self.folder)

    def add(self, place: str, line: Line) -> None:
        """Keep a line, and show it."""
        self.found.append((place, line))
        self.show(place, line)

    def is_wrong(self, check: str) -> bool:
        """Return True if this check has found a fault so far."""
        return any(line.check == check and line.state == WRONG for _, line in self.found)

    def check_local_ranks(self) -> None:
        """Check ranks on this machine, in a folder of their own if runs cannot be where they should."""
        temporary = tempfile.mkdtemp(prefix="mmfsdp-check-") if self.is_wrong(RUN_FOLDER) else ""
        params = self.params.change(**{"launch.folder": temporary}) if temporary else self.params
        try:
            started = CheckRun(params)
            place = f"{started.asked.ranks} ranks on this machine"
            self.tell(f"starting {started.asked.ranks} ranks on this machine")
            started.start()
        except (ParamError, OSError) as error:
            self.add(MACHINE, Line("ranks", WRONG, f"they cannot be started: {error}"))
            return
        self.follow(started, place, LOCAL_WAIT_S)
        if temporary and not self.folder:
            shutil.rmtree(temporary, ignore_errors=True)

    def follow(self, started: CheckRun, place: str, limit_s: float) -> None:
        """Wait for the ranks, add their lines, and delete their folder unless something is wrong."""
        assert started.run is not None
        try:
            with interruptible("the ranks of the check are ended"):
                state = started.wait(self.tell, limit_s)
        except BaseException:
            started.run.cancel()
            started.remove()
            raise
        if not state.done:
            started.run.cancel()
        before = len(self.found)
        for line in started.lines(state):
            self.add(place, line)
        if any(line.state == WRONG for _, line in self.found[before:]):
            self.folder = str(started.run.path)
        else:
            started.remove()
