"""The mark `real` is on the tests that start processes, and on no other: tests/conftest.py sees to it."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import multiprocessing
import subprocess
import sys
import threading

import pytest

from tests.processes import in_fresh_python

COMMAND = [sys.executable, "-c", ""]


@pytest.fixture(scope="module")
def shared():
    subprocess.run(COMMAND, check=True)
    yield
    subprocess.run(COMMAND, check=True)


@pytest.mark.real
def test_good_command():
    subprocess.run(COMMAND, check=True)


@pytest.mark.real
def test_good_process():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()


@pytest.mark.real
def test_good_first_use_of_a_fixture(shared):
    pass


@pytest.mark.real
def test_good_second_use_of_a_fixture(shared):
    pass


def test_good_without_a_process():
    assert in_fresh_python("import sys; print('torch' in sys.modules)").strip() == "False"


def test_bad_command():
    try:
        subprocess.run(COMMAND)
    except Exception:
        pass


def test_bad_process():
    multiprocessing.get_context("spawn").Process(target=print).start()


def test_bad_thread():
    thread = threading.Thread(target=subprocess.run, args=[COMMAND])
    thread.start()
    thread.join()


def test_bad_fixture(request):
    request.getfixturevalue("another")


@pytest.fixture
def another():
    subprocess.run(COMMAND)


def test_bad_process_of_a_fresh_python():
    in_fresh_python("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])")


@pytest.mark.real
def test_bad_mark():
    in_fresh_python("")


def test_good_last_one_although_what_is_shared_ends_by_a_process():
    pass
"""


@pytest.mark.real
def test_a_process_without_the_mark_and_a_mark_without_a_process_fail(tmp_path):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  real\n")
    command = [sys.executable, "-m", "pytest", "-rA", "--tb=short", "-p", "no:cacheprovider", "."]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    passed = re.findall(r"^PASSED test_one.py::test_(\w+)", printed, re.MULTILINE)
    failed = re.findall(r"^FAILED test_one.py::test_(\w+)", printed, re.MULTILINE)
    assert sorted(passed) == sorted(re.findall(r"def test_(good\w+)", TESTS)), printed
    assert sorted(failed) == sorted(re.findall(r"def test_(bad\w+)", TESTS)), printed
    assert "not marked as real, but starts a process" in printed
    assert "marked as real, but starts no process" in printed


def test_files_of_tests_have_names_of_their_own():
    """pytest imports each by its name alone: of two with one name it would leave out the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
