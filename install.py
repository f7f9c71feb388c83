"""Make .venv here and install this project into it: `python3 install.py`, with `test` for what the tests need, too.

`make` calls it, and calls it again when pyproject.toml has changed. Two at once take turns. Of a missing module, disk
or network it says in a line what pip tells at length.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOM = 7e9 if sys.platform == "linux" else 2e9
"""Bytes that an installation takes: with CUDA's libraries, which torch brings on Linux, and without."""

UNDONE = """The installation did not finish: see above. Most often pypi.org cannot be reached (no internet, or a proxy
that pip is not told of), the disk is full, or torch has no build for this Python and machine: it has for Linux with
glibc and for macOS on Apple silicon. Then give the same command again."""


def main(extra: str = "") -> str | int:
    """Returns 0, or what is missing."""
    here = Path(__file__).resolve().parent
    env = here / ".venv"
    with open(here / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find_spec("ensurepip") is None or find_spec("venv") is None:
            return f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"
        free = shutil.disk_usage(here).free
        if not list(env.glob("lib/*/site-packages/torch")) and free < ROOM:
            return f"The disk of {here} has {free / 1e9:.1f} GB left; this takes {ROOM / 1e9:.0f} GB. Free some first."
        if not (env / "bin/pip").exists() or not (env / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", env], check=True)
        pip = [env / "bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "-e", f".[{extra}]" if extra else "."], cwd=here).returncode == 0
    return 0 if done else UNDONE


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:2]))
    except (KeyboardInterrupt, subprocess.CalledProcessError):
        sys.exit("Stopped half-way. Give the same command again.")
