"""Signals of a cluster do not end data workers; the end of their rank does."""

import subprocess
import sys

import psutil
import pytest

from tests.waiting import until


@pytest.mark.real
def test_workers_outlive_signals_and_end_with_their_rank():
    command = [sys.executable, "-m", "tests.data.worker_script"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    scripts = {end: subprocess.Popen([*command, end], **pipes) for end in ("fails", "killed", "closes")}
    printed = {end: script.communicate(timeout=600) for end, script in scripts.items()}
    words = printed["fails"][1]
    assert scripts["fails"].returncode == 1, words
    assert words.startswith("Traceback") and words.endswith("RuntimeError: the failure of this rank\n"), words
    assert words.count("Traceback") == 1, "its workers, which are stuck, are terminated without a word"
    assert scripts["killed"].returncode == -9, printed["killed"][1]
    assert scripts["closes"].returncode == 0, printed["closes"][1]
    workers = [int(pid) for pids, _ in printed.values() for pid in pids.split()]
    assert len(workers) == 4
    until(lambda: not any(map(psutil.pid_exists, workers)))
