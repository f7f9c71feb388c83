"""Waiting for what other processes do; runs of `launch_entries`, which end with the test."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mmfsdp import Run, RunParams, launch
from mmfsdp.kit.run.local import stop_processes

TESTS = Path(__file__).resolve().parent


def until(condition: Callable, *, seconds: float = 600.0, words: Callable[[], str] = str):
    """Return the first true value of a condition; raise AssertionError with `words` if there is none in time."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain\n{words()}"
        time.sleep(0.05)
    return value


def light(folder: Path, **changes) -> RunParams:
    """Parameters of a run whose ranks train nothing."""
    values = {"train.steps": 5, "train.warmup_steps": 0, "train.device": "cpu", "launch.folder": str(folder)}
    return RunParams().change(**values | changes)


@contextlib.contextmanager
def runs_of(params: RunParams, entries: str = "launch_entries") -> Iterator[Callable[..., Run]]:
    """A function that launches an entry of a file of entries with changes; what is left of the runs is stopped."""
    started = []

    def go(entry: str, **changes) -> Run:
        started.append(launch(params.change(**changes), entry=f"tests.{entries}:{entry}"))
        return started[-1]

    yield go
    for run in started:
        if run.record:
            stop_processes(run.record, run.path, grace_s=0)
