"""Cockpit: what a person chooses, what it costs, and the run, on one screen."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as w

from ...core.plan import WrapPlan
from ...params import FrozenPolicy, RunParams
from ...params.in_words import count
from ..run.files.run_record import RunState
from ..run.handle import Run
from ..run.ranks.warm import warm_up
from ..run.start import runs_folder
from ..run.state import is_run
from .all_ways import AllWays
from .cell import CellWidget, PlayHeads, close_all
from .check_button import CheckButton
from .choices import DEFAULT_MACHINE, Choices
from .controls import gib_for
from .data_look import NotYet
from .form import RunForm
from .launch_buttons import LaunchButtons
from .markup import error_note, note
from .panel import RunPanel
from .pictures.plan_pictures import plan_pictures
from .pictures.step_picture import most_drawn
from .plan_figures import Figure, figures_html, findings, plan_figures, unit_table
from .plan_page import differences_html, memory_html
from .plan_thread import BudgetRange, Planner, why_not_chosen
from .planned_run import PlannedRun
from .run_list import RunList
from .share import Share
from .starter import Starter

MIN_SHARE_OF_SCALE = 0.4
"""Of the scale of the step that was drawn before: a lower one is drawn larger."""
PICTURE_WIDTH = 826
"""Pixels beside the choices in a cell of 1083."""


class Cockpit(CellWidget):
    """Choices on the left, what they cost on the right, and the run beneath.

    `Cockpit("tiny")` begins with a preset, `Cockpit("mine.yaml")` with a file, `Cockpit("runs/tiny")` with a run, which
    is shown. Nothing here blocks the kernel but `plan`, `pin()` and `wait()`.
    """

    def __init__(self, preset_or_run: str | Path = "tiny", *, machine: str = DEFAULT_MACHINE, **changes: Any):
        """changes: other values, by dotted name. machine: where the plan shall fit, one of planned_run.PAGE_MACHINES.

        Raises ParamError for an unknown preset or a wrong value.
        """
        self.form = RunForm(str(preset_or_run), folded=True, **changes)
        self._pinned: PlannedRun | None = None
        self._drawing = threading.RLock()
        self.panel: RunPanel | None = None
        self.planner = Planner(self.form, show=self._draw)
        self.budgets = BudgetRange(self.form, show=self._show_budgets)
        self.top_bytes = 0  # of the step that is drawn: pictures that follow keep its scale
        self.starter = Starter(self.form, show=self._show_run)
        self.choices = Choices(self.form, machine=machine, redraw=self._draw)
        self._shown: Run | None = None  # the run of the panel
        self.buttons = LaunchButtons(self.form, self.starter, state=self._run_state)
        self._make_parts()
        super().__init__([self._top, self.message, self._drawers, self._main, self._below])
        self.add_class("mm-cockpit")
        self.form.observe(lambda _: self.starter.forget(), "params")
        self.form.observe(lambda _: self._chosen(), ["params", "error", "allowed"])
        folder = Path(preset_or_run).expanduser()
        if is_run(folder):
            self.starter.run = Run.open(folder)
            self._show_run()
        else:
            self.starter.find(self.params)
        self.replace_older()
        self._chosen()

    # What a notebook calls

    @property
    def params(self) -> RunParams:
        """The choices, as far as they are valid."""
        return self.form.params

    @property
    def plan(self) -> WrapPlan:
        """The plan of the present choices; waits for it. Raises what keeps it from being made."""
        self.budgets.wait_for_work()
        return self.planner.wait().plan

    @property
    def run(self) -> Run | None:
        """The newest run; None before there is one."""
        return self.starter.run

    def choose(self, **values: Any) -> None:
        """Change choices by their dotted names, as a person does: `choose(**{"fsdp.frozen_policy": "KEEP"})`.

        Raises the mistake, if there is one.
        """
        for name, value in values.items():
            self.form.choose(name, value)
        if self.form.error and not self.budgets.busy:
            raise self.form.error

    def pin(self, pinned: bool = True) -> None:
        """Keep the present plan beside those that follow, or let go of it. Waits for the plan."""
        self._pinned = self.planner.wait() if pinned else None
        self.pin_toggle.value = pinned
        self._draw()

    def launch(self) -> None:
        """Start a run with the present choices, and return immediately.

        One with the same choices that goes on, or has ended well, is shown instead.
        """
        self.buttons.launch()

    def wait(self) -> RunState:
        """Wait until the newest run is over. Raises the error that kept it from starting.

        Interrupting the cell ends the waiting, not the run.
        """
        self.starter.wait()
        assert self.panel is not None
        return self.panel.wait()

    def close(self) -> None:
        """Remove it; runs go on."""
        self.planner.end_work()
        self.budgets.end_work()
        self.starter.end_work()
        close_all(self.buttons.of_run)  # no panel may have them yet
        super().close()

    # Parts

    def _make_parts(self) -> None:
        self._summary = w.HTML()
        self.all_choices = w.ToggleButton(
            description="All choices", icon="sliders", tooltip="Every parameter, with a search"
        )
        self._sharing = w.ToggleButton(description="YAML, command", icon="share-alt", tooltip="The same run elsewhere")
        self.pin_toggle = w.ToggleButton(
            description="Pin", icon="thumb-tack", tooltip="Compare what follows with this plan"
        )
        self.pin_toggle.observe(lambda change: self._pressed_pin(change.new), "value")
        self.listing = w.ToggleButton(description="Runs", icon="list", tooltip="Open, compare and delete runs")
        for toggle in (self.all_choices, self._sharing, self.listing):
            toggle.observe(lambda _: self._show_drawers(), "value")
        toggles = (self.all_choices, self._sharing, self.listing, self.pin_toggle)
        self._top = w.HBox([self.form.preset, self._summary, *toggles, self.buttons])
        self._top.add_class("mm-cockpit-top")
        self.message = w.HTML()
        self._share = Share()
        self.run_list = RunList(
            folder=lambda: runs_folder(self.params.launch), show=self.starter.open, deleted=self._run_deleted
        )
        self._drawers = w.VBox([self.form, self._share, self.run_list])
        self.figures, self.pictures, self._details = w.HTML(), w.HTML(), w.HTML()
        self.stale = w.HTML()
        self.stale.add_class("mm-stale-words")
        self.figures.add_class("mm-cockpit-figures")
        self.activations = w.Checkbox(False, description="activations", indent=False)
        self.activations.observe(lambda _: self._draw(), "value")
        self.all_ways = w.ToggleButton(description="All ways", tooltip="What each way to shard sends and holds")
        self.all_ways.observe(lambda _: self._draw(), "value")
        self.all_ways.add_class("mm-all-ways")
        self.ways = AllWays(choose=self.choose)
        self.ways.layout.display = "none"
        drawn = [self.figures, self.activations, self.pictures, self.all_ways, self._details, self.ways, PlayHeads()]
        self.right = w.VBox([self.stale, *drawn])
        self.right.add_class("mm-cockpit-right")
        self._main = w.Box([self.choices, self.right])
        self._main.add_class("mm-cockpit-main")
        self._check = CheckButton(self.form)
        self._no_run = w.HTML()
        self._below = w.VBox([self._no_run, self._check])
        self._show_drawers()

    def _show_drawers(self) -> None:
        if self.all_choices.value:
            self.form.unfold()
        self.form.layout.display = None if self.all_choices.value else "none"
        self._share.layout.display = None if self._sharing.value else "none"
        if self._sharing.value:
            self._share.show(self.form.preset.value, self.params)
        if self.listing.value and self.run_list.layout.display:
            self.run_list.refresh()
        self.run_list.layout.display = None if self.listing.value else "none"

    # What changes

    def _chosen(self) -> None:
        """Show the choices, and plan them."""
        self.choices.show()
        self.buttons.update()
        self._check.update()
        if self._sharing.value:
            self._share.show(self.form.preset.value, self.params)
        if self.form.error is None:
            self.planner.request(self.params)
        if self._wants_budget() or self.params.fsdp.frozen_policy is FrozenPolicy.AUTO:
            self.budgets.request(self.params)
            self._show_budgets()
        else:
            self._draw()

    def _wants_budget(self) -> bool:
        """Return True if AUTO was chosen, and no budget."""
        error = self.form.error
        is_missing = error is not None and error.field == self.choices.budget.name
        return is_missing and self.params.fsdp.frozen_policy is not FrozenPolicy.AUTO

    def _show_budgets(self) -> None:
        """Show what a budget lies between; where AUTO has none yet, take the one in the middle."""
        least_and_most = self.budgets.least_and_most
        self.choices.budget.show_range(least_and_most, self.params)
        if least_and_most and self._wants_budget():
            self.form.choose(self.choices.budget.name, gib_for(sum(least_and_most) / 2))
        self._draw()

    def _show_mistake(self) -> None:
        """Say beside the button what keeps a run from being launched, unless it is said below its input, too."""
        error: Exception | None = self.form.error
        if error and (isinstance(error, NotYet) or self.budgets.busy):
            error = None  # no mistake: it is being worked on
        elif self._wants_budget():
            error = self.budgets.failure or error
        error = error or self.planner.failure or self.starter.failure
        html = error_note(error) if error else ""
        if self.starter.words and not error:
            html = note(self.starter.words, role="status")
        self.message.value = html
        self.message.layout.display = None if html else "none"

    def _pressed_pin(self, pressed: bool) -> None:
        """Pin what is shown; the button does not wait for a plan that is being made."""
        self._pinned = self.planner.planned if pressed else None
        self._draw()

    def _draw(self) -> None:
        """Draw figures and pictures of the newest plan, and what differs from a pinned one. Any thread may call it."""
        with self._drawing:
            self._show_mistake()
            self.buttons.update()
            planned = self.planner.planned
            reason = why_not_chosen(self.form, self.planner, self.budgets)
            self.stale.value = note(reason, role="status") if reason else ""
            (self.right.add_class if reason else self.right.remove_class)("mm-stale")
            if planned is None:
                self.figures.value = ""
            else:
                self._draw_plan(planned, self._pinned)
            if planned is not None and not (reason or planned.counting or self.planner.busy):
                warm_up(self.params)  # while the person still chooses

    def _draw_plan(self, planned: PlannedRun, pinned: PlannedRun | None) -> None:
        plan = planned.plan
        figures = plan_figures(plan, planned.cost, pinned=(pinned.plan, pinned.cost) if pinned else None)
        self.figures.value = figures_html([_short(figure) for figure in figures])
        trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
        words = f'{count(trainable)} of {count(numel)} <span class="mm-roomy">parameters </span>train'
        if planned.counting:
            words = "counting activations…"
        self._summary.value = f'<span role="status">{words}</span>'
        self.pictures.value = plan_pictures(
            plan,
            planned.timeline,
            pinned=pinned.timeline if pinned else None,
            activations=self.activations.value,
            width=PICTURE_WIDTH,
            missing=planned.missing,
            scale_to=self._scale(planned, pinned),
        )
        self._details.value = _details(planned, pinned, self.choices.machine.value)
        self.ways.layout.display = None if self.all_ways.value else "none"
        if self.all_ways.value and planned.params == self.params and not planned.counting:
            self.ways.show(planned, self.choices.machine.value)
        self.choices.show_fit(planned)

    def _scale(self, planned: PlannedRun, pinned: PlannedRun | None) -> int:
        """Return the bytes that have room in the picture of a step: as many as before, so that its scale stays.

        It changes for what needs more, and, while nothing is pinned, for what would be drawn small.
        """
        if planned.timeline is None:
            return 0
        needed = most_drawn(planned.timeline, activations=self.activations.value)
        if needed > self.top_bytes or (pinned is None and needed < MIN_SHARE_OF_SCALE * self.top_bytes):
            self.top_bytes = needed
        return self.top_bytes

    def _show_run(self) -> None:
        """Show the newest run, once it is started."""
        run = self.starter.run
        if run is not None and run is not self._shown:
            older, self._shown = self.panel, run
            panel = self.panel = RunPanel(run.path)
            panel.actions.buttons["Cancel"].layout.display = "none"  # Stop stands beside it
            panel.top.children = [panel.top.children[0], self.buttons.of_run, panel.actions]
            panel.observe(lambda _: self.buttons.update(), "status")
            self._below.children = [panel, self._check]
            self._close_panel(older)
            if self.listing.value:
                self.run_list.refresh()
        words = "No run yet: Launch starts the ranks, here on this machine."
        if self.starter.is_under_way("find"):
            words = f"looking for a run named {self.params.launch.name} with these choices…"
        self._no_run.value = note(words, role="status")
        self._show_mistake()
        self.buttons.update()

    def _close_panel(self, panel: RunPanel | None) -> None:
        """Remove a panel, without the buttons that the next one has."""
        if panel is not None:
            panel.top.children = [child for child in panel.top.children if child is not self.buttons.of_run]
            panel.close()

    def _run_deleted(self, path: Path) -> None:
        """Show no run where the one that is shown has been deleted."""
        if self._shown is not None and self._shown.path == path:
            panel, self.panel, self._shown, self.starter.run = self.panel, None, None, None
            self._below.children = [self._no_run, self._check]
            self._close_panel(panel)
            self._show_run()

    def _run_state(self) -> RunState | None:
        """Return the state of the run that is shown."""
        return self.panel.state if self.panel else None


SHORT_LABELS = {
    "sent by each rank": "sent",
    "weights on each rank": "weights",
    "peak memory without": "peak, without",
    "peak memory, if all texts have the maximum length": "peak, longest texts",
    "peak memory of the largest of the data's ": "peak, ",
    "peak memory of the largest batch of the run": "peak, largest batch",
    "peak memory of the largest batch of the ": "peak, ",
}
"""Parts of a label -> fewer words: five figures stand side by side. The report has the long ones."""


def _short(figure: Figure) -> Figure:
    """Return a figure with a label of one line."""
    label = figure.label.partition("; ")[0]  # memory by kind has the activations
    for long, short in SHORT_LABELS.items():
        label = label.replace(long, short)
    return replace(figure, label=label)


def _details(planned: PlannedRun, pinned: PlannedRun | None, machine: str) -> str:
    """Return a line that unfolds: what the lint found, what differs from a pinned plan, memory by kind, every unit."""
    plan = planned.plan
    html = differences_html(pinned.plan, plan) if pinned else ""
    html += findings(plan) + (note(planned.rates) if planned.rates else "")
    if planned.cost.batch and planned.cost.batch_peak is None:
        html += note(f"No peak of a batch of the data: {planned.cost.batch}.")
    html += memory_html(planned, machine)
    words = "memory by kind, every unit"
    if plan.lint:
        words = f"<b>{len(plan.lint)} {'finding' if len(plan.lint) == 1 else 'findings'}</b>, {words}"
    if pinned:
        words = f"what differs from the pinned plan, {words}"
    fold = 'data-fold="plan"'
    if any(finding.level == "error" for finding in plan.lint):
        fold = 'data-fold="plan with errors" open'
    return f"<details {fold}><summary>{words}</summary>{html}{unit_table(plan)}</details>"
