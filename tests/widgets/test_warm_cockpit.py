"""A cockpit launches from the warm process once it has planned; Python ends while a widget is at work."""

import os
import subprocess
import sys

import pytest
from tiny_run import tiny_run

from mmfsdp.kit.run.ranks import warm
from mmfsdp.widgets import Cockpit
from tests.waiting import until


@pytest.mark.real
def test_a_cockpit_launches_from_the_process_that_imports_while_one_chooses(tmp_path, monkeypatch):
    monkeypatch.setenv(warm.SWITCH, "1")
    monkeypatch.setenv("A_WARM_PROCESS_OF_ITS_OWN", "1")
    tiny_run(tmp_path, **{"launch.ranks": 2}).to_yaml(tmp_path / "params.yaml")
    cockpit = Cockpit(tmp_path / "params.yaml")
    assert cockpit.plan
    path = warm.socket_path(dict(os.environ))
    until(path.exists)
    cockpit.choose(**{"train.steps": 4})
    cockpit.launch()
    assert str(cockpit.wait()) == "COMPLETED, step 4 of 4"
    assert "a fork of the warm process" in cockpit.run.logs(0)
    process = warm.started_here[path]
    cockpit.close()
    process.stdin.close()
    process.wait(600)
    assert not path.exists()


ENDS_AT_WORK = """
import threading, torch
from mmfsdp.kit.widgets.worker import Worker

begun = threading.Event()

def multiply():
    x = torch.ones(1500, 1500)
    while True:
        begun.set()
        x @ x

worker = Worker()
worker.work("multiply", multiply)
begun.wait()
"""


@pytest.mark.real
def test_python_ends_in_good_order_while_a_widget_is_at_work():
    done = subprocess.run([sys.executable, "-c", ENDS_AT_WORK], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
