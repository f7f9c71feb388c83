"""A forked kernel is a kernel of its own: what it has from whom, how it is interrupted and ends, what it prints."""

import json
import os
import signal
import subprocess
import sys

import nbformat
import pytest
from books import execute, text_of
from nbclient.exceptions import DeadKernelError

from tests.forked_python import ForkedPython

pytestmark = pytest.mark.real
TELL = """
import json, os, sys

import torch

print(json.dumps({
    "folder": os.getcwd(),
    "variable": os.environ["MMFSDP_OF_THIS_TEST"],
    "tests": [name for name in sys.modules if name.partition(".")[0] in ("tests", "pytest", "books")],
    "leads its group": os.getpgid(0) == os.getsid(0) == os.getpid(),
    "random": torch.rand(1).item(),
    "ranks": torch.distributed.is_initialized(),
    "words": sys.argv[1:2],
}))
"""
INTERRUPTED = """
import signal

try:
    os.killpg(0, signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""
PRINTS = "os.write(2, b'by a library\\n'); print(os.fork() == 0 and os._exit(0) or 'here')"


def notebook(*cells):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def test_a_forked_kernel_has_what_its_request_says_and_nothing_of_the_tests(fork_server, tmp_path):
    options = {"MMFSDP_OF_THIS_TEST": "yes"}
    book = execute(notebook(TELL, INTERRUPTED, PRINTS), tmp_path, fork_server, **options)
    told, interrupted, printed = (text_of(cell) for cell in book.cells)
    again = execute(notebook(TELL), tmp_path, fork_server, **options)
    told, other = json.loads(told), json.loads(text_of(again.cells[0]))
    assert told.pop("random") != other["random"]
    assert told == {
        "folder": str(tmp_path),
        "variable": "yes",
        "tests": [],
        "leads its group": True,
        "ranks": False,
        "words": ["-f"],
    }
    assert interrupted == "interrupted\n"
    assert "by a library" in printed and "here" in printed


def test_the_death_of_a_forked_kernel_is_seen(fork_server, tmp_path):
    with pytest.raises(DeadKernelError):
        execute(notebook("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), tmp_path, fork_server)


def started(fork_server, module, **options):
    command = [sys.executable, "-m", module]
    return ForkedPython(fork_server.address, command, start_new_session=True, **{"env": os.environ, **options})


def test_a_fork_reads_prints_fails_and_is_killed_as_a_python_of_its_own(fork_server, tmp_path, monkeypatch, capfd):
    (tmp_path / "reads.py").write_text("import sys; print(sys.stdin.readline(), sys.path[0]); sys.exit(3)")
    (tmp_path / "raises.py").write_text("raise ValueError('why')")
    (tmp_path / "waits.py").write_text("print('here'); input()")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    reads = started(fork_server, "reads", **pipes)
    print("words", file=reads.stdin, flush=True)
    assert reads.stdout.read().split() == ["words", str(tmp_path)]
    assert (reads.wait(), reads.poll()) == (3, 3)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert started(fork_server, "raises").wait() == 1
    assert "ValueError: why" in capfd.readouterr().err
    waits = started(fork_server, "waits", **pipes)
    assert (waits.stdout.readline(), waits.poll()) == ("here\n", None)
    waits.kill()
    assert waits.wait() == -signal.SIGKILL


def test_a_fork_is_refused_where_imports_might_have_read_something_else(fork_server, monkeypatch):
    monkeypatch.setenv("TORCH_OF_THIS_TEST", "1")
    with pytest.raises(RuntimeError, match="TORCH_OF_THIS_TEST.*: imports may read these"):
        started(fork_server, "this")
