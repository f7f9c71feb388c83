"""`python -m tests.bench.ways_in FOLDER [WAY ...]`: time ways to install, in fresh environments, and their disk space.

Needs the network, some 16 GB in FOLDER and half an hour for all. The WAYs are download, from, system-torch, here, plain
and pip; from, system-torch and here take the wheels that download has brought. Writes notebooks/measured/ways_in.json
after each way, where figures of other ways stay, and from which `python -m tests.pages` makes the table of
notebooks/reference/classroom.md.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = [sys.executable, "install.py"]
STORED = ROOT / "notebooks" / "measured" / "ways_in.json"
SEES = "import torch, torchvision, mmfsdp; print(torch.__version__)"


def size_gb(folder: Path) -> float:
    """Return what a folder takes on disk, in GB."""
    said = subprocess.run(["du", "-sk", folder], capture_output=True, text=True, check=True).stdout
    return round(int(said.split()[0]) * 1024 / 1e9, 1)


class Bench:
    """Runs ways to install, each in a copy of the repository and an environment of its own."""

    def __init__(self, folder: Path):
        self.folder, self.wheels = folder, folder / "wheelhouse"
        self.rows: list[dict[str, object]] = []
        if STORED.exists():
            self.rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"]

    def project(self, name: str) -> Path:
        """Return a fresh copy of the repository, without what runs have left."""
        target = self.folder / name
        words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for file in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
            if not file.startswith("tests/"):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, target / file)
        return target

    def measure(
        self, way: str, command: list[object], *, cwd: Path, taken: Path, python: Path | None, **variables: str
    ):
        """Time a command, check that torch and mmfsdp are imported, and note what it took. Raises if it fails."""
        before = size_gb(taken) if taken.exists() else 0.0
        print(f"{way} ...", flush=True)
        began = time.monotonic()
        subprocess.run([str(word) for word in command], cwd=cwd, env=os.environ | variables, check=True)
        seconds = time.monotonic() - began
        row = {"way": way, "minutes": round(seconds / 60, 1), "gb": round(size_gb(taken) - before, 1)}
        if python:
            said = subprocess.run(
                [python, "-c", SEES], cwd=self.folder, env=os.environ | variables, capture_output=True, text=True
            )
            assert said.returncode == 0, said.stderr
            row["torch"] = said.stdout.strip()
        self.rows = [older for older in self.rows if older["way"] != way] + [row]
        about = {"date": date.today().isoformat(), "cpus": os.cpu_count(), "machine": platform.machine()}
        STORED.write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")

    def environment(self, name: str, *packages: str) -> Path:
        """Return the Python of a fresh environment with these packages of the wheelhouse."""
        python = self.folder / name / "bin/python"
        subprocess.run([sys.executable, "-m", "venv", self.folder / name], check=True)
        if packages:
            pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", self.wheels, *packages]
            subprocess.run(pip, check=True)
        return python

    def download(self) -> None:
        """Measure a wheelhouse for all; the next three install from it."""
        project = self.project("download")
        way = "`install.py --download DIR`: wheels for all, once"
        self.measure(way, [*INSTALL, "--download", self.wheels], cwd=project, taken=self.wheels, python=None)
        shutil.rmtree(project)

    def from_wheels(self) -> None:
        """Measure an installation from the wheelhouse."""
        project = self.project("from")
        venv = project / ".venv"
        way = "`install.py --from DIR`: from these wheels, without a network"
        words = [*INSTALL, "--from", self.wheels]
        self.measure(way, words, cwd=project, taken=venv, python=venv / "bin/python")
        shutil.rmtree(project)

    def system_torch(self) -> None:
        """Measure an installation beside the torch of a module, which puts its packages on the path."""
        self.environment("module", "torch", "torchvision")
        (packages,) = (self.folder / "module/lib").glob("python*/site-packages")
        project = self.project("system_torch")
        venv = project / ".venv"
        words = [*INSTALL, "--system-torch", "--from", self.wheels]
        way = "`install.py --system-torch --from DIR`: torch is the site's"
        module = {"PYTHONPATH": str(packages)}
        self.measure(way, words, cwd=project, taken=venv, python=venv / "bin/python", **module)
        shutil.rmtree(project)
        shutil.rmtree(self.folder / "module")

    def here(self) -> None:
        """Measure an installation into a Python that has torch, as a notebook's may."""
        with_torch = self.environment("kernel", "torch", "torchvision")
        (packages,) = (self.folder / "kernel/lib").glob("python*/site-packages")
        project = self.project("here")
        way = "`install.py --here --from DIR`: into a Python that has torch"
        words = [with_torch, "install.py", "--here", "--from", self.wheels]
        self.measure(way, words, cwd=project, taken=packages, python=with_torch)
        shutil.rmtree(project)
        shutil.rmtree(self.folder / "kernel")

    def plain(self) -> None:
        """Measure what `make` does."""
        project = self.project("plain")
        venv = project / ".venv"
        way = "`install.py`, as `make` does: from PyPI"
        self.measure(way, INSTALL, cwd=project, taken=venv, python=venv / "bin/python", PIP_NO_CACHE_DIR="1")
        shutil.rmtree(project)

    def pip(self) -> None:
        """Measure pip alone."""
        project, python = self.project("pip"), self.environment("fresh")
        way = "`pip install` of the repository into a new environment: from PyPI"
        words = [python, "-m", "pip", "install", project]
        self.measure(way, words, cwd=project, taken=self.folder / "fresh", python=python, PIP_NO_CACHE_DIR="1")
        shutil.rmtree(project)
        shutil.rmtree(self.folder / "fresh")


WAYS = {
    "download": Bench.download,
    "from": Bench.from_wheels,
    "system-torch": Bench.system_torch,
    "here": Bench.here,
    "plain": Bench.plain,
    "pip": Bench.pip,
}


def table(stored: dict) -> str:
    """Return the stored figures as a table."""
    lines = ["| way in | minutes | GB on disk |", "|---|---|---|"]
    for row in stored["rows"]:
        lines.append(f"| {row['way']} | {row['minutes']} | {row['gb']} |")
    where = f"Measured on {stored['date']} on a busy virtual machine with {stored['cpus']} cores ({stored['machine']}) "
    where += "and a mirror of PyPI on its own disk; over a network add the time to bring 3 GB."
    return "\n".join([*lines, "", where]) + "\n"


if __name__ == "__main__":
    bench = Bench(Path(sys.argv[1]))
    for way in sys.argv[2:] or WAYS:
        WAYS[way](bench)
