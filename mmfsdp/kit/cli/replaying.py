"""The commands `mmfsdp replay` and `mmfsdp record`: play a recorded run again, and make a recording of a run."""

from __future__ import annotations

from argparse import Namespace
from shlex import quote

from ..run.handle import Run
from ..run.replay.anonymous_recording import record as make_recording
from ..run.replay.recording import Recording, shipped
from ..run.replay.replay import replay as start_replay
from .planning import run_folder
from .running import follow, show


def replay(values: Namespace) -> int:
    """Play a recorded run and follow it; without a recording, list those of the package."""
    if values.recording is None:
        for name, path in shipped().items():
            show(f"{name}: {Recording.read(path).about}")
        return 0
    played = start_replay(values.recording, to=values.to, speed=values.speed)
    words = f"a replay, {values.speed:g} times as fast; in a notebook, `RunPanel({str(played.path)!r})` shows it"
    show(f"{played.path}: {words}")
    follow(played.path)
    return 0  # the replay has worked, whatever became of the recorded run


def record(values: Namespace) -> int:
    """Make a recording of a run that has ended."""
    path = make_recording(Run.open(run_folder(values.run)).path, values.to, about=values.about)
    show(f"{path}: {path.stat().st_size:,} bytes; play it with `mmfsdp replay {quote(str(path))}`")
    show("read it before you publish it: the output of your own code may contain names of people or places")
    return 0
