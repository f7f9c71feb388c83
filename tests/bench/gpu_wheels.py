"""Download the wheels that tests/bench/gpu.sh needs, for another Python and machine, and say how to install them.

torch is left to the GPU's machine, which mostly has one that was built for its driver. Name its version by --torch:
torchvision is made for one version of torch. JupyterLab is left out, since no part needs it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_NEEDED = {"jupyterlab"}
GLIBC = 28
"""Wheels for this minor version of glibc 2, and older ones, are taken: Debian 10, Ubuntu 20.04 and RHEL 8 have it."""
OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")
"""Distributions that come with torch."""


def requirements() -> list[str]:
    """Return the direct dependencies in pyproject.toml, but for those that no part needs."""
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    assert block
    found = re.findall(r'^ *"([^"]+)"', block[1], re.M)
    return [requirement for requirement in found if distribution(requirement) not in NOT_NEEDED]


def distribution(requirement: str) -> str:
    """Return the name in a requirement such as `torch>=2.11`, as the registry writes it."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def target_options(python: str, machine: str) -> list[str]:
    """Return pip's options that choose wheels for another Python on Linux."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    # pip takes each tag as it stands: a machine that runs wheels for glibc 2.28 runs those for 2.17, too.
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    tags += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    for tag in tags:
        options += ["--platform", tag]
    return options


def pip(*words: str) -> None:
    """Call pip of this Python; exit if it fails, after what it has said."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)


def resolve(wanted: Iterable[str], target: list[str]) -> list[tuple[str, str]]:
    """Return (name, version) of everything that the requirements need. Reads metadata only: torch is large."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        nowhere = ["--dry-run", "--ignore-installed", "--target", folder]  # pip 23 wants a target, and installs nothing
        pip("install", "--quiet", *nowhere, "--report", str(report), *target, *wanted)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return [(item["metadata"]["name"], item["metadata"]["version"]) for item in installs]


def main() -> None:
    """Download, and print the command that installs."""
    parser = argparse.ArgumentParser(prog="tests/bench/gpu_wheels.sh", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu_wheels"))
    parser.add_argument("--python", default="3.12", help="of the GPU's machine: python3 --version")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"), help="of its processor: uname -m")
    parser.add_argument("--torch", help="the version of its torch; unset, the newest")
    parser.add_argument("--with-torch", action="store_true", help="download torch, too, with CUDA's libraries: 3 GB")
    choices = parser.parse_args()
    target = target_options(choices.python, choices.machine)
    wanted = requirements()
    pinned = [f"torch=={choices.torch}"] if choices.torch else []
    packages = resolve([*wanted, *pinned], target)
    if not choices.with_torch:
        packages = [(name, version) for name, version in packages if not OF_TORCH.match(distribution(name))]
        wanted = [requirement for requirement in wanted if distribution(requirement) != "torch"]
    choices.folder.mkdir(parents=True, exist_ok=True)
    exact = [f"{name}=={version}" for name, version in packages]
    pip("download", "--quiet", "--no-deps", "--dest", str(choices.folder), *target, *exact)
    (choices.folder / "requirements.txt").write_text("\n".join(wanted) + "\n")
    size = sum(path.stat().st_size for path in choices.folder.iterdir())
    print(f"{len(packages)} wheels, {size / 1e6:.0f} MB, in {choices.folder}. On the GPU's machine:")
    print(f"python3 -m pip install --no-index --find-links {choices.folder} -r {choices.folder}/requirements.txt")


if __name__ == "__main__":
    main()
