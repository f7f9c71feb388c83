"""Each command and subcommand answers --help, no arguments, a wrong flag and a wrong value at 80 columns, at once."""

import json
import os
import shlex
from pathlib import Path

import pytest

import mmfsdp
from mmfsdp.kit import cli
from mmfsdp.kit.cli.flags import MAIN_FLAGS, read_words
from tests.processes import in_fresh_python

BENCHES = ["bench wrap", "bench step"]
WITH_FLAGS = ["plan", "verify", "run", "launch", "sweep", "resume"]
ONE_WORD = ["watch", "status", "cancel", "drill", "caption", "report", "resume"]
MISTAKES = (
    *("nothing'", "is missing", "is there twice", "is not", "invalid choice", "required", "should be"),
    *("is neither", "is a folder", "one word too many", "give only one"),
)
"""Each answer to a mistake has one of these words."""
FIRST_TRIES = {
    "tiny": "'tiny' is not a command but a preset; `mmfsdp plan tiny` plans it, `mmfsdp run tiny` trains it",
    "my.yaml": "'my.yaml' is not a command but a file; `mmfsdp plan my.yaml` plans it",
    "plan": "config: is missing: name what to train, as in `mmfsdp plan tiny`",
    "run": "config: is missing: name what to train, as in `mmfsdp run tiny`",
    "launch --train.steps 300": "config: is missing: name what to train, as in `mmfsdp launch tiny`",
    "verify": "config: is missing: name what to train, as in `mmfsdp verify tiny`",
    "plan tinny": "'tinny' is neither a file nor a preset; did you mean tiny?",
    "plan pictures": "'pictures' is a folder; `mmfsdp new my.yaml --pictures pictures` writes a configuration for the",
    "plan tiny --config tiny": "--config: and 'tiny' are two configurations; give only one",
    "plan --train.steps 3 tiny": "'tiny' is one word too many; a preset or a file stands directly after the command",
    "run tiny small": "'small' is one word too many; a preset or a file stands directly after the command",
}
"""Wrong first commands of a newcomer, and what they are answered."""
CODE = """
import contextlib, io, json, sys
from mmfsdp.kit import cli
answers = {}
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(line.split())
    answers[line] = status, out.getvalue(), err.getvalue()
json.dump([answers, [name for name in ("torch", "transformers") if name in sys.modules]], sys.stdout)
"""


def lines() -> list[str]:
    """What a newcomer types."""
    typed = ["", "--help", "-h", "pln", "bench", *FIRST_TRIES]
    for command in [*cli.COMMANDS, *BENCHES]:
        typed += [f"{command} --help", f"{command} --wrong-flag"]
    for command in WITH_FLAGS:
        run = " none" if command == "resume" else ""
        typed += [f"{command} --help-all", f"{command}{run} --train.stpes 3", f"{command}{run} --config nothing"]
    for command in ["plan", "run", "launch"]:
        typed += [f"{command} --train.steps many", f"{command} --fsdp.frozen-policy KEPT"]
    for command in ONE_WORD:
        typed += [command, f"{command} nothing"]
    typed += ["export", "export nothing", "export nothing there", "export nothing there LAYOUT", "sweep nothing"]
    typed += ["sweep", "sweep --grid train.lr", "sweep --grid train.lr=1 train.lr=2"]
    typed += ["bench nothing", "bench wrap --ranks 0", "resume nothing --step -1"]
    return typed


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each line is answered, by one process that has imported no torch."""
    environment = os.environ | {"COLUMNS": "80"}
    nothing = tmp_path_factory.mktemp("nothing")
    (nothing / "my.yaml").touch()
    (nothing / "pictures").mkdir()
    found, imported = json.loads(in_fresh_python(CODE, input=json.dumps(lines()), env=environment, cwd=nothing))
    assert imported == [], "an answer about words needs no torch"
    return found


@pytest.mark.parametrize("line", lines())
def test_a_line_is_answered_at_80_columns(answers, line):
    status, out, err = answers[line]
    assert all(len(printed) <= 80 for printed in out.splitlines()), out
    if line in ("", "-h") or "--help" in line:
        assert status == 0 and err == ""
        assert out.startswith("usage: mmfsdp")
    else:
        assert status == 2 and out == ""
        assert err.startswith("mmfsdp") and err.count("\n") == 1, "one line"
        assert any(words in err for words in MISTAKES)


@pytest.mark.parametrize("line", FIRST_TRIES)
def test_a_wrong_first_command_is_told_the_right_one(answers, line):
    assert FIRST_TRIES[line] in answers[line][2]


@pytest.mark.parametrize("command", cli.EXAMPLES)
def test_an_example_of_the_help_is_understood(answers, command):
    help_text = " ".join(answers[f"{command} --help"][1].split())
    for example in cli.EXAMPLES[command]:
        assert f"mmfsdp {example}" in help_text
        assert read_words(cli.build_parser(), shlex.split(example)).call.__name__ == command


def test_the_version_and_what_answers_it(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"mmfsdp {mmfsdp.__version__} from {Path(mmfsdp.__file__).parent}")


@pytest.mark.parametrize("command", WITH_FLAGS)
def test_help_opens_with_what_matters_and_help_all_has_the_rest(answers, command):
    short, whole = answers[f"{command} --help"][1], answers[f"{command} --help-all"][1]
    assert "--fsdp.frozen-policy" in short and "--train.schedule" not in short
    for flag in ("--fsdp.frozen-dtype", "--fsdp.memory-budget-gib"):
        assert flag in short
    assert " ".join(short.split()).count("(default: ") >= len(MAIN_FLAGS)
    assert short.count("\n") < 130
    assert "--train.schedule" in whole and "--launch.constraint" in whole
    assert "Default" in whole


def test_the_usage_names_every_command(answers):
    usage = answers["--help"][1]
    for command in cli.COMMANDS:
        assert f"\n    {command} " in usage, command
