"""Another person's run on a shared machine, looked at by a real other user; a home that is closed; no network."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import Status
from tests.run.test_runs import record

pytestmark = pytest.mark.real

OTHER = """
import os, sys
from mmfsdp import launch
from mmfsdp.kit import cli
from mmfsdp.params import LaunchParams
from mmfsdp.kit.run import sweep as _
from mmfsdp.kit.run.start import make_folder
from mmfsdp.kit.widgets import report as _
from mmfsdp.kit.run.launchers.registry import LAUNCHERS, launcher_named
from huggingface_hub import get_session as _
cli.build_parser()
for name in LAUNCHERS:
    launcher_named(name)
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
for line in sys.stdin:
    command, *words = line.split()
    if command == "make":
        try:
            make_folder(LaunchParams(folder=words[0], name=words[1], replace=True))
        except (OSError, ValueError) as error:
            print(f"mmfsdp make: {error}")
            print("$ 2")
    else:
        print("$", cli.main([command, *words]))
"""
"""What somebody types who is not root; commands are read once all is imported, since Python may be in root's home."""


def other(*lines: str, **environment: str) -> str:
    """What another user sees of some commands; where the tests are not run by root, it is their own user."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    assert "Traceback" not in done.stdout and not done.returncode, done.stdout
    return done.stdout


@pytest.fixture
def shared():
    """A folder of runs that others can see, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def a_run(folder: Path, status: Status, mode: int) -> Path:
    (folder / "logs").mkdir(parents=True)
    record(host="elsewhere").write(folder)
    (folder / "params.yaml").write_text("train: {steps: 8, warmup_steps: 0}\n")
    write_json(folder / "status.json", {"status": status})
    folder.chmod(mode)
    return folder


def test_another_persons_run_is_shown_and_never_changed(shared):
    closed = a_run(shared / "closed", Status.RUNNING, 0o000 if os.getuid() else 0o700)
    opened, over = a_run(shared / "open", Status.RUNNING, 0o555), a_run(shared / "over", Status.COMPLETED, 0o555)
    half = a_run(shared / "half", Status.COMPLETED, 0o755)
    (half / "run.json").chmod(0o600)
    text = other(f"runs {shared}", f"watch {closed}", f"cancel {closed}")
    assert "open  RUNNING" in text and text.count("closed' is not a run that you may read") == 2, text
    text = other(
        f"cancel {opened}", f"drill {opened}", f"resume {over} --trust", f"resume {over}", f"make {shared} over"
    )
    assert "Permission denied" in text and text.count("$ 2") == 5, text
    assert os.getuid() or f"{over}/status.json belongs to the user root, and you may not write it" in text, text
    assert not (opened / "cancel").exists() and (over / "run.json").exists()
    text = other(f"status {half}", f"watch {half}", f"runs {shared}", f"report {opened}", f"make {shared} closed")
    me = pwd.getpwuid(os.getuid()).pw_name
    if os.getuid() == 0:
        words = f"{half}/run.json belongs to the user {me}, and you may not read it"
        assert " ".join(text.split()).count(words) == 3, text
        assert f"{opened} belongs to the user {me}, and you may not write it" in text, text
        assert "closed' exists already, and you may not read it; choose another name" in text and "Errno" not in text
    closed.chmod(0o700)
