"""The worker of a widget: the newest wins, errors are shown, busy ends with them, and closing ends the work."""

import ast
import threading
from pathlib import Path

import ipywidgets as w
import pytest

import mmfsdp.widgets
from mmfsdp.kit.widgets.cell import CellWidget
from mmfsdp.kit.widgets.worker import Worker


class Look(Worker, w.VBox):
    """A widget that shows all answers that it gets, and keeps what it was told of being busy."""

    def __init__(self):
        self.error_line = w.HTML()
        self.answers, self.told = [], []
        super().__init__([self.error_line])

    def busy_changed(self):
        self.told.append(self.busy)


class Slow:
    """A function that has begun when `begun` is set, and returns once `end` is."""

    def __init__(self, answer):
        self.answer, self.begun, self.end = answer, threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.end.wait(600)
        return self.answer


@pytest.fixture
def look():
    return Look()


def test_the_newest_is_shown_and_neither_an_older_one_that_comes_later_nor_one_that_waited(look):
    older, waiting = Slow("older"), Slow("waiting")
    waiting.end.set()
    look.work("look", older, show=look.answers.append)
    assert older.begun.wait(600)
    look.work("look", waiting, show=look.answers.append)
    look.work("other", lambda: "of another name", show=look.answers.append)
    look.work("look", lambda: "newest", show=look.answers.append)
    assert look.is_under_way("look") and not look.wait_for_work(0)
    older.end.set()
    assert look.wait_for_work(60)
    assert look.answers == ["of another name", "newest"] and not waiting.begun.is_set()


def test_each_answer_of_a_generator_is_shown_until_there_is_newer_work(look):
    goes_on, wanted = threading.Event(), []

    def answers():
        yield "first"
        yield "second"
        assert goes_on.wait(600)
        wanted.append(look.is_wanted)
        yield "too late"
        raise AssertionError("nobody asks for more")

    shown = threading.Event()

    def show(answer):
        look.answers.append(answer)
        if answer == "second":
            shown.set()

    look.work("look", answers, show=show)
    assert shown.wait(600)
    look.work("look", lambda: "newer", show=look.answers.append)
    goes_on.set()
    look.wait_for_work(60)
    assert look.answers == ["first", "second", "newer"] and wanted == [False] and look.error_line.value == ""


@pytest.mark.parametrize("part", ["function", "show"])
def test_an_error_is_shown_escaped_and_the_widget_is_not_busy_any_more(look, part):
    def fail(*answer):
        raise ValueError("<script>alert(1)</script>")

    if part == "function":
        look.work("look", fail, show=look.answers.append)
    else:
        look.work("look", lambda: "answer", show=fail)
    look.wait_for_work(60)
    assert "&lt;script&gt;alert" in look.error_line.value and "<script" not in look.error_line.value
    assert isinstance(look.failure, ValueError)
    assert look.told == [True, False] and not look.busy
    look.work("look", lambda: "again", show=look.answers.append)
    look.wait_for_work(60)
    assert look.answers == ["again"] and look.failure is None


def test_the_error_of_older_work_is_not_shown(look):
    older = Slow("older")
    look.work("look", lambda: [older(), 1 / 0], show=look.answers.append)
    older.begun.wait(600)
    look.work("look", lambda: "newest", show=look.answers.append)
    older.end.set()
    look.wait_for_work(60)
    assert look.answers == ["newest"] and look.failure is None and look.error_line.value == ""


def test_a_method_that_fails_to_show_does_not_keep_other_work_from_being_done(look, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: errors.append(failed.exc_value))
    first = Slow("first")
    look.error_line = None
    look.work("first", lambda: 1 / 0 if first() else None)
    first.begun.wait(600)
    look.work("second", lambda: "second", show=look.answers.append)
    first.end.set()
    assert look.wait_for_work(60)
    assert look.answers == ["second"] and [type(error) for error in errors] == [AttributeError]


def test_closing_what_is_around_a_widget_ends_its_work(look):
    around = CellWidget([w.VBox([look])])
    slow, wanted = Slow("late"), []
    look.work("look", lambda: [slow(), wanted.append(look.is_wanted)], show=look.answers.append)
    slow.begun.wait(600)
    look.work("other", lambda: "waiting", show=look.answers.append)
    around.close()
    slow.end.set()
    assert look.wait_for_work(60)
    look.work("look", lambda: "after its end", show=look.answers.append)
    assert look.wait_for_work(60) and not look.busy
    assert look.answers == [] and wanted == [False]
    assert look.told == [True, True], "nothing is drawn of what is closed"


def test_only_the_worker_starts_threads():
    starts = {}
    for path in Path(mmfsdp.kit.widgets.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
            if name in ("Thread", "ThreadPoolExecutor", "start_new_thread"):
                starts.setdefault(path.name, name)
    assert starts == {"worker.py": "Thread"}
