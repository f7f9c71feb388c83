"""LaunchButtons: what can be done with the choices, and with the run that is shown. Each button keeps its place."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as w

from ..run.files.run_record import RunState
from .form import RunForm
from .starter import Starter

LAUNCH, STOP, RESUME, AGAIN, DUPLICATE = "Launch", "Stop", "Resume", "Run again", "Duplicate"
ICONS = {LAUNCH: "play", STOP: "stop", RESUME: "step-forward", AGAIN: "repeat", DUPLICATE: "clone"}
TIPS = {
    LAUNCH: "Start the ranks with these choices",
    STOP: "Cancel the run; its newest checkpoint stays",
    RESUME: "Go on from the newest checkpoint",
    AGAIN: "Start it anew; the earlier run is renamed",
    DUPLICATE: "Start one more run with these choices, under the next name that is free",
}
LAUNCHED = "The run below has these choices"


class LaunchButtons(w.HBox):
    """Launch, which says what has become of a run of these choices once there is one; `of_run` has the others.

    No button takes the place of another one: what cannot be done now is disabled where it stands.
    """

    def __init__(self, form: RunForm, starter: Starter, *, state: Callable[[], RunState | None]):
        """state: of the newest run that is shown."""
        self._form, self._starter, self._state = form, starter, state
        self.buttons: dict[str, w.Button] = {}
        for name, icon in ICONS.items():
            button = w.Button(description=name, icon=icon, tooltip=TIPS[name])
            button.on_click(lambda _, name=name: self.press(name))
            self.buttons[name] = button
        launch, *others = self.buttons.values()
        self.of_run = w.HBox(others)
        self.of_run.add_class("mm-of-run")
        super().__init__([launch])
        self.add_class("mm-launch")

    def update(self) -> None:
        """Enable what can be done now."""
        state, busy, wrong = self._state(), self._starter.busy, self._form.error is not None
        ran = state is not None and not state.replay_of
        is_over = state is None or state.done
        is_same = ran and self._is_same()
        possible = {
            LAUNCH: not is_same and not wrong,
            STOP: not is_over,
            RESUME: ran and is_over and not (state is not None and state.ok),
            AGAIN: is_same and is_over and not wrong,
            DUPLICATE: is_same and not wrong,
        }
        for name, button in self.buttons.items():
            button.disabled = busy or not possible[name]
        launch = self.buttons[LAUNCH]
        words, tip = LAUNCH, TIPS[LAUNCH]
        if self._starter.is_under_way("launch"):
            words = "Starting"
        elif is_same and state is not None:
            words, tip = str(state.status).capitalize(), LAUNCHED
        launch.description, launch.tooltip, launch.icon = words, tip, ICONS[LAUNCH] if words == LAUNCH else ""
        launch.button_style = "primary" if words == LAUNCH else ""

    def _is_same(self) -> bool:
        """Return True if the choices are those of the newest run."""
        launched = self._starter.launched
        return launched is None or launched == self._form.params

    def press(self, name: str) -> None:
        """Do what a button says, without waiting for it."""
        params = self._form.params
        if name == LAUNCH:
            self._starter.start(params)
        elif name == DUPLICATE:
            self._starter.start(params, adopt=False)
        elif name == AGAIN:
            self._starter.start(params.change(**{"launch.replace": True}), adopt=False)
        elif name == STOP:
            self._starter.stop()
        else:
            self._starter.resume()

    def launch(self) -> None:
        """Press Launch. A run of these choices that goes on, or has completed, is not launched again."""
        state = self._state()
        is_own_run = state is not None and self._is_same() and not state.replay_of
        if is_own_run and state is not None and (state.ok or not state.done):
            return
        self._starter.start(self._form.params)
