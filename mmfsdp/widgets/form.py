"""RunForm: a run's parameters as a form made from their dataclasses, as YAML, as a command line, as a batch file."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as w
import traitlets

from ..params import ParamError, RunParams, load
from ..params.flags import command_line, differences, read_command_line
from .batch import read_batch, write_batch
from .fields import Field, Row
from .refusals import closed
from .sections import Sections
from .style import Whole, note, replace_older
from .texts import Reader, TextTab
from .toolbar import Toolbar

MAIN = (
    "launch.name",
    "launch.ranks",
    "launch.executor",
    "train.steps",
    "train.batch_size",
    "train.lr",
    "model.num_latents",
    "fsdp.backend",
    "fsdp.sharding_strategy",
    "fsdp.frozen_policy",
    "fsdp.memory_budget_gib",
    "fsdp.auto_wrap_policy",
    "fsdp.mixed_precision",
)
"""Dotted names of the fields in sight unless told otherwise; the others are folded."""
MOST = 12
"""Differences that are listed."""


class RunForm(Whole):
    """All choices of a run.

    params is the last possible choice, a RunParams; error is what is wrong with the present one, or None. Both are
    traits: `form.observe(callback, "params")`.
    """

    params = traitlets.Instance(RunParams)
    error = traitlets.Instance(ParamError, allow_none=True)
    successor: Any = traitlets.Any()
    """The form that takes its place when its cell runs again."""

    def __init__(self, preset: str = "tiny", *, fields: tuple[str, ...] = MAIN, **changes: Any):
        """preset: a preset's name or a YAML file. changes: other values to begin with, by dotted name."""
        start = load(preset).change(**changes)
        self._changes, self._config, self._filling = changes, preset, False
        self._origin = (preset, load(preset))
        self._bar = Toolbar(self)
        self._sections = Sections(start, fields, changed=self._edited)
        self._below = w.HTML()
        self._texts = self._make_texts()
        pages = [w.VBox([self._sections]), *self._texts.values()]
        self._tabs = w.Tab(pages, titles=["Form", *self._texts])
        self._tabs.observe(lambda _: self._turn(), "selected_index")
        super().__init__([self._bar, self._tabs, self._below], params=start)
        self.add_class("mm-form")
        self._tell()
        replace_older(self)

    @property
    def rows(self) -> dict[str, Row]:
        """The rows made so far, by dotted name; `reveal` makes those that are folded."""
        return self._sections.rows

    def reveal(self, name: str) -> Row:
        """The row of a field, brought into sight. Raises KeyError for other names."""
        self._tabs.selected_index = 0
        self._sections.reveal(name)
        return self.rows[name]

    def text(self, label: str) -> TextTab:
        """YAML, Command line or Batch file, brought into sight."""
        self._tabs.selected_index = 1 + list(self._texts).index(label)
        return self._texts[label]

    def show(self, params: RunParams, *, config: str | None = None) -> None:
        """Fill the form with these parameters. config: the preset or file that they come from."""
        if config:
            self._config, self._origin = config, (config, params)
        self._take(params)

    def flag(self, error: ParamError | None) -> None:
        """Show what somebody else (the plan, the launch) finds wrong with the present choices, beside its field."""
        if error and "." not in error.field:
            name = next((n for n in self.rows if n.endswith(f".{error.field}")), error.field)
            error = ParamError(name, error.message)
        if not self.error:
            self._tell(error)

    def duplicate(self) -> None:
        """Go on with a copy under a new run name; what is changed from now on is shown."""
        launch = self.params.launch
        base = re.sub(r"-\d+$", "", launch.name)
        taken = (f"{base}-{i}" for i in range(2, 10_000))
        name = next(n for n in taken if n != launch.name and not (Path(launch.folder) / n).exists())
        self._origin = (launch.name, self.params)
        self._take(self.params.change(**{"launch.name": name}))

    def close(self) -> None:
        """Take it off the page, and let go of everybody who listens."""
        self.unobserve_all()
        super().close()

    def _edited(self, name: str) -> None:
        """Take the rows as they stand: new parameters, or the error beside its field."""
        if self._filling:
            return
        notes: list[str] = []
        try:
            self._take(self._chosen(name, notes), notes=notes)
        except ParamError as error:
            self.error = error
            self._tell(error)

    def _chosen(self, edited: str, notes: list[str]) -> RunParams:
        """The parameters that the rows say. A field that has no meaning any more is unset, which `notes` tells."""
        edits = self._sections.edits(self.params)
        while True:
            try:
                return self.params.change(**edits)
            except ParamError as error:
                if error.field == edited or error.field in notes:
                    raise
                why = self._meaningless(edits, error)
                if why is None:
                    raise
                edits[error.field] = Field.named(error.field).default
                notes.append(f"{error.field} is unset: it {why}")

    def _meaningless(self, edits: dict[str, Any], error: ParamError) -> str | None:
        """Why the field of an error could have no value but its default, beside the edits."""
        try:
            field = Field.named(error.field)
            return closed(self.params.change(**{**edits, error.field: field.default}), field)
        except (ParamError, KeyError, ValueError):
            return None

    def _read(self, tab: TextTab) -> None:
        """Take a text as it stands."""
        try:
            params, config = tab.read()
        except ParamError as error:
            tab.say(error)
            self.error = error
            self._tell(error)
            return
        tab.say(None)
        if config and config != self._config:
            self._config, self._origin = config, (config, load(config))
        self._take(params, by=tab)

    def _take(self, params: RunParams, *, by: TextTab | None = None, notes: list[str] | None = None) -> None:
        self._filling = True
        try:
            self._sections.fill(params)
        finally:
            self._filling = False
        for tab in self._texts.values():
            if tab is not by:
                tab.say(None)
        self.error, self.params = None, params
        self._tell(notes=notes)
        self._write(but=by)

    def _tell(self, error: ParamError | None = None, *, notes: list[str] | None = None) -> None:
        """Say beside the fields what is wrong, and below what has changed."""
        here = self._sections.say(self.params, error) or any(
            tab.error and tab is self._in_sight for tab in self._texts.values()
        )
        lines = [note(error, "error", role="alert")] if error and not here else []
        lines += [note(text, "warning", role="status") for text in notes or ()]
        label, origin = self._origin
        changed = [f"{n} {_short(a)} → <b>{_short(b)}</b>" for n, (a, b) in differences(origin, self.params).items()]
        if len(changed) > MOST:
            changed[MOST:] = [f"and {len(changed) - MOST} more"]
        if changed:
            lines.append(f'<div class="mm-quiet">Changed from {escape(label)}: {"; ".join(changed)}</div>')
        self._below.value = "".join(lines)
        self._bar.follow(self._config)

    @property
    def _in_sight(self) -> TextTab | None:
        """The text that is in sight."""
        return [None, *self._texts.values()][self._tabs.selected_index or 0]

    def _turn(self) -> None:
        """Another tab is in sight: bring it up to date, and say there what is wrong elsewhere."""
        self._write()
        if self.error:
            self._tell(self.error)

    def _make_texts(self) -> dict[str, TextTab]:
        kinds: dict[str, tuple[str, Reader, int]] = {
            "YAML": (
                "All parameters, as Save writes them.",
                lambda text: (RunParams.from_yaml_text(text), None),
                24,
            ),
            "Command line": (
                "The same run from a terminal, with what differs from its preset or file.",
                read_command_line,
                6,
            ),
            "Batch file": (
                "What sbatch receives. #SBATCH lines can be edited.",
                lambda text: (read_batch(text, self.params), None),
                24,
            ),
        }
        return {
            label: TextTab(label, about, read=read, changed=self._read, rows=rows)
            for label, (about, read, rows) in kinds.items()
        }

    def _write(self, *, but: TextTab | None = None) -> None:
        """Bring the text in sight up to date, unless it is the one that was edited or is wrong."""
        tab, locked = self._in_sight, None
        if tab is None or tab is but or tab.error:
            return
        label = next(name for name, text in self._texts.items() if text is tab)
        if label == "Batch file":
            text, locked = write_batch(self.params)
        else:
            text = self.params.to_yaml() if label == "YAML" else command_line(self.params, self._config)
        tab.write(text, locked=locked)


def _short(value: Any) -> str:
    """A value in a line, escaped."""
    text = "unset" if value is None else str(value)
    return escape(text if len(text) <= 60 else text[:57] + "...")
