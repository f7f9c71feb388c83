"""A run is resumed only by who started it, or by who has read what it would run and trusts that."""

import os
import shutil
from pathlib import Path

import pytest

from mmfsdp import ParamError, Run, RunParams, cli
from mmfsdp.run.folder import write_json
from mmfsdp.run.record import TRAIN, RunRecord
from mmfsdp.run.start import make_folder, make_record
from mmfsdp.run.trust import UntrustedRun, check_trusted, key_path, params_digest
from tests.run.test_runs import GONE

SLURM = {"launch.executor": "slurm", "launch.cluster": "lab", "launch.gpus_per_node": 0, "launch.ranks": 2}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run on Slurm, by a cluster's profile, as this user has started it; it has failed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/lab.yaml").write_text("setup: [source /lab/env.sh]\n")
    params = RunParams().change(**SLURM | {"launch.folder": str(tmp_path / "runs")})
    folder = make_folder(params.launch)
    params.to_yaml(folder / "params.yaml")
    (folder / "params.yaml").chmod(0o644)
    make_record(params, TRAIN, identity="", pid=int(GONE["pid"])).write(folder)
    write_json(folder / "status.json", {"status": "FAILED"})
    return folder


def check(folder: Path) -> None:
    check_trusted(folder, RunParams.from_yaml(folder / "params.yaml"))


def test_the_key_is_the_users_own_and_one_that_others_could_read_is_replaced(own):
    check(own)
    key = key_path()
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    first = key.read_bytes()
    key.chmod(0o640)
    with pytest.raises(UntrustedRun, match="is not the one that you started it with"):
        check(own)
    assert key.read_bytes() != first and key.stat().st_mode & 0o777 == 0o600


def edit(folder: Path) -> None:
    path = folder / "params.yaml"
    path.write_text(path.read_text() + "# a comment\n")


def edit_profile(folder: Path) -> None:
    Path("clusters/lab.yaml").write_text("setup: [source /evil/env.sh]\n")


def take_digest(folder: Path) -> None:
    record = vars(RunRecord.read(folder)) | {"digest": ""}
    RunRecord(**record).write(folder)


def forge_digest(folder: Path) -> None:
    record = vars(RunRecord.read(folder)) | {"digest": "0" * 64}
    RunRecord(**record).write(folder)


def link_logs(folder: Path) -> None:
    (folder / "logs").rmdir()
    (folder / "logs").symlink_to("/etc")


def other_home(folder: Path) -> None:
    key_path().unlink()


def closed_home(folder: Path) -> None:
    shutil.rmtree(key_path().parent)
    key_path().parent.touch()


TAMPERED = {
    edit: "its params.yaml, or the cluster's profile",
    edit_profile: "its params.yaml, or the cluster's profile",
    take_digest: "it has no digest",
    forge_digest: "is not the one that you started it with",
    other_home: "is not the one that you started it with",
    closed_home: "cannot be read or written",
    link_logs: "logs is a link",
    lambda folder: (folder / "run.json").unlink(): "it has no digest",
    lambda folder: folder.chmod(0o770): "others may write into first",
    lambda folder: (folder / "logs").chmod(0o777): "others may write into logs",
    lambda folder: (folder / "params.yaml").chmod(0o664): "others may write into params.yaml",
}
if os.getuid() == 0:
    TAMPERED[lambda folder: os.chown(folder, 65534, 65534)] = "first belongs to another user"


@pytest.mark.parametrize("tamper", TAMPERED)
def test_what_somebody_else_may_have_written_is_shown_and_not_run(own, tamper):
    check(own)
    tamper(own)
    with pytest.raises(UntrustedRun, match=TAMPERED[tamper]) as error:
        check(own)
    setup = "/evil/env.sh" if tamper is edit_profile else "/lab/env.sh"
    assert f"launch.setup: ['source {setup}']" in error.value.lines
    before = {path: path.lstat().st_mtime_ns for path in own.rglob("*")}
    with pytest.raises(UntrustedRun):
        Run(own).resume()
    assert {path: path.lstat().st_mtime_ns for path in own.rglob("*")} == before, "nothing is written"


def test_a_copy_of_a_run_goes_on_in_its_own_folder(own, tmp_path):
    """Not in the folder that its params.yaml names, where the batch script would delete and write files."""
    copy = tmp_path / "handed" / "over"
    shutil.copytree(own, copy)
    copy.chmod(0o700)
    check(copy)
    with pytest.raises(ParamError, match="slurm needs sbatch|launch.python"):
        os.environ["PATH"], path = str(tmp_path), os.environ["PATH"]
        try:
            Run(copy).resume()
        finally:
            os.environ["PATH"] = path


def test_the_command_prints_what_it_would_run_and_wants_trust(own, capsys):
    evil = {"launch.python": "/evil/python", "launch.modules": ["x/1"]}
    evil |= {"data.source": "folder", "data.path": "/home/\x1b]52;c;ZXZpbA==\x07me\x1b[2J"}
    RunParams.from_yaml(own / "params.yaml").change(**evil).to_yaml(own / "params.yaml")
    assert cli.main(["resume", str(own)]) == 2
    said = capsys.readouterr()
    for line in ("launch.python: /evil/python", "launch.modules: ['x/1']", "data.path: /home/me"):
        assert f"\n  {line}\n" in said.out
    assert "then add --trust" in said.err and "\x1b" not in said.out + said.err
    assert cli.main(["resume", str(own), "--trust"]) == 2
    assert "resume: data.path: '/home/" in capsys.readouterr().err, "that is as far as it comes here"


def test_a_digest_says_nothing_of_the_key_and_differs_by_text(own):
    text = (own / "params.yaml").read_text()
    assert params_digest(text) == params_digest(text) == RunRecord.read(own).digest != params_digest(text + "\n")
    assert key_path().read_bytes().hex() not in (own / "run.json").read_text()
