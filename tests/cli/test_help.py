"""Each command and subcommand answers --help, no arguments, a wrong flag and a wrong value at 80 columns, at once."""

import json
import os

import pytest

from mmfsdp.kit import cli
from tests.processes import in_fresh_python

BENCHES = ["bench wrap", "bench step"]
WITH_FLAGS = ["plan", "verify", "run", "launch", "sweep", "resume"]
ONE_WORD = ["watch", "status", "cancel", "drill", "caption", "report", "resume"]
MISTAKES = ("nothing'", "is missing", "is there twice", "is not", "invalid choice", "required", "should be")
"""Each answer to a mistake has one of these words."""
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
    typed = ["", "--help", "-h", "pln", "bench"]
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


@pytest.mark.parametrize("command", WITH_FLAGS)
def test_help_opens_with_what_matters_and_help_all_has_the_rest(answers, command):
    short, whole = answers[f"{command} --help"][1], answers[f"{command} --help-all"][1]
    assert "--fsdp.frozen-policy" in short and "--train.schedule" not in short
    assert short.count("\n") < 100
    assert "--train.schedule" in whole and "--launch.constraint" in whole
    assert "Default" in whole


def test_the_usage_names_every_command(answers):
    usage = answers["--help"][1]
    for command in cli.COMMANDS:
        assert f"\n    {command} " in usage, command
