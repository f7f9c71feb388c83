"""The top of a form: presets, files, and a duplicate."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as w

from ..params import ParamError, load, preset_names
from .style import note

if TYPE_CHECKING:
    from .form import RunForm


class Toolbar(w.VBox):
    """Presets, files, and a duplicate."""

    def __init__(self, form: RunForm):
        self._form, self._quiet = form, False
        self._overwrite: str | None = None
        self._preset = w.Dropdown(options=preset_names(), description="preset")
        self._file = w.Text(description="file", placeholder="a YAML file, or the folder of a run")
        self._note = w.HTML()
        for field in (self._preset, self._file):
            field.style.description_width = "11em"
        self._preset.observe(lambda change: None if self._quiet else self._load(change.new, preset=True), "value")
        buttons = []
        for name, icon, about, act in (
            ("Load", "folder-open", "Fill the form from the file", lambda: self._load(self._file.value)),
            ("Save", "save", "Write the choices into the file, as YAML", self._save),
            ("Duplicate", "copy", "Go on with a copy under a new run name", form.duplicate),
        ):
            button = w.Button(description=name, icon=icon, tooltip=about)
            button.on_click(lambda _, act=act: self._try(act))
            buttons.append(button)
        row = w.HBox([self._file, *buttons])
        for box in (row, self):
            box.add_class("mm-row")
        super().__init__([w.HBox([self._preset]), row, self._note])

    def follow(self, config: str) -> None:
        """Show where the choices come from."""
        self._quiet = True
        self._preset.options = list(dict.fromkeys([*preset_names(), config]))
        self._preset.value, self._quiet = config, False

    def _try(self, act: Callable[[], None]) -> None:
        self._note.value = ""
        try:
            act()
        except (ParamError, OSError) as error:
            self._note.value = note(error, "error", role="alert")

    def _load(self, name: str, *, preset: bool = False) -> None:
        path = Path(os.path.expanduser(name))
        if (path / "params.yaml").is_file():
            name = str(path / "params.yaml")
        changes = self._form._changes if preset else {}
        self._try(lambda: self._form.show(load(name).change(**changes), config=name))

    def _save(self) -> None:
        if not self._file.value:
            self._file.value = f"{self._form.params.launch.name}.yaml"
        path = Path(os.path.expanduser(self._file.value))
        if self._form.error:
            raise self._form.error
        if path.exists() and str(path) not in (self._form._config, self._overwrite):
            self._overwrite = str(path)
            raise ParamError("file", f"{path} is there already; press Save again to replace it")
        self._form.params.to_yaml(path)
        self._form.show(self._form.params, config=str(path))
        self._note.value = note(f"saved to {path}", role="status")
