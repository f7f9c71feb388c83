"""Ctrl-C in the first seconds of a command."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from mmfsdp.kit import cli
from mmfsdp.kit.cli import parser
from tests.waiting import until

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


@pytest.mark.real
def test_ctrl_c_at_a_late_import_and_while_ranks_are_started_ends_in_one_line(tmp_path):
    late = CODE.format(handler="signal.default_int_handler").replace('"runs", "nothing"', '"plan", "tiny"')
    ended = subprocess.run([sys.executable, "-c", late, "transformers"], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[1:] == ["", "mmfsdp: interrupted"], "below what the command says it does"

    # A terminal sends Ctrl-C to all processes: the fork server is importing, and no rank is forked yet.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's `&` ignores it
    code += "from mmfsdp.kit import cli; sys.argv[1:] = ['verify', 'tiny']; sys.exit(cli.main())"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as verify:
        until(lambda: any("forkserver" in words for words in lines_of_children(verify)))
        # It does while it starts the fork server, which inherits that.
        until(lambda: not ignores_interrupts(verify.pid))
        os.killpg(verify.pid, signal.SIGINT)
        _, said = verify.communicate(timeout=600)  # its end of file: no rank and no fork server is left
    assert verify.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == "mmfsdp: interrupted"


def ignores_interrupts(pid: int) -> bool:
    """True if a process ignores SIGINT now, as the system says."""
    (mask,) = [line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def lines_of_children(process: subprocess.Popen) -> list[str]:
    """The command lines of the processes below another one. Some end meanwhile."""
    lines = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            lines.append(" ".join(child.cmdline()))
        except psutil.NoSuchProcess:  # a zombie, too
            continue
    return lines


def test_an_error_that_a_library_makes_of_ctrl_c_is_no_fault_of_the_package(monkeypatch, capsys):
    def runs(_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("of a module that was half imported") from None

    monkeypatch.setattr(parser, "runs", runs)
    monkeypatch.setattr(cli, "interrupts", [])
    before = signal.signal(signal.SIGINT, cli.note_interrupt)
    try:
        assert cli.main(["runs"]) == 130 and capsys.readouterr() == ("", "\nmmfsdp: interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)
