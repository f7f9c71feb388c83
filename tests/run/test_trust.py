"""A run is resumed only by who started it, or by who has read what it would run and trusts that."""

import os
import shutil
from pathlib import Path

import pytest

from mmfsdp import ParamError, Run, RunParams
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import TRAIN, RunRecord
from mmfsdp.kit.run.own_code import read_code, write_code
from mmfsdp.kit.run.start import make_folder, make_record
from mmfsdp.kit.run.trust import UntrustedRun, check_trusted, code_digest, key_path, own_code_of, params_digest
from mmfsdp.own.modules import OwnSources
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
    write_code(folder, OwnSources({"my_data.py": b"def read(): ...", "pkg/helper.py": b""}))
    make_record(params, TRAIN, identity="", pid=int(GONE["pid"]), folder=folder).write(folder)
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
CODE = "a file in its code/ is not the one that you started it with, or was added or removed"
TAMPERED |= {
    lambda folder: (folder / "code/my_data.py").write_text("def read(): 'evil'"): CODE,
    lambda folder: (folder / "code/torch.py").write_text(""): CODE,
    lambda folder: (folder / "code/pkg/helper.py").unlink(): CODE,
    lambda folder: shutil.rmtree(folder / "code"): CODE,
    lambda folder: (folder / "code/pkg/helper.py").rename(folder / "code/helper.py"): CODE,
    lambda folder: (folder / "code/pkg").chmod(0o777): "code/pkg belongs to another user, or others may write it",
    lambda folder: (folder / "code").chmod(0o775): "code belongs to another user, or others may write it",
}
if os.getuid() == 0:
    TAMPERED[lambda folder: os.chown(folder, 65534, 65534)] = "first belongs to another user"
    TAMPERED[lambda folder: os.chown(folder / "code/my_data.py", 65534, 65534)] = "code/my_data.py belongs to another"


@pytest.mark.parametrize("tamper", TAMPERED)
def test_what_somebody_else_may_have_written_is_shown_and_not_run(own, tamper):
    check(own)
    tamper(own)
    with pytest.raises(UntrustedRun, match=TAMPERED[tamper]) as error:
        check(own)
    setup = "/evil/env.sh" if tamper is edit_profile else "/lab/env.sh"
    assert f"launch.setup: ['source {setup}']" in error.value.lines
    before = {path: path.lstat().st_mtime_ns for path in own.rglob("*")}
    with pytest.raises(ParamError if tamper is link_logs else UntrustedRun):
        Run(own).resume()
    assert {path: path.lstat().st_mtime_ns for path in own.rglob("*")} == before, "nothing is written"


def test_the_files_of_its_code_that_would_run_are_shown(own):
    (own / "code/added.py").write_text("x = 1")
    with pytest.raises(UntrustedRun) as error:
        check(own)
    files = {"my_data.py": 15, "added.py": 5, "pkg/helper.py": 0}
    assert {f"{own}/code/{name} ({size} bytes)" for name, size in files.items()} <= set(error.value.lines)


@pytest.mark.parametrize("name", ["code", "code/my_data.py", "code/pkg", "code/more.py"])
def test_a_link_in_its_code_is_refused_also_with_trust(own, tmp_path, name):
    path = own / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    (tmp_path / "evil").mkdir()
    path.symlink_to(tmp_path / "evil")
    for trust in (False, True):
        with pytest.raises(ParamError, match="is a link; remove it"):
            Run(own).resume(trust=trust)


def test_the_code_of_one_run_is_not_that_of_another_with_other_parameters(own):
    """Though the same user has started both."""
    record = RunRecord.read(own)
    text = (own / "params.yaml").read_text()
    assert record.code_digest == code_digest(text, read_code(own)) != code_digest(text + "#", read_code(own))


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
    evil["launch.timeout_min"] = 60  # else Slurm would be asked for the partition's
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


@pytest.mark.parametrize("command", ["caption", "export"])
def test_own_code_that_somebody_handed_over_is_not_run_to_caption_or_export(own, tmp_path, capsys, command):
    words = [command, str(own), *([str(tmp_path / "to")] if command == "export" else [])]
    assert cli.main(words) == 2
    assert "no complete checkpoint" in capsys.readouterr().err, "without own code it runs none"
    params = RunParams.from_yaml(own / "params.yaml").change(**{"data.reader": "my_data:read"})
    params.to_yaml(own / "params.yaml")
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert "\n  data.reader: my_data:read\n" in said.out
    assert f"\n  {own}/code/my_data.py (15 bytes)\n" in said.out
    assert "then add --trust" in said.err
    with pytest.raises(UntrustedRun), own_code_of(own, params):
        raise AssertionError("it would run")
    assert cli.main([*words, "--trust"]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err, "that is as far as it comes here"
    with own_code_of(own, params):  # this process trusts what is there
        pass
    (own / "code/my_data.py").write_text("def read(): 'evil'")
    with pytest.raises(UntrustedRun), own_code_of(own, params):
        raise AssertionError("it would run")
