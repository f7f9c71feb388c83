"""Make .venv here and install this project into it: `python3 install.py`, with `test` for what the tests need, too.

`make` calls it, and calls it again when pyproject.toml has changed. Two at once take turns. Of a missing module, disk
or network it says in a line what pip tells at length. On a cluster:

  --system-torch     keep the torch and torchvision that are there, such as those of a module
  --torch-index URL  take both from one index; --cpu: from PyTorch's index of builds for CPUs
  --download DIR     install nothing, but bring all wheels into a folder: a wheelhouse
  --from DIR         install from that folder, without a network
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENV = HERE / ".venv"
PYTHON = ENV / "bin/python"
CONSTRAINTS = ENV / "constraints.txt"
"""The versions of torch and torchvision that pip must leave as they are."""

ROOM = 7e9 if sys.platform == "linux" else 2e9
"""Bytes that an installation takes: with CUDA's libraries, which torch brings on Linux, and without."""
CPU_ROOM = 3e9
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

UNDONE = """The installation did not finish: see above. Most often pypi.org cannot be reached (no internet, or a proxy
that pip is not told of), the disk is full, or torch has no build for this Python and machine: it has for Linux with
glibc and for macOS on Apple silicon. Then give the same command again."""
NO_INDEX = """{url} cannot be reached, or has no torch and torchvision for this Python and machine: see above. Nothing
of another index was taken for it. Then give the same command again."""
NO_TORCH = """--system-torch: {python} finds no torch with torchvision beside it. Load the module that has both, or
start with the Python that has them, then give the same command again."""
OLD_TORCH = """--system-torch: torch is {version} here, and this needs {need}. Load a newer module; without
--system-torch, a newer one is installed into .venv."""
OWN_TORCH = ".venv has a torch of its own already, which would win over the site's: remove .venv first."
VERSIONS = "from importlib.metadata import version as v; print(v('torch'), v('torchvision'))"


def main(*words: str) -> str | int:
    """Returns 0, or what is missing."""
    chosen = read_words(words)
    with open(HERE / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find_spec("ensurepip") is None or find_spec("venv") is None:
            return f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"
        if missing := room_missing(chosen):
            return missing
        if chosen.system_torch and list(ENV.glob("lib/*/site-packages/torch")):
            return OWN_TORCH
        if not (ENV / "bin/pip").exists() or not PYTHON.exists() or (chosen.system_torch and not sees_system()):
            kind = ["--system-site-packages"] if chosen.system_torch else []
            subprocess.run([sys.executable, "-m", "venv", *kind, ENV], check=True)
        CONSTRAINTS.unlink(missing_ok=True)
        if chosen.system_torch and (problem := keep_system_torch()):
            return problem
        if chosen.torch_index and not torch_of_index(chosen):
            return NO_INDEX.format(url=chosen.torch_index)
        return 0 if everything_else(chosen) else UNDONE


def read_words(words: tuple[str, ...]) -> argparse.Namespace:
    """Return the choices of the command line; ends with a message for choices that exclude each other."""
    about, options = __doc__.split("On a cluster:")[0], {"dest": "torch_index", "metavar": "URL"}
    parser = argparse.ArgumentParser(prog="install.py", description=about)
    parser.add_argument("extra", nargs="?", default="", help="an extra of pyproject.toml, such as test")
    torch = parser.add_mutually_exclusive_group()
    torch.add_argument("--system-torch", action="store_true", help="keep the torch and torchvision that are there")
    torch.add_argument("--torch-index", help="take torch and torchvision from this index", **options)
    help_cpu = f"the same from {CPU_INDEX}"
    torch.add_argument("--cpu", dest="torch_index", action="store_const", const=CPU_INDEX, help=help_cpu)
    wheels = parser.add_mutually_exclusive_group()
    wheels.add_argument("--download", metavar="DIR", help="bring all wheels into a folder; install nothing")
    wheels.add_argument("--from", dest="wheels", metavar="DIR", help="install from such a folder, without a network")
    return parser.parse_args(words)


def room_missing(chosen: argparse.Namespace) -> str:
    """Return that the disk is too full for torch, if torch is to come here; "" if it is not."""
    if chosen.system_torch or list(ENV.glob("lib/*/site-packages/torch")):
        return ""
    room = CPU_ROOM if chosen.torch_index == CPU_INDEX else ROOM
    free = shutil.disk_usage(HERE).free
    if free > room:
        return ""
    return f"The disk of {HERE} has {free / 1e9:.1f} GB left; this takes {room / 1e9:.0f} GB. Free some first."


def sees_system() -> bool:
    """Return whether .venv sees the packages of the Python that it was made with."""
    return "include-system-site-packages = true" in (ENV / "pyvenv.cfg").read_text(encoding="utf-8")


def keep_system_torch() -> str:
    """Let pip leave the site's torch and torchvision as they are. Returns why they cannot be used; "" if they can."""
    asked = subprocess.run([PYTHON, "-c", VERSIONS], capture_output=True, text=True)
    if asked.returncode:
        return NO_TORCH.format(python=sys.executable)
    torch, torchvision = asked.stdout.split()
    need = torch_requirement()
    if [int(part) for part in torch.split(".")[:2]] < [int(part) for part in re.findall(r"\d+", need)[:2]]:
        return OLD_TORCH.format(version=torch, need=need)
    keep_versions(torch, torchvision)
    return ""


def torch_requirement() -> str:
    """Return what pyproject.toml asks of torch, such as torch>=2.11."""
    found = re.search(r'"(torch[<>=~][^"]*)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1] if found else "torch"


def torch_of_index(chosen: argparse.Namespace) -> bool:
    """Bring torch and torchvision from one index. Their own requirements come with everything else."""
    both = ("--no-deps", "--index-url", chosen.torch_index, torch_requirement(), "torchvision")
    if not chosen.download:
        if not pip("install", *both):
            return False
        asked = subprocess.run([PYTHON, "-c", VERSIONS], capture_output=True, text=True, check=True)
        keep_versions(*asked.stdout.split())
        return True
    folder = Path(chosen.download)
    for wheel in [*folder.glob("torch-*.whl"), *folder.glob("torchvision-*.whl")]:
        wheel.unlink()  # of an earlier download: there must be one of each
    if not pip("download", "--dest", chosen.download, *both):
        return False
    keep_versions(*(next(folder.glob(f"{name}-*.whl")).name.split("-")[1] for name in ("torch", "torchvision")))
    return True


def keep_versions(torch: str, torchvision: str) -> None:
    """Let pip leave torch and torchvision in these versions."""
    CONSTRAINTS.write_text(f"torch=={torch}\ntorchvision=={torchvision}\n")


def everything_else(chosen: argparse.Namespace) -> bool:
    """Install this project with all that it needs, or bring the wheels of that into a folder."""
    project = f".[{chosen.extra}]" if chosen.extra else "."
    options = ["--constraint", str(CONSTRAINTS)] if CONSTRAINTS.exists() else []
    if chosen.download:
        built = re.search(r"requires = \[(.*?)\]", (HERE / "pyproject.toml").read_text(encoding="utf-8"))
        builders = re.findall(r'"([^"]+)"', built[1]) if built else []
        options += ["--dest", chosen.download, "--find-links", chosen.download]
        return pip("download", *options, project, *builders)
    if chosen.wheels:
        options += ["--no-index", "--find-links", chosen.wheels]
    return pip("install", *options, "-e", project)


def pip(*words: str) -> bool:
    """Run pip of .venv. Returns whether it worked."""
    command = [PYTHON, "-m", "pip", words[0], "--disable-pip-version-check", *words[1:]]
    return subprocess.run(command, cwd=HERE).returncode == 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (KeyboardInterrupt, subprocess.CalledProcessError):
        sys.exit("Stopped half-way. Give the same command again.")
