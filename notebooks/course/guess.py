"""Guess first: which way to hold frozen weights sends most, and what a rank then holds; then bars of all ways grow."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from mmfsdp.kit.widgets.cell import CellWidget, import_lock
from mmfsdp.kit.widgets.markup import note
from mmfsdp.kit.widgets.style import ACTIVATIONS, FROZEN, GATHERED, INK
from mmfsdp.kit.widgets.worker import Worker
from mmfsdp.params import Backend, FrozenPolicy, RunParams, load
from mmfsdp.params.in_words import size

from .checks import verdict

if TYPE_CHECKING:
    from mmfsdp.kit.train.ways import ShardingWay

UNITS = {"MiB": 2**20, "GiB": 2**30}
POLICIES = {str(policy): f"{Backend.FSDP2} {policy}" for policy in FrozenPolicy if policy is not FrozenPolicy.AUTO}
"""The frozen policies to choose between -> the names that `ways` gives them."""
ASKED = FrozenPolicy.REPLICATE
"""The policy under which a rank's weights are guessed."""
BARS = {
    "sent_bytes": ("sent by a rank in a step", GATHERED),
    "at_rest_bytes": ("weights on a rank between steps", FROZEN),
    "peak_bytes": ("peak memory of a rank", ACTIVATIONS),
}
"""Fields of a `ShardingWay` -> titles and colors of their bars."""
STYLE = f"""<style>
.mm-guess {{display: grid; gap: .4em 2em; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr))}}
.mm-guess {{max-width: 76em}} .mm-guess h4 {{margin: .4em 0 .2em}}
.mm-guess-row {{display: grid; gap: .6em; grid-template-columns: 7em minmax(0, 1fr) 5em; align-items: center}}
.mm-guess-row {{line-height: 1.2; min-height: 1.8em}}
.mm-guess-row small {{display: block; font-size: 12px; white-space: nowrap}}
.mm-guess-lane {{position: relative; height: 16px; border-left: 1px solid {INK}}}
.mm-guess-lane i {{display: block; height: 100%; width: var(--part); animation: mm-grow 1.2s ease-out}}
.mm-guess-lane b {{position: absolute; inset: -4px auto -4px var(--part); border-left: 2px dashed currentColor}}
@keyframes mm-grow {{from {{width: 0}}}}
@media (prefers-reduced-motion: reduce) {{.mm-guess-lane i {{animation: none}}}}
</style>"""


class GuessFirst(Worker, CellWidget):
    """Asks for two guesses, and shows what each way to hold frozen weights costs only once a button is pressed.

    A guess may be left out. Nothing is planned before the button is pressed.
    """

    def __init__(self, params: RunParams, *, unit: str = "MiB"):
        """unit: of the bytes that are guessed, one of UNITS."""
        self._params, self._unit = params, unit
        ranks = f"{params.launch.ranks} ranks"
        # Radio buttons hand their arrow keys to the notebook, which then leaves them.
        self.way = w.ToggleButtons(options=list(POLICIES), value=None, style={"button_width": "auto"})
        # Sent as a whole: of letters that are sent one by one, the last may come after the press of the button.
        self.size = w.Text(placeholder="a number", layout={"width": "7em"}, continuous_update=False)
        self.size.tooltip = f"{unit} of weights"
        self.button = w.Button(description="Look", icon="bar-chart", tooltip="Show what each way costs")
        self.answer, self.error_line = w.HTML(), w.HTML()
        self.button.on_click(lambda _: self.look())
        questions = [
            w.HTML(f"<b>Which way sends most in a step</b>, with {ranks}?"),
            self.way,
            w.HTML(f"<b>How many {escape(unit)} of weights</b> does a rank hold between two steps with {ASKED}?"),
            w.HBox([self.size, w.Label(unit), self.button]),
            w.HTML(note("A wrong guess is as good as a right one. Without one, press Look all the same.")),
        ]
        super().__init__([w.HTML(STYLE, layout={"display": "none"}), *questions, self.error_line, self.answer])
        self.add_class("mm-guess-first")
        self.replace_older()

    def look(self) -> None:
        """Show what each way costs, beside what was guessed."""
        self.error_line.value = ""
        try:
            nbytes = bytes_of(self.size.value, self._unit)
        except ValueError as error:
            self.error_line.value = note(error, "error", role="alert")
            return
        guessed = self.way.value
        self.answer.value = note("planning each way…", role="status")
        self.work("look", self._ways, show=lambda found: self._show(found, guessed, nbytes))

    def busy_changed(self) -> None:
        """Take one press at a time."""
        self.button.disabled = self.busy

    def _ways(self) -> list[ShardingWay]:
        with import_lock:
            from mmfsdp.kit.train.ways import ways
        return list(ways(self._params))

    def _show(self, found: list[ShardingWay], guessed: str | None, nbytes: float | None) -> None:
        by_name = {way.name: way for way in found}
        costs = {policy: by_name[name] for policy, name in POLICIES.items()}
        self.answer.value = answer_html(costs, guessed, nbytes)


def guess_first(preset: str = "tiny", *, unit: str = "MiB", **changes: Any) -> GuessFirst:
    """Ask which way to hold a preset's frozen weights sends most, and what a rank holds, before all ways are shown.

    unit: of what is guessed, MiB or GiB. changes: other values of the preset, by dotted name.
    """
    return GuessFirst(load(preset).change(**changes), unit=unit)


def bytes_of(words: str, unit: str) -> float | None:
    """Return the bytes that were typed, in a unit of UNITS; None for nothing. Raises ValueError for no such number."""
    if not words.strip():
        return None
    try:
        number = float(words.replace(",", ".").removesuffix(unit))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{words[:40]!r} is not a number of {unit}, such as 2.5; write one, or leave it empty")
    return number * UNITS[unit]


def answer_html(costs: dict[str, ShardingWay], guessed: str | None, nbytes: float | None) -> str:
    """Return what became of the guesses, and bars of what each way costs.

    Args:
        costs: The cost of each way, by its frozen policy.
        guessed: The policy that was said to send most; None without a guess.
        nbytes: Bytes that a rank was said to hold with ASKED between two steps; None without a guess.
    """
    most = max(costs, key=lambda policy: costs[policy].sent_bytes or 0)
    words = f"{most} sends most: {size(costs[most].sent_bytes or 0)} in a step."
    if guessed is not None:
        head = "Right" if guessed == most else f"You said {guessed}"
        words = f"{head}: {words}"
    at_rest = costs[str(ASKED)].at_rest_bytes or 0
    words += f" With {ASKED} a rank holds {size(at_rest)} of weights"
    words += "." if nbytes is None else f"; you said {size(nbytes)}: {verdict(nbytes, at_rest)}."
    groups = ""
    for field, (title, color) in BARS.items():
        values = {policy: getattr(way, field) or 0 for policy, way in costs.items()}
        guess = nbytes if field == "at_rest_bytes" else None
        marked = guessed if field == "sent_bytes" else None
        groups += f"<div><h4>{title}</h4>{_rows(values, color, marked=marked, guess=guess)}</div>"
    return f'<p role="status"><b>{escape(words)}</b></p><div class="mm-guess">{groups}</div>'


def _rows(values: dict[str, int], color: str, *, marked: str | None, guess: float | None) -> str:
    """Return a bar for each policy. marked: a policy that was guessed. guess: bytes that were guessed, for ASKED."""
    longest = max([*values.values(), guess or 0]) or 1
    html = ""
    for policy, nbytes in values.items():
        name, line = policy, ""
        if policy == marked:
            name += "<small>your guess</small>"
        if guess is not None and policy == str(ASKED):
            name += "<small>- - your guess</small>"
            line = f'<b style="--part: {100 * guess / longest:.1f}%" title="your guess: {size(guess)}"></b>'
        bar = f'<i style="--part: {100 * nbytes / longest:.1f}%; background: {color}"></i>'
        lane = f'<div class="mm-guess-lane" aria-hidden="true">{bar}{line}</div>'
        html += f'<div class="mm-guess-row"><span>{name}</span>{lane}<span>{size(nbytes)}</span></div>'
    return html
