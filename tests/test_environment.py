"""pyproject.toml is the one list of dependencies: environment.yml adds none, and what is installed satisfies it."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there, so it is installed

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_adds_nothing_to_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert environment["dependencies"] == ["python" + PROJECT["requires-python"], "pip", {"pip": ["-e ."]}]


def test_what_is_installed_satisfies_pyproject():
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]:
        need = Requirement(line)
        assert need.specifier.contains(metadata.version(need.name), prereleases=True), line


def test_license_is_apache_2_in_full():
    text = (ROOT / PROJECT["license-files"][0]).read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("ci, ends", [("true", "1 failed, 1 passed, 1 error"), ("", "1 passed, 2 skipped")])
def test_a_skip_is_a_failure_in_ci_only(tmp_path, ci, ends):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_runs(): pass\ndef test_lacks(): pytest.skip('no browser')\n"
    )
    (tmp_path / "test_two.py").write_text("import pytest\npytest.skip('no slurm', allow_module_level=True)\n")
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "."]
    out = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CI": ci}, capture_output=True, text=True)
    assert ends in out.stdout.splitlines()[-1], out.stdout
    assert (out.returncode == 0) is (not ci)


LACKS = {
    "an old Python": ("false", "needs Python 3.10"),
    "no venv": (
        "import runpy, sys; sys.modules['venv'] = None; runpy.run_path('install.py', run_name='__main__')",
        "apt",
    ),
    "no disk": ("import sys, install; install.ROOM = 1e18; sys.exit(install.main())", "GB left"),
    "no network": ("import sys, install; sys.exit(install.main())", "pypi.org cannot be reached"),
}


@pytest.mark.parametrize("lacks", LACKS)
def test_make_says_what_is_missing(tmp_path, lacks):
    """Each ends in one clear line, and the next `make` begins anew."""
    for name in ("Makefile", "pyproject.toml", "install.py"):
        shutil.copy(ROOT / name, tmp_path)
    python, words = LACKS[lacks]
    if python != "false":
        start = f'case $1 in -c) exit 0;; *) exec {sys.executable} -c "{python}";; esac'
        (tmp_path / "python").write_text(f"#!/bin/sh\n{start}\n")
        (tmp_path / "python").chmod(0o755)
        python = "./python"
    away = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    command = ["make", "demo", f"PYTHON={python}"]
    out = subprocess.run(command, cwd=tmp_path, env={**os.environ, **away}, capture_output=True, text=True)
    assert out.returncode != 0 and words in out.stdout + out.stderr
    assert not (tmp_path / ".venv/.installed").exists()
    assert (tmp_path / ".venv").exists() is (lacks == "no network")


def test_a_home_that_jupyterlab_cannot_write_is_named_before_it_starts(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv/.installed").touch()
    jupyter = tmp_path / ".venv/bin/jupyter"
    jupyter.write_text(f"#!{sys.executable}\nfrom jupyter_core.command import main\nmain()\n")
    jupyter.chmod(0o755)
    home = {"HOME": "/proc/none", "JUPYTER_RUNTIME_DIR": "", "JUPYTER_DATA_DIR": "", "XDG_DATA_HOME": ""}
    out = subprocess.run(["make", "lab"], cwd=tmp_path, env=os.environ | home, capture_output=True, text=True)
    assert out.returncode and "Traceback" not in out.stderr
    assert "JupyterLab cannot write in /proc/none/" in out.stdout and "HOME=$(mktemp -d) make lab" in out.stdout
