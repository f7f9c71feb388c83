"""A person's mistake and an interrupt print one line in a notebook, by IPython's own display of errors."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mmfsdp.kit.run.handle import Run
from mmfsdp.kit.run.interrupt import Interrupted
from mmfsdp.widgets import RunPanel
from tests.run.test_run_trouble import folder  # noqa: F401


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def printed_by(shell, capsys, code, **names):
    """What a cell prints, without colors."""
    shell.user_ns |= names
    shell.run_line_magic("colors", "nocolor")
    shell.run_cell(code)
    captured = capsys.readouterr()
    return (captured.out + captured.err).strip().splitlines()


def test_a_mistake_is_one_line(shell, capsys):
    lines = printed_by(shell, capsys, "from mmfsdp.params import load\nload('tiny').change(**{'train.lr': -1})")
    assert len(lines) == 1 and lines[0].startswith("ParamError: train.lr: -1 should be greater")


def interrupt(*_):
    """Stop as Python does in the middle of a wait; tests/browser presses the button."""
    raise KeyboardInterrupt


def test_an_interrupt_of_a_wait_is_one_line_that_says_what_goes_on(shell, capsys, folder, monkeypatch):  # noqa: F811
    run, panel = Run.open(folder), RunPanel(folder)
    panel.close()
    monkeypatch.setattr(panel, "wait_for_work", interrupt)
    monkeypatch.setattr(run, "state", interrupt)
    for wait in ("run.wait()", "panel.wait()"):
        lines = printed_by(shell, capsys, wait, run=run, panel=panel)
        assert len(lines) == 1 and lines[0].startswith(f"KeyboardInterrupt: the run {run.name} goes on; "), lines
    assert issubclass(Interrupted, KeyboardInterrupt)
