"""Hangs by their names: planted in a loop of one's own on real ranks, each run beside the others."""

import re

import pytest

from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.state import run_state
from mmfsdp.kit.run.trouble import troubles
from tests.waiting import light, runs_of

pytestmark = pytest.mark.real

OWN = r"\(hang_entries.py, line \d+\)"
SAME_UNITS, THE_LINE = "run forward and backward of the same units on all ranks", "look at the line where it is"
SILENCE_S = 20
"""Ranks import for at most five times as long: a dozen of them do on two busy cores."""
SLEEPS = (
    1,
    r"rank 1 never entered the all-gather of the root unit in forward \(collective \d+\), in which rank 0 waits; it is "
    rf"in loop {OWN}, where it waits for its data workers; no rank has reported for launch.silence_s, \d+ s "
    r"\(rank 1: step 2 compute\)",
    THE_LINE,
)
HANGS = {
    "sleeps": SLEEPS,
    "sleeps_in_ours": SLEEPS,
    "no_picture": (
        1,
        r"rank 1 never entered the all-gather of vision\.0 in forward \(collective \d+\), in which rank 0 waits; "
        rf"it is in an all-reduce of 4 B instead, called in loop {OWN}; no rank",
        SAME_UNITS,
    ),
    "stops": (
        1,
        r"the process of rank 1 is stopped \(SIGSTOP\); rank 0 waits for it in the all-gather of the root unit in "
        r"forward \(collective \d+\); no rank",
        "kill -CONT",
    ),
    "skips_backward": (
        1,
        r"rank 1 never entered the all-gather of layers\.1 in backward \(collective \d+\), in which rank 0 waits; "
        rf"it is in an all-reduce of 4 B instead, called in loop {OWN}; no rank",
        SAME_UNITS,
    ),
    "evaluates": (
        0,
        r"rank 0 never entered the all-reduce of 4 B \(collective \d+\), in which rank 1 waits; "
        rf"it is in the all-gather of the root unit in forward instead, called in evaluate {OWN}; no rank",
        SAME_UNITS,
    ),
}
"""Fault -> the rank that is to blame, what is said of it, and what to do."""
FAILS = (
    r"rank 1 never entered the all-gather of vision\.0 in forward \(collective \d+\), in which rank 0 waits; "
    r"it is in (another collective|an all-gather of 16\.4 KiB) instead.*; then rank \d"
)


OF_THREE = (
    r"rank 1 never entered the all-reduce of 4 B \(collective \d+\), in which ranks? \d( and \d)? waits?; it is in an "
    r"all-reduce of 308 B instead.*; then rank \d"
)
CROSSED = (
    r"rank 0 waits in the all-reduce of 36 B \(collective 1 of process group \w+\) for rank 1, and rank 1 waits in the "
    r"all-reduce of 36 B \(collective 1 of process group \w+\): they use these process groups in different orders"
)


def check(run, fault: str) -> None:
    """The state, its trouble and what to do are as planted."""
    rank, words, fix = HANGS[fault]
    state = run.wait(600)
    assert state.status is Status.FAILED and state.rank == rank, f"{fault}: {state}\n{run.logs(0)}"
    assert re.match(words, state.reason), f"{fault}: {state.reason}"
    (trouble,) = troubles(run.path, run_state(run.path))
    assert trouble.rank == rank and trouble.message == state.why.text and fix in trouble.fix and fix in state.reason


def test_planted_hangs_are_named_with_rank_unit_and_line(tmp_path):
    params = light(tmp_path, **{"launch.ranks": 2, "launch.silence_s": SILENCE_S, "launch.threads": 1})
    with runs_of(params, "hang_entries") as go:
        runs = {fault: go(fault, **{"launch.name": fault}) for fault in (*HANGS, "crosses", "no_picture_in_gloo")}
        runs["logs"] = go("logs", **{"launch.name": "logs", "launch.ranks": 3})
        for fault in HANGS:
            check(runs[fault], fault)
        crossed = runs["crosses"].wait(600)
        assert crossed.rank is None and re.match(CROSSED, crossed.reason), crossed
        of_three = runs["logs"].wait(600)
        assert of_three.rank == 1 and re.match(OF_THREE, of_three.reason, re.DOTALL), of_three
        failed = runs["no_picture_in_gloo"]
        state = failed.wait(600)
        assert state.rank == 1 and re.match(FAILS, state.reason, re.DOTALL), state
        (trouble,) = troubles(failed.path, run_state(failed.path))
        assert "; then" not in trouble.message and SAME_UNITS in trouble.fix
        told = (runs["sleeps"].path / "logs/rank0.collectives.json").read_text()
        assert told.startswith('{"rank": 0, "entries": [["0", 1, "broadcast"')
