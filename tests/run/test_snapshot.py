"""One look at a run: how often it opens each file, and that a state needs no files."""

import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmfsdp.kit.run.files import folder as run_files
from mmfsdp.kit.run.files.folder import MetricsWriter, metrics_of, newest_metrics, write_json
from mmfsdp.kit.run.files.reasons import DISK
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.files.snapshot import EXIT_CODE_FILE, Snapshot
from mmfsdp.kit.run.launchers.launcher import StartedRanks
from mmfsdp.kit.run.progress import part_of
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.run.state import read_ranks, run_state
from mmfsdp.kit.run.supervisor import Supervisor
from mmfsdp.kit.run.trouble import troubles
from mmfsdp.kit.run.watch import Progress
from tests.run.test_runs import record

RANKS = 64
GONE = 1.0
"""When a supervisor was started that has ended since: this process has its id now."""
opened: Counter[str] | None = None
"""Files that are opened while they are counted."""


def _count(event, arguments):
    if event == "open" and opened is not None and arguments[1] is not None:  # else it is the `os.open` within an `open`
        opened[str(arguments[0])] += 1


sys.addaudithook(_count)


@contextmanager
def counted():
    """Count all files that Python opens in this block."""
    global opened
    opened = counts = Counter()
    yield counts
    opened = None


def write_run(folder, *, state="running", **changes):
    """The folder of a run whose ranks have all reported this state, and a step."""
    (folder / "logs").mkdir()
    record(ranks=RANKS, **changes).write(folder)
    write_json(folder / "status.json", {"status": "STARTING", "job": "77", "alive": time.time()})
    for rank in range(RANKS):
        report = {"rank": rank, "state": state, "pid": 1, "start": 0.0, "time": float(rank), "error": "no"}
        write_json(folder / f"logs/rank{rank}.json", report)
        Heartbeat(folder, rank)("step 2 compute")
        MetricsWriter(folder, rank).write({"step": 1, "time": 1.0, "loss": 2.0})
    for name in ("77_0_log.out", "supervisor.log"):
        (folder / "logs" / name).write_text("step 1\n")


CASES = {
    "runs": lambda folder: write_run(folder),
    "has failed": lambda folder: write_run(folder, state="failed"),
    "is gone": lambda folder: write_run(folder, state="failed", start=GONE),
    "on another machine": lambda folder: write_run(folder, host="elsewhere"),
    "is a job": lambda folder: write_run(folder, executor="slurm"),
    "has started slowly": lambda folder: [write_run(folder), *((path).unlink() for path in folder.glob("*.jsonl"))],
}


ASKS_SLURM = pytest.param("is a job", marks=pytest.mark.real)


@pytest.mark.parametrize("case", [ASKS_SLURM, *(case for case in CASES if case != "is a job")])
def test_a_look_opens_each_file_of_a_run_once(case, tmp_path):
    """For its state, its ranks, what is wrong, its part, and its line of progress, together."""
    CASES[case](tmp_path)
    with counted() as counts:
        look = Snapshot(tmp_path)
        state = run_state(look)
        ranks = read_ranks(look, RANKS, state)
        found = troubles(look, state, ranks=ranks)
        part = part_of(look, state, ranks=ranks)
        Progress(tmp_path).line(state, look)
    assert len(ranks) == RANKS and (found or part)
    of_run = {name: count for name, count in counts.items() if Path(name).is_relative_to(tmp_path)}
    assert len(of_run) > 2 * RANKS and set(of_run.values()) == {1}, {n: c for n, c in of_run.items() if c > 1}


def test_the_state_of_a_large_run_opens_few_files(tmp_path):
    write_run(tmp_path)
    with counted() as counts:
        run_state(tmp_path)
    assert sum(name.startswith(str(tmp_path)) for name in counts) < 5, "whoever waits for it asks ten times a second"


def test_the_state_of_a_run_parses_its_newest_metrics_alone(tmp_path, monkeypatch):
    write_run(tmp_path, steps=60)
    writer = MetricsWriter(tmp_path)
    for step in range(2, 51):
        writer.write({"step": step, "time": float(step), "loss": 2.0})
    parsed_rows = []

    def parse_rows(lines):
        rows = run_files_parse_rows(lines)
        parsed_rows.extend(rows)
        return rows

    run_files_parse_rows = run_files.parse_rows
    monkeypatch.setattr(run_files, "parse_rows", parse_rows)
    assert run_state(tmp_path).step == 50
    assert [row["step"] for row in parsed_rows] == [50], "whoever waits for it asks ten times a second"


ROW, OTHER_ROW = b'{"step": 3, "loss": 1.5, "time": "late"}\n', b'{"step": 4, "loss": NaN}\n'


@pytest.mark.parametrize(
    "lines",
    [b"", b"\n\n", ROW, ROW + OTHER_ROW, ROW + OTHER_ROW[:9], ROW + b'[1]\n"text"\n', ROW + b"[" * 100_000, b"\xff\n"],
    ids=["none", "blank", "one", "two", "unfinished", "no row", "nested", "no text"],
)
def test_the_newest_metrics_are_the_last_of_all_that_can_be_read(lines):
    rows = metrics_of(lines)
    assert repr(newest_metrics(lines)) == repr(rows[-1] if rows else {})


class GoingOn(StartedRanks):
    """Ranks of which none has ended."""

    job_id = "1"

    def done(self) -> bool:
        return False


def test_the_supervisor_reads_each_report_once_a_look(tmp_path):
    write_run(tmp_path)
    supervisor = Supervisor.__new__(Supervisor)  # without its signal handlers
    supervisor.folder, supervisor.record = tmp_path, record(ranks=RANKS)
    supervisor.launcher = SimpleNamespace(here=False)
    before = supervisor.look()
    assert len(before.reports) == RANKS
    with counted() as counts:
        look, silent_ranks = supervisor.look_again(before, GoingOn())
        assert supervisor.failure(look, silent_ranks, GoingOn()) is None
        assert all(report["state"] == "running" for report in look.reports)
    reports = {name: count for name, count in counts.items() if re.search(r"rank\d+\.json$", name)}
    assert len(reports) == RANKS and set(reports.values()) == {1}


def test_a_state_needs_no_files():
    """It is a function of what was read."""
    look = Snapshot("nowhere")
    look.record, look.values = record(ranks=2, steps=4, start=GONE), {"status": "RUNNING"}
    look.reports = [{"rank": 0, "state": "done"}, {"rank": 1, "state": "failed", "error": "OSError: x", "kind": DISK}]
    state = run_state(look)
    assert (state.status, state.rank, state.why.kind, state.steps) == (Status.FAILED, 1, DISK, 4)
    look.reports = [{"rank": 0, "state": "done"}, {"rank": 1, "state": "done"}]
    assert run_state(look).status is Status.COMPLETED


def test_a_look_reads_what_is_written_last_first(tmp_path):
    """Whatever is asked for first: else a run could seem to have ended without what it wrote before its end."""
    write_run(tmp_path)
    (tmp_path / "logs" / EXIT_CODE_FILE).write_text("0\n")
    with counted() as counts:
        look = Snapshot(tmp_path)
        look.rows(1)
        look.beat(1)
    names = [Path(name).name for name in counts if name.startswith(str(tmp_path))]
    assert names == ["run.json", "status.json", "metrics-rank1.jsonl", EXIT_CODE_FILE, "rank1.json", "rank1.beat"]
