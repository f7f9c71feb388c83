"""Run folders in every half-written state: all that opens one says what it can, and raises only ParamError."""

import json
import os
import shutil
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfsdp.launch import Run
from mmfsdp.params import ParamError, RunParams
from mmfsdp.report import report_html
from mmfsdp.report.comparison import compare
from mmfsdp.runs import RunRecord, note, run_state, write_json
from mmfsdp.runs.listing import find_runs, runs_table
from mmfsdp.runs.processes import process_start
from mmfsdp.watch import Progress, Rows, Tail, first_error, follow, read_log
from tests.ruin import always, ruin, ruins

DEAD = {
    "executor": "local", "entry": "m:f", "ranks": 2, "steps": 20, "threads": 1, "timeout_min": 9, "device": "cpu",
    "pid": 2**22 + 1, "start": 0.0, "identity": "x", "created": 1.7e9, "version": "0", "commit": "",
}  # fmt: skip


@pytest.fixture
def whole(finished_run):
    """A run with one of every file."""
    folder = finished_run
    (folder / "logs").mkdir()
    RunRecord(**DEAD, host=socket.gethostname()).write(folder)
    write_json(folder / "status.json", {"status": "FAILED", "reason": "why", "rank": 1, "traceback": "T", "job": "7"})
    for rank in (0, 1):
        word = {"state": "failed", "rank": rank, "error": "E: x", "traceback": "Traceback", "time": 1.0, "pid": 3}
        write_json(folder / f"logs/rank{rank}.json", word)
        (folder / f"logs/rank{rank}.beat").write_text("step 5 compute")
        (folder / f"logs/7_{rank}_log.out").write_text("a\nTraceback (most recent call last)\nb")
    row = {"step": 3, "loss": 1.0, "time": 5.0, "samples_per_s": 3.0, "memory_bytes": 9, "startup": {"a": 1.0}}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps(row | {"step": 4}) + "\n")
    shutil.copy(folder / "metrics.jsonl", folder / "metrics-rank1.jsonl")
    note(folder, "preempted", step=3, text="so")
    (folder / "profile").mkdir()
    write_json(
        folder / "profile/rank0.json",
        {"host": "h", "seconds": 1.0, "compute_s": 1.0, "communication_s": 0.5, "exposed_s": 0.1, "lanes": {}},
    )
    return folder


FILES = (
    "params.yaml", "run.json", "status.json", "logs/rank0.json", "logs/rank1.beat", "logs/7_1_log.out", "plan.json",
    "metrics.jsonl", "metrics-rank1.jsonl", "events.jsonl", "profile/rank0.json", "result.json",
)  # fmt: skip
"""In the order in which they are written."""


def look(folder):
    """All that opens a run."""
    state = run_state(folder)
    str(state)
    runs_table(find_runs(folder.parent))
    report_html(folder)
    Tail(folder).poll(last=True)
    Rows(folder).poll()
    Progress(folder).line(state)
    first_error(folder)
    read_log(folder, 1)
    try:
        run = Run.open(folder)
        for say in (run.metrics, run.logs, run.events, run.result, run.__repr__, lambda: run.job):
            say()
        both = compare([folder, folder])
        both.html()
        both.csv()
        panel(folder)
        if state.done:
            list(follow(folder, tty=True))
        RunParams.from_yaml(folder / "params.yaml")
    except (ParamError, FileNotFoundError) as error:
        assert "\n" not in str(error)


def panel(folder):
    """What a RunPanel draws, without its thread."""
    from mmfsdp.widgets.panel import RunPanel

    shown = RunPanel(folder)
    try:
        shown._closing.set()
        shown.wait(5)
        shown._read(shown.run.state())
        shown._draw(whole=True)
    finally:
        shown.close()


WHO = {
    "dead": {}, "alive": {"pid": os.getpid(), "start": process_start(os.getpid())}, "elsewhere": {"host": "elsewhere"},
    "slurm": {"executor": "slurm"},
}  # fmt: skip


@always(120)
@given(
    st.sampled_from(list(WHO)),
    st.integers(0, 2 * len(FILES)),
    st.lists(ruins(FILES), max_size=2, unique_by=lambda ruin: ruin[0]),
)
def test_a_run_of_which_so_much_is_there_and_some_of_it_ruined(whole, who, there, wrong):
    """there: files written so far, in the order in which a run writes them; before half of them, nothing else."""
    kept = whole.with_name("kept")
    shutil.copytree(whole, kept)
    RunRecord(**DEAD | {"host": socket.gethostname()} | WHO[who]).write(whole)
    early = [str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file() and there < len(FILES) // 2]
    for name in {*FILES[there:], *early} - {*FILES[:there]}:
        (whole / name).unlink()
    if not there:
        shutil.rmtree(whole / "logs")
    try:
        for name, *how in wrong:
            if (whole / name).is_file():
                ruin(whole / name, *how)
        look(whole)
    finally:
        shutil.rmtree(whole)
        kept.rename(whole)
