"""The panel without a browser: it shows a real run, takes whatever a log may hold, and holds only so much of it."""

import os
import socket
import time
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import ipywidgets as w
import pytest

from mmfsdp import RunParams, launch
from mmfsdp.runs import Beat, MetricsWriter, RunRecord, RunState, Status, note, write_json
from mmfsdp.runs.processes import process_start
from mmfsdp.watch import LogLine, Ranks, Rows
from mmfsdp.widgets import RunPanel
from mmfsdp.widgets.audience import Audience
from mmfsdp.widgets.log import KEPT, LETTERS, LogView
from mmfsdp.widgets.ranks import grid

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def texts(widget):
    """All HTML below a widget."""
    own = [widget.value] if isinstance(widget, w.HTML) else []
    return own + [text for child in getattr(widget, "children", ()) for text in texts(child)]


def shown(widget):
    return "".join(texts(widget))


def lines_of(view):
    """The lines that a log shows, as text."""
    parser, found = HTMLParser(), []
    parser.handle_data = found.append
    parser.feed(texts(view)[-1])
    return "".join(found).split("\n")


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launches two real ranks of `launch_entries`, in place of a training."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    params = RunParams().change(**{"launch.folder": str(tmp_path), "train.steps": 5, "train.warmup_steps": 0})
    return lambda entry: launch(params, entry=f"launch_entries:{entry}")


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of two ranks that goes on as long as this process does; its name is hostile."""
    path = tmp_path / HOSTILE.replace("/", "")
    (path / "logs").mkdir(parents=True)
    RunParams().to_yaml(path / "params.yaml")
    record = {"executor": "local", "entry": "", "ranks": 2, "steps": 9, "threads": 1, "timeout_min": 1, "device": "cpu"}
    record |= {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start(os.getpid()), "identity": "x"}
    RunRecord(**record, created=time.time(), version="", commit="").write(path)
    write_json(path / "status.json", {"status": "STARTING"})
    return path


def test_a_panel_shows_a_real_run_to_its_end_and_again(start):
    run = start("talk")
    panel = RunPanel(run.path)
    assert panel.wait(60).status is Status.COMPLETED
    before = texts(panel)
    for rank in (0, 1):
        assert f"{rank} │</span> step 5 at" in "".join(before) and f"{rank} │</span> no newline" in "".join(before)
    assert "COMPLETED" in "".join(before) and "loss: 1 at first, 0.2 now" in "".join(before)
    lines = lines_of(panel.logs)
    again = RunPanel(run.path)
    again.wait(60)
    assert sorted(lines) == sorted(lines_of(again.logs)), "a panel made anew shows all there is"
    assert texts(again)[1] == before[1] and "shown anew" in shown(panel) and panel.logs.comm is None


def test_a_panel_names_the_rank_that_failed_and_its_buttons_work(start):
    run = start("fail")
    panel = RunPanel(run.path)
    assert panel.wait(60).rank == 1
    assert "rank 1" in texts(panel)[1] and "RuntimeError: the cause" in texts(panel)[1]
    assert "in fail" in shown(panel) and "mm-rank-failed" in shown(panel)
    buttons, said = panel.actions.buttons, lambda: panel.actions._note.value
    assert {name for name, button in buttons.items() if button.disabled} == {"Cancel", "Drill", "Load model"}
    assert buttons["Cancel"].tooltip == "not now: the run has ended"
    buttons["Open report"].click()
    until(lambda: "written" in said())
    assert 'iframe sandbox title="report.html"' in shown(panel)
    panel.logs.first.click()
    until(lambda: "around its first error" in shown(panel.logs))
    assert any("the cause" in line for line in lines_of(panel.logs))
    assert panel.logs._box.layout.flex_flow == "column", "its first line in view"
    buttons["Resume"].click()
    until(lambda: "resumed from the beginning" in said())
    buttons["Cancel"].click()  # it may have failed again by then: either is said
    until(lambda: "cancelled: " in said())
    assert panel.wait(60).done


def test_no_log_can_fill_memory_or_reach_the_page_as_html(folder):
    bombs = f"\x1b[2J\x1b[31m{HOSTILE}\x1b[0m\n".encode() + b"\xff\xfe\x00\n" + b"\x1b[" + b"9" * 5000 + b"m\n"
    with open(folder / "logs/7_0_log.out", "wb") as log:
        for _ in range(100):
            log.write(b"a line of a hundred megabytes\n" * 33_000 + b"x" * 10_000 + b"\n")
        log.write(b"z" * 1_000_000 + b"\n" + bombs)
        log.write(b"".join(b"\r%3d%%" % n for n in range(100)) + b"\r100%\nthe last line\n")
    note(folder, "drill", step=3, text=HOSTILE)
    MetricsWriter(folder).write({"step": 3, "time": 1.0, "loss": 1.0})
    tracemalloc.start()
    panel = RunPanel(folder)
    until(lambda: "the last line" in shown(panel))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    panel.close()
    page, lines = shown(panel), lines_of(panel.logs)
    assert lines[-2:] == ["0 │ 100%", "0 │ the last line"] and f"0 │ {HOSTILE}" in lines
    assert "[... 996,000 bytes not shown]" in page and "ansi-red-fg" in page
    assert "<script" not in page and "<img" not in page and "alert(1)" in page
    assert len(page) < 3 * LETTERS and peak < 32 << 20


def test_the_log_is_filtered_searched_and_held_still():
    view = LogView(2)
    view.add(
        [LogLine(0, "all is well"), LogLine(1, "a UserWarning: slow"), LogLine(1, "ValueError: \x1b[31mno\x1b[0m")]
    )
    view.draw()
    assert len(lines_of(view)) == 3 and shown(view).count("mm-is-") == 2
    for tool, value, left in (
        (view._rank, 0, ["0 │ all is well"]),
        (view._rank, -1, 3),
        (view._level, "errors", ["1 │ ValueError: no"]),
        (view._level, "every line", 3),
        (view._search, "ERROR: NO", ["1 │ ValueError: no"]),
        (view._search, "", 3),
    ):
        tool.value = value
        assert (len(lines_of(view)) if isinstance(left, int) else lines_of(view)) == left
    view._follow.value = False
    view.add([LogLine(0, f"{i}") for i in range(10 * KEPT)])
    view.draw()
    assert len(lines_of(view)) == 3 and "paused; 50,003 lines" in shown(view)
    view._follow.value = True
    assert lines_of(view)[-1] == "0 │ 49999" and "300 of 50,003 lines" in shown(view)
    view.add([LogLine(0, "y" * 4000)] * KEPT)
    view.draw()
    assert len(shown(view)) < 1.2 * LETTERS and view._letters <= 10 * LETTERS


def test_ranks_that_are_quiet_or_failed_stand_out(folder):
    for rank in (0, 1):
        Beat(folder, rank)(f"step {4 + rank} compute")
        MetricsWriter(folder, rank).write({"step": 3, "memory_bytes": 5 << 20, "step_s": 0.1})
    os.utime(folder / "logs/rank1.beat", (time.time() - 60,) * 2)
    look = Ranks(folder, 3)
    running = RunState(Status.RUNNING)
    assert [(r.status, r.step, r.memory) for r in look.poll(running)][:2] == [
        ("running", 4, 5 << 20),
        ("quiet", 5, 5 << 20),
    ]
    page = grid(look.poll(running), key="k")
    assert "▲ rank 1</b> step 5 · 60 s ago · 5 MiB" in page and "○ rank 2" in page
    write_json(folder / "logs/rank1.json", {"state": "failed", "error": HOSTILE, "traceback": HOSTILE})
    failed = look.poll(RunState(Status.FAILED, rank=1))
    assert [r.status for r in failed] == ["stopped", "failed", "stopped"]
    assert "<script" not in grid(failed, key="k") and 'for="mm-k-1"' in grid(failed, key="k")
    assert len(grid(Ranks(folder, 1024).poll(running), key="k")) < 200_000


def test_metrics_of_any_length_are_read_and_a_file_begun_anew_is_noticed(folder):
    row = '{{"step": {}, "loss": 1.0, "more": "' + "x" * 200 + '"}}\n'
    path = folder / "metrics.jsonl"
    rare = row.replace("more", "heldout_loss")
    path.write_text("".join((row if i % 1000 else rare).format(i) for i in range(1, 100_001)))
    reader, steps, more = Rows(folder), [], True
    while more:
        rows, more = reader.poll()
        steps += [r["step"] for r in rows]
    assert {*range(1000, 100_001, 1000)} <= {*steps}, "held-out losses are few, and all read"
    assert steps[0] == 1 and steps[-1] == 100_000 and 5_000 < len(steps) < 60_000
    with open(path, "a") as file:
        file.write(row.format(100_001) + "half a row")
    assert [r["step"] for r in reader.poll()[0]] == [100_001] and not reader.anew
    path.write_text(row.format(1))
    assert [r["step"] for r in reader.poll()[0]] == [1] and reader.anew


def test_to_a_browser_that_is_closed_little_is_said():
    audience = Audience()
    assert audience.pace(0.3) == 0.3
    audience._heard, audience._asked = audience._heard - 12 * 3600, audience._asked - 900
    assert audience.pace(0.3) > 600 and audience._ask.value == 1
    audience._answer.value = 1
    assert audience.back.is_set() and audience.pace(0.3) == 0.3
    updates = at = 0.0
    while at < 12 * 3600:  # a night
        updates, at = updates + 1, at + max(0.3, (at - 10) / 60)
    assert updates < 600
