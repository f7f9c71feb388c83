"""Compare: runs beside each other, to pick from and to take away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ipywidgets as w

from ..report.comparison import Comparison, compare
from ..runs import write_text
from ..runs.listing import find_runs
from .style import Whole, note, replace_older


class Compare(Whole):
    """Runs of a folder (and below it) side by side: in what they differ, their curves, which was best in what.

    `Compare("runs")` shows all there are, `Compare(["runs/a", "runs/b"])` chooses these to begin with. found is the
    Comparison on show, None where fewer than one run is chosen. Raises ValueError for a folder that is no run.
    """

    def __init__(self, runs: str | Path | Sequence[str | Path] = "runs"):
        self.found: Comparison | None = None
        named = None if isinstance(runs, (str, Path)) else [Path(run).absolute() for run in runs]
        folder = Path(runs) if isinstance(runs, (str, Path)) else (named or [Path("runs/x").absolute()])[0].parent
        if named:
            compare(named)
        there = {listed.path.absolute(): listed.name for listed in find_runs(folder)}
        there |= {path: path.name if path.parent == folder.absolute() else str(path) for path in named or []}
        chosen = tuple(named) if named else tuple(there)[:6]
        rows = min(8, max(2, len(there)))
        options = [(name, path) for path, name in there.items()]
        self._pick = w.SelectMultiple(options=options, value=chosen, rows=rows, layout=w.Layout(width="24em"))
        self._pick.tooltip = "The runs to compare; hold Ctrl or Shift to choose several"
        self._folder = folder
        self._csv = w.Button(description="Save CSV", icon="table", tooltip="Write the table beside the runs")
        self._svg = w.Button(description="Save figure", icon="line-chart", tooltip="Write the curves beside the runs")
        again = w.Button(description="Refresh", icon="refresh", tooltip="Read the runs again")
        self._note, self._page = w.HTML(), w.HTML()
        tools = w.VBox([self._csv, self._svg, again])
        top = w.HBox([self._pick, tools], layout=w.Layout(flex_flow="row wrap"))
        super().__init__([top, self._note, self._page])
        self._csv.on_click(lambda _: self._save("csv"))
        self._svg.on_click(lambda _: self._save("svg"))
        again.on_click(lambda _: self.draw())
        self._pick.observe(lambda _: self.draw(), "value")
        replace_older(self)
        self.draw()

    def draw(self) -> None:
        """Read the chosen runs and show them."""
        try:
            self.found = compare(self._pick.value) if self._pick.value else None
        except ValueError as error:  # removed meanwhile
            self.found = None
            self._say(str(error), bad=True)
            return
        self._page.value = self.found.html() if self.found else ""
        self._say("" if self.found else f"{self._folder}: choose runs above" if self._pick.options else "no runs here")
        self._csv.disabled = self._svg.disabled = self.found is None

    def _save(self, kind: str) -> None:
        assert self.found is not None
        path = self._folder / f"comparison.{kind}"
        try:
            write_text(path, getattr(self.found, kind)())
            self._say(f"written: {path}")
        except OSError as error:
            self._say(str(error), bad=True)

    def _say(self, words: str, *, bad: bool = False) -> None:
        self._note.value = note(words, "error" if bad else "quiet", role="status")
