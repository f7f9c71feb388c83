"""Run folders in every half-written state: all that opens one says what it can, and raises only ParamError."""

import json
import random
import shutil

import pytest

from mmfsdp.launch import Run
from mmfsdp.params import ParamError, RunParams
from mmfsdp.report import report_html
from mmfsdp.report.comparison import compare
from mmfsdp.runs import RunRecord, note, run_state, write_json
from mmfsdp.runs.listing import find_runs, runs_table
from mmfsdp.watch import Progress, Rows, Tail, first_error, follow, read_log

ODD = [
    None,
    True,
    -1,
    0,
    3.5,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [1],
    {},
    {"a": {}},
    [[None]],
    "\x1b[31m",
]
DEAD = {
    "executor": "local", "entry": "m:f", "ranks": 2, "steps": 20, "threads": 1, "timeout_min": 9, "device": "cpu",
    "pid": 2**22 + 1, "start": 0.0, "identity": "x", "created": 1.7e9, "version": "0", "commit": "",
}  # fmt: skip


@pytest.fixture
def whole(finished_run):
    """A run with one of every file."""
    import socket

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
    "run.json", "params.yaml", "status.json", "logs/rank0.json", "logs/rank1.beat", "logs/7_1_log.out", "plan.json",
    "metrics.jsonl", "metrics-rank1.jsonl", "events.jsonl", "result.json", "profile/rank0.json",
)  # fmt: skip


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


def ruined(data: bytes):
    """Ways in which a file can be wrong; None: missing, a folder in its place."""
    yield from (None, "folder", b"", b"[1, 2]\n", b"\xff\xfe\x00", b'{"a": 1}\n', b"[" * 100_000)
    yield data[: len(data) // 2]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_cut_garbage_or_a_folder(whole, name):
    path = whole / name
    data = path.read_bytes()
    for way in ruined(data):
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way is not None:
            path.write_bytes(way)
        look(whole)
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(data)


def test_values_of_wrong_types(whole):
    rng = random.Random(20)
    files = [name for name in FILES if name.endswith((".json", ".jsonl"))]
    for _ in range(50):
        path = whole / rng.choice(files)
        data = path.read_text()
        lines = [data] if path.suffix == ".json" else data.splitlines()
        at = rng.randrange(len(lines))
        found = json.loads(lines[at])
        place = found
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            break
        place[key] = rng.choice(ODD)
        lines[at] = json.dumps(found)
        path.write_text("\n".join(lines) + "\n")
        try:
            look(whole)
        except Exception as error:
            raise AssertionError(f"{path.name}: {key} = {place[key]!r}: {type(error).__name__} {error}") from error
        path.write_text(data)
