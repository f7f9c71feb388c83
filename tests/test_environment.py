"""pyproject.toml is the one list of dependencies: environment.yml adds none, and what is installed satisfies it."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import mmfsdp
from tests.processes import in_fresh_python

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


@pytest.mark.real
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


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
    """A person's project, or the folder of a clone, may be called mmfsdp; Python is then started above it."""
    (tmp_path / "mmfsdp").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert in_fresh_python("import mmfsdp; print(mmfsdp.__file__)", cwd=tmp_path, env=env).strip() == mmfsdp.__file__


@pytest.mark.real
def test_ci_runs_in_a_copy_whose_folder_is_called_mmfsdp_and_keeps_the_exit_code(tmp_path):
    checkout, tools = tmp_path / "checkout 7", tmp_path / "tools"
    (checkout / ".venv").mkdir(parents=True)
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    tools.mkdir()
    for tool in ("slurmdbd", "mariadbd", "chromium", "python3", "make"):  # nothing is installed
        (tools / tool).write_text('#!/bin/sh\necho "$0 $1 in $PWD has" *.* .[!.]*\n[ "$1" != test ] || exit 3\n')
        (tools / tool).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run([checkout / ".ci/run"], env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    for line, target in zip(done.stdout.splitlines()[-2:], ("lint", "test"), strict=True):
        assert re.fullmatch(rf"{tools}/make {target} in {tmp_path}/[^/]+/mmfsdp has .* \.ci", line), line
    assert {path.name for path in tmp_path.iterdir()} == {"checkout 7", "tools"}, "the copy is removed"


LACKS = {
    "an old Python": ("false", "needs Python 3.10"),
    "no venv": (
        "import runpy, sys; sys.modules['venv'] = None; runpy.run_path('install.py', run_name='__main__')",
        "apt",
    ),
    "no network": ("import sys, install; sys.exit(install.main())", "pypi.org cannot be reached"),
}


@pytest.mark.real
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
