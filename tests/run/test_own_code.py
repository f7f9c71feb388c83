"""A person's own reader, model, metric and callbacks on two ranks: killed, failed and resumed, while their files are
edited."""

import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mmfsdp import Run, RunParams, checkpoint, launch, sweep
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.own_code import changes
from mmfsdp.kit.run.trust import UntrustedRun, check_trusted, own_code_of
from mmfsdp.own.calls import OwnCodeError, call_own
from mmfsdp.own.modules import OwnSources
from tests.tiny_run import tiny_run
from tests.tracebacks import shows_package

FILES = Path(__file__).parent.parent / "files" / "own"
OWN = {
    "data.source": "own",
    "data.path": None,
    "data.reader": {"call": "my_pictures:Pictures", "folder": "pictures"},
    "data.augment": False,
    "model.build": "small_vlm:build",
    "train.metrics": "small_vlm:score",
    "train.keep_best": "exact",
    "train.eval_every": 3,
    "launch.ranks": 2,
}
FILES_OF_RUN = ("my_pictures.py", "my_helper.py", "my_log.py", "small_vlm.py")


def log_to(file: str) -> dict:
    """The callbacks of a run: they write what they are told into files of this name, in the folder of the launch."""
    return {"train.callbacks": [{"call": f"my_log:{name}", "file": f"{file}-{name}"} for name in ("Log", "OnRank0")]}


def final(run: Run) -> dict[str, dict[str, bytes]]:
    """The tensors in the files of the last checkpoint: weights, optimizer states, random states."""
    last = checkpoint.latest(run.path / "checkpoints")
    files = {str(path.relative_to(last)): load_file(path) for path in sorted(last.rglob("*.safetensors"))}
    return {file: {name: t.numpy().tobytes() for name, t in tensors.items()} for file, tensors in files.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name in FILES_OF_RUN:
        shutil.copy(FILES / name, folder)
    yield folder
    for name in FILES_OF_RUN:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture(scope="module")
def story(folder):
    """Tell what happened: an unbroken run, and one that is killed and goes on, while their files are edited."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        params = tiny_run(folder, **OWN)
        whole = launch(params.change(**{"launch.name": "whole"}, **log_to("whole")))
        kill = Path("broken-Log-kill-rank1-at-step3")
        kill.touch()
        broken = launch(params.change(**{"launch.name": "broken"}, **log_to("broken")))
        # Both have been launched: from here on, neither sees an edit.
        for name in FILES_OF_RUN:
            Path(name).write_text("raise RuntimeError('edited')")
        said["killed"] = broken.wait(600)
        said["whole"] = whole.wait(600)
        kill.unlink()
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
            said["status"] = cli.main(["resume", str(broken.path)])  # and caption, in this process
        said["resumed"], said["errors"] = broken.state(), errors.getvalue()
    return said | {"runs": (whole, broken)}


def rows(folder: Path, run_file: str) -> list:
    return [json.loads(line) for line in (folder / run_file).read_text().splitlines()]


@pytest.mark.real
def test_killed_and_resumed_it_ends_as_the_unbroken_run_to_the_last_bit(story):
    assert story["whole"].status is Status.COMPLETED, story["whole"].traceback
    assert story["resumed"].status is Status.COMPLETED, story["resumed"].traceback
    whole, broken = story["runs"]
    assert final(whole) == final(broken)
    losses = [[row["loss"] for row in run.metrics()] for run in (whole, broken)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6
    scores = [[row.get("scores") for row in run.metrics()] for run in (whole, broken)]
    assert scores[0] == scores[1] and [bool(each) for each in scores[0]] == [False, False, True, False, False, True]
    assert whole.result()["best"] == broken.result()["best"]


@pytest.mark.real
def test_an_edit_changes_nothing_of_a_run_that_was_launched(story, folder):
    assert story["killed"].status is Status.FAILED
    assert "rank 1 died" in story["killed"].reason
    begins = [(version, value) for what, version, value in rows(folder, "broken-Log-rank1.jsonl") if what == "begin"]
    copy = str(story["runs"][1].path / "code/my_helper.py")
    assert begins == [("as launched", copy)] * 2
    assert "own code" not in story["errors"]
    for run in story["runs"]:
        assert not list((run.path / "code").rglob("__pycache__"))
        check_trusted(run.path, run.params)


@pytest.mark.real
def test_captions_of_a_run_read_their_samples_by_the_code_of_its_launch(story):
    assert story["status"] == 0, story["errors"]
    assert {row["truth"] for row in story["runs"][1].result()["captions"]} <= {"a red circle", "a blue square"}


@pytest.mark.real
def test_callbacks_get_each_step_its_own_copy_of_the_row_and_only_rank_0_what_is_for_it(story, folder):
    whole, _ = story["runs"]
    assert not list(folder.glob("*OnRank0-rank1*"))
    begin, *events, end = [(what, value) for what, _, value in rows(folder, "whole-OnRank0-rank0.jsonl")]
    assert (begin[0], end[0]) == ("begin", "end")
    scores = [("evaluate", ["heldout_loss"]), ("evaluate", ["exact", "longest", "shortest", "texts"])]
    assert events == [
        *[("step", 1), ("step", 2), ("save", 2)],
        *[*scores, ("step", 3), ("save", 3), ("step", 4), ("save", 4)],  # the first score is the best so far
        *[("step", 5), *scores, ("step", 6), ("save", 6)],
    ]
    assert [row["step"] for row in whole.metrics()] == [1, 2, 3, 4, 5, 6], "Log has cleared its rows"


@pytest.fixture
def quick(folder, tmp_path, monkeypatch):
    """A run whose ranks only call their callback, and print what it returns."""
    monkeypatch.chdir(tmp_path)
    Path("my_call.py").write_text("import my_words\ndef call():\n    return my_words.WORDS")
    Path("my_words.py").write_text("WORDS = 'as launched'")
    changes = {"train.callbacks": "my_call:call", "launch.ranks": 1, "launch.folder": str(tmp_path / "runs")}
    return launch(RunParams().change(**changes), entry="tests.launch_entries:call_own_code")


def last_words(run: Run) -> str:
    return run.logs().splitlines()[-1]


@pytest.mark.real
def test_fresh_code_is_taken_where_it_is_asked_for_and_names_what_changed(quick, capsys, monkeypatch):
    Path("my_words.py").write_text("WORDS = 'as edited'")
    assert quick.wait(600).status is Status.COMPLETED, quick.state().traceback
    assert last_words(quick) == "as launched"
    with monkeypatch.context() as closed:
        closed.setenv("XDG_CONFIG_HOME", "/dev/null")  # nobody has a key there
        with own_code_of(quick.path, quick.params):
            assert call_own("train.callbacks", "my_call:call") == "as launched", (
                "by who has started it, in this process"
            )
        with pytest.raises(UntrustedRun):
            check_trusted(quick.path, quick.params)
    told = []
    assert quick.resume(tell=told.append).wait(600).status is Status.COMPLETED
    assert last_words(quick) == "as launched"
    Path("my_call.py").write_text("import my_words, my_more\ndef call():\n    return my_words.WORDS")
    Path("my_more.py").touch()
    assert not told
    cli.main(["resume", str(quick.path), "--fresh-code"])  # has no checkpoint to caption with
    assert quick.state().status is Status.COMPLETED
    assert last_words(quick) == "as edited"
    words = "warning: the own code is not that of the launch: changed my_call.py, my_words.py; added my_more.py"
    assert words in " ".join(capsys.readouterr().err.split())
    check_trusted(quick.path, quick.params)

    Path("my_words.py").write_text("WORDS = 1 / 0")
    with pytest.raises(OwnCodeError, match="train.callbacks: 'my_call:call' cannot be imported: ZeroDivisionError"):
        quick.resume(fresh_code=True)
    (quick.path / "code/my_call.py").write_text("def call():\n    return 2 / 0")
    (quick.path / "code/my_more.py").unlink()
    with pytest.raises(UntrustedRun, match="a file in its code/ is not the one"):
        quick.resume()
    failed = quick.resume(trust=True).wait(600)
    error = "ZeroDivisionError: division by zero"
    assert failed.reason == f"rank 0: train.callbacks: 'my_call:call' raised {error}"
    lines = failed.traceback.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", error)
    assert lines[1:3] == [f'  File "{quick.path}/code/my_call.py", line 2, in call', "    return 2 / 0"]
    assert not shows_package(failed.traceback)


@pytest.mark.real
def test_members_of_a_sweep_that_start_later_run_the_code_of_its_start(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = Path("my_member.py")
    code.write_text("def say(words='as launched'):\n    return words")
    params = RunParams().change(**{"launch.ranks": 1, "launch.folder": str(tmp_path / "runs"), "launch.name": "both"})
    grid = {"train.callbacks": ["my_member:say", {"call": "my_member:say", "words": "of the second"}]}
    both = sweep(params, grid=grid, entry="tests.launch_entries:call_own_code")
    code.write_text("raise RuntimeError('edited')")
    states = both.wait(600)
    assert [state.status for state in states.values()] == [Status.COMPLETED] * 2, str(both)
    assert [last_words(both.run(name)) for name in both.members] == ["as launched", "of the second"]


def test_what_differs_from_the_code_of_the_launch_is_named():
    before = OwnSources({"a.py": b"1", "b.py": b"", "same.py": b""}, {"numpy": "2.0", "torch": "2.14"})
    now = OwnSources({"a.py": b"2", "c.py": b"", "same.py": b""}, {"numpy": "2.1", "torch": "2.14"})
    assert changes(before, now) == "changed a.py; added c.py; gone b.py; numpy 2.1 was 2.0"
    assert changes(before, before) == ""


def test_the_command_prints_the_lines_of_the_person_below_the_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_broken.py").write_text("def read():\n    return 1 / 0\n")
    flags = ["--config", "tiny", "--launch.folder", str(tmp_path / "runs"), "--launch.ranks", "1"]
    assert cli.main(["launch", *flags, "--data.reader", "my_broken:read"]) == 2
    lines = capsys.readouterr().err.splitlines()
    error = "mmfsdp launch: data.reader: 'my_broken:read' raised ZeroDivisionError: division by zero"
    place = f'  File "{tmp_path}/my_broken.py", line 2, in read'
    start = lines.index(error)
    assert lines[start + 1 : start + 4] == ["Traceback (most recent call last):", place, "    return 1 / 0"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    for callbacks in ("[my_broken:Log]", "my_broken:Log", "{call: my_broken:Log, size: 3}"):
        assert cli.main(["launch", *flags, "--train.callbacks", callbacks]) == 2
        assert "train.callbacks: 'my_broken:Log': Log is not there in" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    del sys.modules["my_broken"]
