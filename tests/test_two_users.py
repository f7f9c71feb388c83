"""Another person's run on a shared machine, looked at by a real other user; a home that is closed; no network."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mmfsdp.launch.sweeps import LOCK, Sweep
from mmfsdp.models.pretrained import share
from mmfsdp.places import cache_folder
from mmfsdp.runs import RunRecord, Status, note, write_json

RECORD = RunRecord(
    executor="local", entry="m:f", ranks=1, steps=8, threads=1, timeout_min=9, device="cpu", host="elsewhere",
    pid=1, start=0.0, identity="x", created=time.time(), version="0", commit="",
)  # fmt: skip
OTHER = """
import os, sys
from mmfsdp import cli, launch, report
from mmfsdp.launch import drill, run, start
from mmfsdp.params import LaunchParams
from mmfsdp.runs import listing
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
def make(words):
    start.make_folder(LaunchParams(folder=words[0], name=words[1], replace=True))
cli.COMMANDS["cd"] = lambda words: os.chdir(words[0])
cli.COMMANDS["make"] = make  # as launch does, once it has imported torch and looked at the plan
for line in sys.stdin:
    print("$", cli.main(line.split()))
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
    RECORD.write(folder)
    (folder / "params.yaml").write_text("train: {steps: 8, warmup_steps: 0}\n")
    write_json(folder / "status.json", {"status": status})
    note(folder, "saved", step=4, text="step 4")
    folder.chmod(mode)
    return folder


def test_another_persons_run_is_shown_or_named_with_its_owner_and_never_changed(shared):
    mine = os.getuid() != 0
    whose = "is yours, but closed: chmod u+rwX" if mine else "belongs to root"
    closed = a_run(shared / "closed", Status.RUNNING, 0o000 if mine else 0o700)
    opened = a_run(shared / "open", Status.RUNNING, 0o555)
    over = a_run(shared / "over", Status.COMPLETED, 0o555)
    text = other(f"runs {shared}", f"watch {closed}", f"cancel {closed}", f"make {shared} closed")
    assert "open  RUNNING" in text and f"{closed} is closed; it {whose}" in text, "one that is closed hides no other"
    assert text.count(f"run: '{closed}' is closed; it {whose}") == 2
    text = other(f"cancel {opened}", f"drill {opened}", f"resume {over}", f"make {shared} over")
    assert text.count(f"is not yours to change; it {whose}") == 3 and text.count("$ 2") == 4, text
    assert f"launch.name: '{over}' exists already and is not yours; choose another name" in text
    assert "open it by" not in text
    a_run(shared / "mine/a", Status.COMPLETED, 0o555), a_run(shared / "mine/b", Status.COMPLETED, 0o555)
    (shared / "mine/comparison.html").touch(mode=0o444)
    (shared / "mine").chmod(0o1777)  # as /tmp: what is there already nobody else may replace
    text = other(f"cd {shared / 'mine'}", f"report {over}", "report a b")
    assert (shared / "mine/over-report.html").exists() and (shared / "mine/mine-comparison.html").exists(), text
    assert sorted(p.name for p in shared.iterdir()) == ["closed", "mine", "open", "over"]
    assert not (opened / "cancel").exists() and (over / "run.json").exists()
    closed.chmod(0o700)


def test_another_persons_sweep_can_be_looked_at(shared):
    a_run(shared / "s/000", Status.COMPLETED, 0o755)
    (shared / "s/base.yaml").write_text("train: {steps: 8, warmup_steps: 0}\n")
    write_json(shared / "s/sweep.json", {"at_once": 1, "members": [{"train.lr": 1.0}]})
    (shared / "s" / LOCK).touch(mode=0o644)
    (shared / "s").chmod(0o555)
    assert "000   1         COMPLETED" in other(f"sweep {shared / 's'}", f"cancel {shared / 's'}")
    assert not Sweep(shared / "s")._has_queue() and not (shared / "s/cancel").exists()


def test_pretrained_weights_may_be_read_by_whom_their_folder_is_open_to(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "part").mkdir()
    (tmp_path / "part/config.json").touch(mode=0o644)
    save_file({"a": torch.ones(1)}, tmp_path / "part/model.safetensors")
    share(tmp_path)
    assert (tmp_path / "part/model.safetensors").stat().st_mode == (tmp_path / "part/config.json").stat().st_mode


def test_the_cache_of_a_user_without_a_home_is_in_a_temporary_folder_that_nobody_else_can_write(tmp_path, monkeypatch):
    for name in ("MMFSDP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # where there is none, it is not known what ~ is
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    mine = tmp_path / f"mmfsdp-{os.getuid()}"
    assert cache_folder() == mine / "cache" and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o755)
    with pytest.raises(PermissionError, match=f"{mine} is somebody else's or open to others; remove it"):
        cache_folder()
    mine.rename(tmp_path / "theirs").chmod(0o700)
    mine.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError):
        cache_folder()
