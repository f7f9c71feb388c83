"""The panel without a browser: it shows a real run, takes whatever a log may hold, and holds only so much of it."""

import time
import tracemalloc
from html.parser import HTMLParser

import ipywidgets as w
import pytest

from mmfsdp import RunParams
from mmfsdp.kit.run.files.folder import HEARTBEAT_BYTES, MetricsWriter, add_event, read_heartbeat, write_json
from mmfsdp.kit.run.files.run_record import RunState, Status, because
from mmfsdp.kit.run.local import processes_of
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.run.state import read_ranks
from mmfsdp.kit.run.watch import LogLine
from mmfsdp.kit.widgets.banner import tracebacks
from mmfsdp.kit.widgets.cell import ABSENT_AFTER_S, ViewerPresence
from mmfsdp.kit.widgets.log_view import MAX_KEPT_LINES, MAX_SHOWN_CHARACTERS, LogView
from mmfsdp.kit.widgets.pictures.rank_grid import rank_grid
from mmfsdp.widgets import RunPanel
from tests.run.test_runs import record
from tests.waiting import light, runs_of, until
from tests.widgets.test_charts import asked

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def texts(widget):
    """All HTML below a widget, style sheets apart."""
    own = [widget.value] if isinstance(widget, w.HTML) and "<style>" not in widget.value else []
    return own + [text for child in getattr(widget, "children", ()) for text in texts(child)]


def shown(widget):
    return "".join(texts(widget))


def lines_of(view):
    """The lines that a log shows, as text."""
    parser, found = HTMLParser(), []
    parser.handle_data = found.append
    parser.feed(next(text for text in texts(view) if '<pre class="mm-log">' in text))
    return "".join(found).split("\n")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launches two real ranks of `launch_entries`, in place of a training."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with runs_of(light(tmp_path)) as go:
        yield go


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of two ranks that goes on as long as this process does; its name is hostile."""
    path = tmp_path / HOSTILE.replace("/", "")
    (path / "logs").mkdir(parents=True)
    RunParams().to_yaml(path / "params.yaml")
    record(steps=9).write(path)
    write_json(path / "status.json", {"status": "STARTING"})
    return path


@pytest.mark.real
def test_a_panel_shows_a_real_run_to_its_end_and_again(start):
    run = start("talk")
    panel = RunPanel(run.path)
    assert panel.wait(600).status is Status.COMPLETED
    before = texts(panel)
    for rank in (0, 1):
        assert f"{rank} │</span> step 5 at" in "".join(before) and f"{rank} │</span> no newline" in "".join(before)
    assert "COMPLETED" in "".join(before)
    (table,) = asked(panel.charts)["tables"]
    assert table["step"] == [1, 2, 3, 4, 5] and table["values"]["loss"][::4] == [1.0, 0.2]
    lines = lines_of(panel.logs)
    assert read_heartbeat(run.path, 1)[0] == "importing", "before what the ranks run is imported"
    again = RunPanel(run.path)
    again.wait(600)
    assert sorted(lines) == sorted(lines_of(again.logs)), "a panel made anew shows all there is"
    assert texts(again)[0] == before[0] and panel.run.path == again.run.path


@pytest.mark.real
def test_a_panel_names_the_rank_that_failed_and_its_buttons_work(start):
    run = start("fail")
    panel = RunPanel(run.path)
    assert panel.wait(600).rank == 1
    until(
        lambda: not processes_of(run.record, run.path), seconds=600
    )  # nor does rank 0 live on, which would not listen to TERM
    assert "<b>first</b> FAILED, step " in texts(panel)[0] and "left" not in texts(panel)[0]
    told = panel.banner.value
    assert "rank 1: RuntimeError: the cause" in told and "What to do: " in told
    told = "".join(text for text in texts(panel) if "<pre" not in text)  # tracebacks and log apart
    assert told.count("the cause") == 1 and "rank 1</b> failed first" in told
    assert "in fail" in shown(panel) and "mm-rank-failed" in shown(panel)
    buttons, said = panel.actions.buttons, lambda: panel.actions.note.value
    assert {name for name, button in buttons.items() if button.disabled} == {"Cancel", "Preempt", "Kill rank"}
    buttons["Report"].click()
    until(lambda: "written" in said())
    assert (run.path / "report.html").is_file()
    run.resume()
    again = RunPanel(run.path)
    again.actions.buttons["Cancel"].click()  # it may have failed again by then: either is said
    until(lambda: "cancelled: " in again.actions.note.value)
    assert again.wait(600).done


def test_no_log_can_fill_memory_or_reach_the_page_as_html(folder):
    bombs = f"\x1b[2J\x1b[31m{HOSTILE}\x1b[0m\n".encode() + b"\xff\xfe\x00\n" + b"\x1b[" + b"9" * 5000 + b"m\n"
    with open(folder / "logs/7_0_log.out", "wb") as log:
        for _ in range(100):
            log.write(b"a line of a hundred megabytes\n" * 33_000 + b"x" * 10_000 + b"\n")
        log.write(b"z" * 1_000_000 + b"\n" + bombs)
        log.write(b"".join(b"\r%3d%%" % n for n in range(100)) + b"\r100%\nthe last line\n")
    add_event(folder, "drill", step=3, text=HOSTILE)
    MetricsWriter(folder).write({"step": 3, "time": 1.0, "loss": 1.0})
    tracemalloc.start()
    panel = RunPanel(folder)
    until(lambda: "the last line" in shown(panel))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    panel.close()
    page, lines = shown(panel), lines_of(panel.logs)
    assert lines[-2:] == ["0 │ 100%", "0 │ the last line"] and f"0 │ {HOSTILE}" in lines
    assert "[... not all shown]" in page
    assert "<script" not in page and "<img" not in page and "alert(1)" in page
    assert len(page) < 3 * MAX_SHOWN_CHARACTERS and peak < 64 << 20


def test_the_log_is_filtered_and_searched_and_bounded():
    view = LogView(2)
    view.add([LogLine(0, "all is well"), LogLine(1, "a UserWarning: slow"), LogLine(1, "ValueError: no")])
    view.draw()
    assert len(lines_of(view)) == 3
    for tool, value, left in (
        (view.rank, 0, ["0 │ all is well"]),
        (view.rank, -1, 3),
        (view.search, "ERROR: NO", ["1 │ ValueError: no"]),
        (view.search, "", 3),
    ):
        tool.value = value
        assert (len(lines_of(view)) if isinstance(left, int) else lines_of(view)) == left
    view.add([LogLine(0, f"{i}") for i in range(10 * MAX_KEPT_LINES)])
    view.draw()
    assert lines_of(view)[-1] == "0 │ 49999" and "300 of 50,003 lines" in shown(view)
    view.add([LogLine(0, "[... 7 lines not shown ...]")], left_out=7, gaps=1)
    view.draw()
    assert "of 50,010 lines; 7 of them were not read" in shown(view)
    view.add([LogLine(0, "y" * 4000)] * MAX_KEPT_LINES)
    view.draw()
    assert len(shown(view)) < 1.2 * MAX_SHOWN_CHARACTERS


def test_ranks_that_are_quiet_or_failed_stand_out(folder):
    for rank in (0, 1):
        Heartbeat(folder, rank)(f"step {4 + rank} compute")
        MetricsWriter(folder, rank).write(
            {"step": 3, "memory_bytes": 5 << 20, "step_s": 0.1, "rank_tokens_per_s": 1200.0 + rank}
        )
    (folder / "logs/rank1.beat").write_text(f"{'step 5 compute':<{HEARTBEAT_BYTES}} {time.time() - 60}\n")
    running = RunState(Status.RUNNING)
    assert [(r.status, r.step, r.memory_bytes) for r in read_ranks(folder, 3, running)][:2] == [
        ("running", 4, 5 << 20),
        ("quiet", 5, 5 << 20),
    ]
    page = rank_grid(read_ranks(folder, 3, running))
    assert "▲ rank 1</b> step 5 · 1,201 tokens/s · step 5 compute 60 s ago · 5 MiB" in page and "○ rank 2" in page
    write_json(folder / "logs/rank1.json", {"state": "failed", "error": HOSTILE, "traceback": HOSTILE})
    failed = read_ranks(folder, 3, because(Status.FAILED, "", rank=1))
    assert [r.status for r in failed] == ["stopped", "failed", "stopped"]
    assert "<script" not in tracebacks(failed) and tracebacks(failed).count("&lt;script") == 2
    assert len(rank_grid(read_ranks(folder, 1024, running))) < 200_000


def test_a_page_that_does_not_answer_is_updated_rarely_until_it_answers():
    viewer = ViewerPresence()
    assert viewer.watching
    viewer.answered_at -= 2 * ABSENT_AFTER_S
    assert not viewer.watching and not viewer.returned.is_set()
    viewer.ask()
    viewer.answer.value = viewer.question.value  # the browser does this
    assert viewer.watching and viewer.returned.is_set()
