"""Tailing: every line once, whatever it holds, in bounded memory."""

import os

import pytest

from mmfsdp.kit.run.files.folder import MetricsWriter
from mmfsdp.kit.run.files.run_record import RunState, Status
from mmfsdp.kit.run.watch import MAX_LINE_BYTES, LogReader, Progress, clean, follow, read_log


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(run, rank: int, data: bytes, job: int = 7) -> None:
    with open(run / "logs" / f"{job}_{rank}_log.out", "ab") as file:
        file.write(data)


@pytest.mark.parametrize(
    "raw, text",
    [
        (b"plain\ttext", "plain\ttext"),
        (b"10%\r50%\r100%", "100%"),
        (b"10%\r50%\r", "50%"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b[2J\x1b[Hhome\x1b[?25l\x1b[K", "home"),
        (b"\x1b]0;title\x07shown\x1b]8;;http://x\x1b\\link", "shownlink"),
        (b"\x1b[" + b"1;" * 500 + b"mbomb", "bomb"),
        (b"\xff\xfe bad \xc3", "\ufffd\ufffd bad \ufffd"),
        ("\u009b2Jé ✓".encode(), "2Jé ✓"),
        (b"null\x00bell\x07back\x08 end\x1b", "nullbellback end"),
    ],
)
def test_a_line_is_plain_text(raw, text):
    assert clean(raw) == text


def test_each_line_comes_once_when_it_is_whole(run):
    reader = LogReader(run)
    assert reader.poll() == []
    write(run, 1, b"one\ntw")
    write(run, 0, "é".encode()[:1])
    assert reader.poll() == [(1, "one")]
    write(run, 1, b"o\n\nthree\n")
    write(run, 0, "é".encode()[1:] + b"\n")
    assert sorted(reader.poll()) == [(0, "é"), (1, ""), (1, "three"), (1, "two")]
    assert reader.poll() == []
    write(run, 0, b"the end")
    assert reader.poll() == []
    assert reader.poll(last=True) == [(0, "the end")]
    assert reader.poll(last=True) == []


def test_a_log_begun_anew_or_followed_by_another_job_is_read_on(run):
    reader = LogReader(run)
    write(run, 0, b"a long first line\n")
    assert reader.poll() == [(0, "a long first line")]
    (run / "logs" / "7_0_log.out").write_bytes(b"new\n")
    assert reader.poll() == [(0, "new")]
    write(run, 0, b"resumed\n", job=8)
    assert reader.poll() == [(0, "resumed")]


def test_a_line_that_never_ends_is_cut_and_the_end_of_a_log_is_read(run):
    """A long log in bounded memory: test_panel.py."""
    write(run, 1, b"line of a long log\n" * 50_000 + b"last\n")
    assert read_log(run, 1, size=100).splitlines()[-2:] == ["line of a long log", "last"]
    reader = LogReader(run)
    reader.poll()
    for _ in range(4):
        write(run, 0, b"z" * 1_000_000)
        assert reader.poll() == []
    (held,) = reader.poll(last=True)
    assert len(held.text) < MAX_LINE_BYTES + 50 and held.text.endswith("[... not all shown]")


def test_progress_knows_the_time_left(run):
    progress, metrics = Progress(run), MetricsWriter(run)
    state = RunState(Status.RUNNING, step=0, steps=40)
    assert progress.line(state) == "RUNNING   [..........]   0%  0/40"
    for step in range(1, 11):
        metrics.write({"step": step, "time": 1000 + 2.0 * step, "loss": 1 / step, "samples_per_s": 12.34})
    line = progress.line(RunState(Status.RUNNING, step=10, steps=40))
    assert line == "RUNNING   [##........]  25%  10/40  loss 0.1  12.3 samples/s  0:01:00 left"
    assert "left" not in progress.line(RunState(Status.COMPLETED, step=40, steps=40))


def test_following_ends_with_the_run_and_its_traceback(run):
    (run / "status.json").write_text("{}")
    write(run, 0, b"\x1b[31mred\x1b[0m\nno end")
    os.utime(run, (1, 1))  # a launch cut short long ago: LOST
    first, second, progress, trouble = map(str, follow(run))
    assert trouble == "trouble: it has no complete run.json: its launch was interrupted. What to do: launch it again"
    assert (first, second) == ("[0] red", "[0] no end") and "LOST" in progress


def test_every_line_is_shown_or_counted_as_left_out(run):
    reader, shown = LogReader(run, limit=1), 0  # as little at once as it may
    total = 0
    for lines in (10, 50_000, 3, 40_000):
        total += lines
        write(run, 0, b"a line of a long log\n" * lines)
        shown += len(reader.poll())
    assert reader.gaps == 2 and shown - reader.gaps + reader.left_out == total
    write(run, 1, b"another\n")
    (line,) = reader.poll()
    assert line == (1, "another") and reader.gaps == 2
