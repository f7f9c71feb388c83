"""Ctrl-C in the first seconds of a command."""

import os
import signal
import subprocess
import sys

import pytest

from mmfsdp.kit import cli
from mmfsdp.kit.cli import interrupts

CODE = """
import os, signal, sys

where = sys.argv[1]

class Interrupt:
    def find_spec(self, name, *_):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupt())
from mmfsdp.__main__ import main
sys.argv[1:] = ["runs", "nothing"]
sys.exit(main())
"""


@pytest.mark.real
def test_ctrl_c_while_the_command_is_imported_ends_it_in_one_line():
    heeds, ignores = (CODE.format(handler=f"signal.{name}") for name in ("default_int_handler", "SIG_IGN"))
    for module in ("mmfsdp.kit.cli", "pydantic", "mmfsdp.kit.cli.running"):
        ended = subprocess.run([sys.executable, "-c", heeds, module], capture_output=True, text=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\nmmfsdp: interrupted\n"), module
    goes_on = subprocess.run([sys.executable, "-c", ignores, "pydantic"], capture_output=True, text=True)
    assert "nothing" in goes_on.stdout + goes_on.stderr, "a shell's job in the background ignores it"


def test_an_error_that_a_library_makes_of_ctrl_c_is_no_fault_of_the_package(monkeypatch, capsys):
    def runs(_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("of a module that was half imported") from None

    monkeypatch.setattr(cli, "runs", runs)
    monkeypatch.setattr(interrupts, "_noted", [])
    before = signal.signal(signal.SIGINT, interrupts.note)
    try:
        assert cli.main(["runs"]) == 130 and capsys.readouterr() == ("", "\nmmfsdp: interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)
