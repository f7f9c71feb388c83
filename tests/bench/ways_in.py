"""`python -m tests.bench.ways_in FOLDER`: time each way to install, in fresh environments, and what it takes on disk.

Needs the network, some 25 GB in FOLDER and half an hour. Writes notebooks/measured/ways_in.json after each way, from
which `python -m tests.pages` makes the table of notebooks/reference/classroom.md.
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
        self.rows.append(row)
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

    def run(self) -> None:
        """Measure all ways, one after another."""
        project = self.project("a")
        way = "`install.py --download DIR`: wheels for all, once"
        install = [sys.executable, "install.py"]
        self.measure(way, [*install, "--download", self.wheels], cwd=project, taken=self.wheels, python=None)
        way = "`install.py --from DIR`: from these wheels, without a network"
        venv = project / ".venv"
        shutil.rmtree(venv)
        self.measure(way, [*install, "--from", self.wheels], cwd=project, taken=venv, python=venv / "bin/python")
        shutil.rmtree(project)
        with_torch = self.environment("with_torch", "torch", "torchvision")
        (packages,) = (self.folder / "with_torch/lib").glob("python*/site-packages")
        project = self.project("b")
        venv = project / ".venv"
        words = [*install, "--system-torch", "--from", self.wheels]
        way = "`install.py --system-torch --from DIR`: torch is the site's"
        module = {"PYTHONPATH": str(packages)}
        self.measure(way, words, cwd=project, taken=venv, python=venv / "bin/python", **module)
        shutil.rmtree(project)
        project = self.project("c")
        way = "`install.py --here --from DIR`: into a Python that has torch"
        words = [with_torch, "install.py", "--here", "--from", self.wheels]
        self.measure(way, words, cwd=project, taken=packages, python=with_torch)
        shutil.rmtree(self.folder / "with_torch")
        way = "`install.py`, as `make` does: from PyPI"
        venv = project / ".venv"
        no_cache = {"PIP_NO_CACHE_DIR": "1"}
        self.measure(way, install, cwd=project, taken=venv, python=venv / "bin/python", **no_cache)
        shutil.rmtree(venv)
        python = self.environment("plain")
        way = "`pip install` of the repository into a new environment: from PyPI"
        words = [python, "-m", "pip", "install", project]
        self.measure(way, words, cwd=project, taken=self.folder / "plain", python=python, **no_cache)


def table(stored: dict) -> str:
    """Return the stored figures as a table."""
    lines = ["| way in | minutes | GB on disk |", "|---|---|---|"]
    for row in stored["rows"]:
        lines.append(f"| {row['way']} | {row['minutes']} | {row['gb']} |")
    where = f"Measured on {stored['date']} on a busy virtual machine with {stored['cpus']} cores ({stored['machine']}) "
    where += "and a mirror of PyPI on its own disk; over a network add the time to bring 3 GB."
    return "\n".join([*lines, "", where]) + "\n"


if __name__ == "__main__":
    Bench(Path(sys.argv[1])).run()
