"""Python's collector while libraries are imported: paused, and then as it was."""

import gc
import subprocess
import sys

import pytest

from mmfsdp.loading import collector_paused


def test_the_collector_is_as_it_was_afterwards():
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise ImportError("no torch")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_looks_through_little_of_what_it_imports_and_ends_in_silence():
    """triton's bindings complain of leaks at the end of a process whose objects stay out of reach of its collector."""
    code = """
import gc, sys
from mmfsdp.cli import main
assert main(["plan", "--config", "tiny"]) == 0
print(gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 100_000, gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True True True"
    assert done.stderr == ""
