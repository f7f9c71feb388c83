"""Make .venv here and install this project into it: `python3 install.py`, with `test` for what the tests need, too.

`make` calls it, and calls it again when pyproject.toml has changed. Two at once take turns. Of a missing module, disk
or network it says in a line what pip tells at length. On a cluster:

  --system-torch     keep the torch and torchvision that are there, such as those of a module
  --torch-index URL  take both from one index; --cpu: from PyTorch's index of builds for CPUs
  --download DIR     install nothing, but bring all wheels into a folder: a wheelhouse
  --from DIR         install from that folder, without a network

In a notebook, and for a class:

  --here             install into the Python that runs this, such as a notebook's kernel (`%run install.py --here`),
                     and keep its torch; says whether the kernel must be restarted
  --kernel NAME      make a kernel of that name for Jupyter, for you or with --prefix DIR for all who use Jupyter there
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions
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
NO_PIP = "{python} has no pip: give `{python} -m ensurepip`, or install python3-pip, and give the same command again."
NO_VISION = """--here: torch {torch} is here, without torchvision. Install the torchvision of the same build first, from
where this torch came; then give the same command again."""
OLD_HERE = """--here: torch is {version} here, and this needs {need}. It is not replaced, since other packages here may
need it. Choose a newer image or runtime; or give `python3 install.py --kernel mmfsdp`, which makes an environment and
a kernel of its own."""
HAS_TORCH = "--here keeps torch {version}, which is here already: leave --cpu and --torch-index out."
TWO_WAYS = "{flag} makes no sense with --here, which keeps the torch that is there: leave one of the two out."
RESTART = """Installed. Restart the kernel now, then go on: it has loaded {changes}."""
CHANGED = """Installed. A kernel that runs already must be restarted if it has loaded one of these: {changes}."""
READY = "Installed: this Python imports {name} now."
KERNEL_VARIABLES = ("MMFSDP_CLUSTERS", "MMFSDP_CACHE", "HF_HOME")
"""What a new kernel sets for its notebooks, if it is set where the kernel is made."""
VERSIONS = "from importlib.metadata import version as v; print(v('torch'), v('torchvision'))"


def main(*words: str) -> str | int:
    """Returns 0, or what is missing."""
    chosen = read_words(words)
    with open(HERE / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = install_here(chosen) if chosen.here else install_in_venv(chosen)
        if not missing and chosen.kernel:
            missing = make_kernel(chosen)
    return missing or 0


def install_in_venv(chosen: argparse.Namespace) -> str:
    """Make .venv and install into it. Returns what is missing."""
    if find_spec("ensurepip") is None or find_spec("venv") is None:
        return f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"
    if missing := room_missing(chosen):
        return missing
    if chosen.system_torch and list(ENV.glob("lib/*/site-packages/torch")):
        return OWN_TORCH
    if not (ENV / "bin/pip").exists() or not PYTHON.exists() or (chosen.system_torch and not sees_system()):
        kind = ["--system-site-packages"] if chosen.system_torch else []
        subprocess.run([sys.executable, "-m", "venv", *kind, ENV], check=True)
    chosen.constraints.unlink(missing_ok=True)
    if chosen.system_torch and (problem := keep_system_torch(chosen)):
        return problem
    if chosen.torch_index and not torch_of_index(chosen):
        return NO_INDEX.format(url=chosen.torch_index)
    return "" if everything_else(chosen) else UNDONE


def install_here(chosen: argparse.Namespace) -> str:
    """Install into the Python that runs this, and keep its torch. Returns what is missing, or that a restart is."""
    if subprocess.run([chosen.python, "-m", "pip", "--version"], capture_output=True).returncode:
        return NO_PIP.format(python=chosen.python)
    versions = versions_here(chosen)
    torch = versions.get("torch")
    if torch is None:
        if missing := room_missing(chosen):
            return missing
        if chosen.torch_index and not torch_of_index(chosen):
            return NO_INDEX.format(url=chosen.torch_index)
    elif chosen.torch_index:
        return HAS_TORCH.format(version=torch)
    elif is_old(torch):
        return OLD_HERE.format(version=torch, need=torch_requirement())
    elif "torchvision" not in versions:
        return NO_VISION.format(torch=torch)
    else:
        keep_versions(chosen, torch, versions["torchvision"])
    shutil.rmtree(HERE / "build/lib", ignore_errors=True)  # pip would take what an earlier build has left there
    if not everything_else(chosen):
        return UNDONE
    importlib.invalidate_caches()
    if os.path.isdir(site.getusersitepackages()):
        site.addsitedir(site.getusersitepackages())  # Python left it out if it was not there at the start
    print(what_changed(versions, versions_here(chosen)))
    return ""


def versions_here(chosen: argparse.Namespace) -> dict[str, str]:
    """Return the versions of all packages that a new process of this Python finds, by their names in small letters."""
    code = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    said = subprocess.run([chosen.python, "-c", code], capture_output=True, text=True, check=True).stdout
    versions: dict[str, str] = {}
    for word in said.split():
        name, _, version = word.partition("==")
        versions.setdefault(name.lower(), version)  # the first on the path is the one that is imported
    return versions


def what_changed(before: dict[str, str], after: dict[str, str]) -> str:
    """Return what a person does next: nothing, or to restart a kernel that has loaded a package of another version."""
    changed = [name for name, version in before.items() if after.get(name) != version]
    in_kernel = "ipykernel" in sys.modules
    if in_kernel:
        loaded = {name.partition(".")[0] for name in sys.modules}
        owners = packages_distributions()
        in_use = {owner.lower() for module in loaded for owner in owners.get(module, [])}
        changed = [name for name in changed if name in in_use]
    if not changed:
        return READY.format(name=project_name())
    changes = ", ".join(f"{name} {before[name]}, now {after.get(name, 'gone')}" for name in changed)
    return (RESTART if in_kernel else CHANGED).format(changes=changes)


def make_kernel(chosen: argparse.Namespace) -> str:
    """Make a kernel for Jupyter of the Python that was installed into. Returns why there is none."""
    where = ["--prefix", chosen.prefix] if chosen.prefix else ["--user"]
    for variable in KERNEL_VARIABLES:
        if variable in os.environ:
            where += ["--env", variable, os.environ[variable]]
    command = [chosen.python, "-m", "ipykernel", "install", "--name", chosen.kernel]
    done = subprocess.run([*command, "--display-name", chosen.kernel, *where])
    return f"--kernel: there is no kernel {chosen.kernel}: see above" if done.returncode else ""


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
    about_here = "install into the Python that runs this, such as a notebook's kernel, and keep its torch"
    parser.add_argument("--here", action="store_true", help=about_here)
    parser.add_argument("--kernel", metavar="NAME", help="make a kernel of that name for Jupyter")
    parser.add_argument(
        "--prefix", metavar="DIR", help="where the kernel is for all, such as /usr/local; unset: for you"
    )
    chosen = parser.parse_args(words)
    for flag, value in (("--system-torch", chosen.system_torch), ("--download", chosen.download)):
        if chosen.here and value:
            parser.error(TWO_WAYS.format(flag=flag))
    if chosen.prefix and not chosen.kernel:
        parser.error("--prefix says where the kernel of --kernel NAME is: give both")
    if chosen.kernel and not re.fullmatch(r"[A-Za-z0-9._-]+", chosen.kernel):
        parser.error(f"--kernel: {chosen.kernel!r} is no name of a kernel; use letters, digits, '.', '_' and '-'")
    if chosen.kernel and chosen.download:
        parser.error("--kernel needs an installation, and --download installs nothing: leave one of the two out")
    chosen.python, chosen.constraints = PYTHON, CONSTRAINTS
    if chosen.here:
        chosen.python, chosen.constraints = Path(sys.executable), Path(tempfile.mkdtemp()) / "constraints.txt"
    return chosen


def room_missing(chosen: argparse.Namespace) -> str:
    """Return that the disk is too full for torch, if torch is to come here; "" if it is not."""
    if chosen.system_torch or (not chosen.here and list(ENV.glob("lib/*/site-packages/torch"))):
        return ""
    folder = sys.prefix if chosen.here else HERE
    room = CPU_ROOM if chosen.torch_index == CPU_INDEX else ROOM
    free = shutil.disk_usage(folder).free
    if free > room:
        return ""
    return f"The disk of {folder} has {free / 1e9:.1f} GB left; this takes {room / 1e9:.0f} GB. Free some first."


def sees_system() -> bool:
    """Return whether .venv sees the packages of the Python that it was made with."""
    return "include-system-site-packages = true" in (ENV / "pyvenv.cfg").read_text(encoding="utf-8")


def keep_system_torch(chosen: argparse.Namespace) -> str:
    """Let pip leave the site's torch and torchvision as they are. Returns why they cannot be used; "" if they can."""
    asked = subprocess.run([PYTHON, "-c", VERSIONS], capture_output=True, text=True)
    if asked.returncode:
        return NO_TORCH.format(python=sys.executable)
    torch, torchvision = asked.stdout.split()
    if is_old(torch):
        return OLD_TORCH.format(version=torch, need=torch_requirement())
    keep_versions(chosen, torch, torchvision)
    return ""


def is_old(torch: str) -> bool:
    """Return whether a version of torch is older than this project needs."""
    need = re.findall(r"\d+", torch_requirement())
    return [int(part) for part in torch.split(".")[:2]] < [int(part) for part in need[:2]]


def project_name() -> str:
    """Return the name of this project in pyproject.toml."""
    found = re.search(r'^name = "([^"]*)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1] if found else "it"


def torch_requirement() -> str:
    """Return what pyproject.toml asks of torch, such as torch>=2.11."""
    found = re.search(r'"(torch[<>=~][^"]*)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1] if found else "torch"


def torch_of_index(chosen: argparse.Namespace) -> bool:
    """Bring torch and torchvision from one index. Their own requirements come with everything else."""
    both = ("--no-deps", "--index-url", chosen.torch_index, torch_requirement(), "torchvision")
    if not chosen.download:
        origin = Path(chosen.constraints).with_name("torch_index")
        known = origin.exists() and origin.read_text(encoding="utf-8") == chosen.torch_index
        again = [] if known else ["--force-reinstall"]  # pip would be content with a torch of another index
        if not pip(chosen, "install", *again, *both):
            return False
        origin.write_text(chosen.torch_index, encoding="utf-8")
        asked = subprocess.run([chosen.python, "-c", VERSIONS], capture_output=True, text=True, check=True)
        keep_versions(chosen, *asked.stdout.split())
        return True
    folder = Path(chosen.download)
    for wheel in [*folder.glob("torch-*.whl"), *folder.glob("torchvision-*.whl")]:
        wheel.unlink()  # of an earlier download: there must be one of each
    if not pip(chosen, "download", "--dest", chosen.download, *both):
        return False
    keep_versions(chosen, *(next(folder.glob(f"{name}-*.whl")).name.split("-")[1] for name in ("torch", "torchvision")))
    return True


def keep_versions(chosen: argparse.Namespace, torch: str, torchvision: str) -> None:
    """Let pip leave torch and torchvision in these versions."""
    chosen.constraints.write_text(f"torch=={torch}\ntorchvision=={torchvision}\n")


def everything_else(chosen: argparse.Namespace) -> bool:
    """Install this project with all that it needs, or bring the wheels of that into a folder."""
    project = f".[{chosen.extra}]" if chosen.extra else "."
    options = ["--constraint", str(chosen.constraints)] if chosen.constraints.exists() else []
    if chosen.download:
        built = re.search(r"requires = \[(.*?)\]", (HERE / "pyproject.toml").read_text(encoding="utf-8"))
        builders = re.findall(r'"([^"]+)"', built[1]) if built else []
        options += ["--dest", chosen.download, "--find-links", chosen.download]
        return pip(chosen, "download", *options, project, *builders)
    if chosen.wheels:
        options += ["--no-index", "--find-links", chosen.wheels]
    if chosen.here:  # a kernel that runs imports a copy at once, and a link to this folder only after a restart
        return pip(chosen, "install", *options, project)
    return pip(chosen, "install", *options, "-e", project)


def pip(chosen: argparse.Namespace, *words: str) -> bool:
    """Run pip of the Python that is installed into. Returns whether it worked."""
    command = [chosen.python, "-m", "pip", words[0], "--disable-pip-version-check", *words[1:]]
    return subprocess.run(command, cwd=HERE).returncode == 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (KeyboardInterrupt, subprocess.CalledProcessError):
        sys.exit("Stopped half-way. Give the same command again.")
