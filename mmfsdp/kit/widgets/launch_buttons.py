"""LaunchButtons: what can be done with the choices and with the newest run, as buttons of which one stands out."""

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


class LaunchButtons(w.HBox):
    """Launch while there is nothing to stop; Stop and Duplicate while a run goes on; Resume where one has failed."""

    def __init__(self, form: RunForm, starter: Starter, *, state: Callable[[], RunState | None]):
        """state: of the newest run that is shown."""
        self._form, self._starter, self._state = form, starter, state
        self.buttons: dict[str, w.Button] = {}
        for name, icon in ICONS.items():
            button = w.Button(description=name, icon=icon, tooltip=TIPS[name])
            button.on_click(lambda button: self.press(button.description))
            self.buttons[name] = button
        super().__init__(list(self.buttons.values()))
        self.add_class("mm-launch")

    def update(self) -> None:
        """Show the buttons for what can be done now."""
        state = self._state()
        names = [LAUNCH]
        if state is not None and not state.done:
            names = [STOP, DUPLICATE]
        elif state is not None and self._is_same() and not state.replay_of:
            names = [AGAIN, DUPLICATE] if state.ok else [RESUME, AGAIN]
        wrong = self._form.error is not None
        for name, button in self.buttons.items():
            button.layout.display = None if name in names else "none"
            button.button_style = "primary" if name == names[0] and name not in (STOP, AGAIN) else ""
            needs_choices = name in (LAUNCH, DUPLICATE, AGAIN)
            button.disabled = self._starter.busy or (needs_choices and wrong)

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
