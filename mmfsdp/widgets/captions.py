"""What a finished run says about pictures it never saw."""

from __future__ import annotations

from pathlib import Path

import ipywidgets as w

from .. import runs
from ..plots.style import STYLE
from ..report import captions, figures, write_report
from .heavy import alone


def show_captions(path: str | Path) -> w.HTML:
    """Pictures with caption and truth, six of every split.

    The first time the checkpoint is loaded and asked, and report.html is written.

    Raises FileNotFoundError where the run has not got its result yet.
    """
    path = Path(path)
    result = runs.read_json(path / "result.json")
    if result is None:
        raise FileNotFoundError(f"{path} has no result yet: {runs.run_state(path)}")
    if "captions" not in result:
        with alone():
            from ..evaluate import caption_held_out
        result = caption_held_out(path)
    write_report(path)
    return w.HTML(STYLE + figures(result) + captions(path, each=6))
