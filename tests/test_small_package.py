"""The small package runs alone: copied into an empty folder, with five packages and what they install."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_docs import blocks
from tests.test_layers import FILES, PACKAGE, SMALL

ROOT = PACKAGE.parent
NEEDS = ("torch", "numpy", "pydantic", "PyYAML", "safetensors")
TESTERS = ("pytest", "hypothesis")
TESTS = (
    "core/test_checkpointed_layers.py",
    "core/test_freeze.py",
    "core/test_token_loss.py",
    "params/test_fuzz_params.py",
    "params/test_variables.py",
    "predict/test_auto.py",
    "predict/test_cards.py",
)
"""Those of the small package that need neither models nor ranks of the kit."""
SEARCHES = (
    "predict/test_auto.py::test_near_the_fractional_bound_when_units_are_many",
    "predict/test_auto.py::test_within_a_twentieth_of_exhaustive_search",
)
"""Those of TESTS that compute for ten seconds; others of theirs import the same."""
PAGE = ROOT / "notebooks/reference/small_package.md"


def modules_of(names: tuple[str, ...]) -> list[str]:
    """Return the names that can be imported of these packages, and of all that they install."""
    installed: set[str] = set()
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in installed:
            continue
        installed.add(name)
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    modules = []
    for module, packages in packages_distributions().items():
        if installed & {package.lower().replace("_", "-") for package in packages}:
            modules.append(module)
    return modules


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the small package and nothing else, and a function that runs Python there."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "first").mkdir()
    shutil.copy(ROOT / "tests/files/sitecustomize.py", folder / "first")
    (folder / "mmfsdp").mkdir()
    shutil.copy(ROOT / "mmfsdp/__init__.py", folder / "mmfsdp")
    for room in SMALL:
        if room in FILES:
            shutil.copy(ROOT / f"mmfsdp/{room}.py", folder / "mmfsdp")
        else:
            shutil.copytree(ROOT / "mmfsdp" / room, folder / "mmfsdp" / room)

    def run(*words: str, allowed: tuple[str, ...] = NEEDS) -> str:
        variables = dict(os.environ)
        variables["PYTHONPATH"] = f"{folder / 'first'}{os.pathsep}{folder}"
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        variables["MMFSDP_ALLOWED"] = ",".join(modules_of(allowed))
        ended = subprocess.run([sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout

    return folder, run


@pytest.mark.real
def test_it_plans_wraps_trains_and_resumes_on_two_ranks(alone):
    folder, run = alone
    (script,) = blocks(PAGE, "python")
    (folder / "train.py").write_text(script)
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    first, second = run(*start), run(*start)
    assert "layers.1" in first and "a rank sends in an optimizer step" in first
    assert "step 10: loss" in first and "step 11: loss" in second and "step 20: loss" in second


@pytest.mark.real
def test_its_modules_are_those_of_the_folder_and_others_are_refused(alone):
    folder, run = alone
    code = "import mmfsdp, mmfsdp.planning; print(mmfsdp.planning.__file__)\n"
    code += "try: import transformers\nexcept ModuleNotFoundError as error: print(error)"
    home, refused = run("-c", code).splitlines()
    assert Path(home) == folder / "mmfsdp/planning.py" and refused == "No module named 'transformers'"


@pytest.mark.real
@pytest.mark.parametrize(
    "left_out", [pytest.param(SEARCHES, id=""), pytest.param((), id="all", marks=pytest.mark.extended)]
)
def test_its_tests_that_need_no_more_pass(alone, left_out):
    folder, run = alone
    (folder / "tests").mkdir(exist_ok=True)
    for file in (ROOT / "tests").glob("*.py"):
        shutil.copy(file, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in TESTS:
        (folder / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    words = [f"tests/{name}" for name in TESTS] + [f"--deselect=tests/{name}" for name in left_out]
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not real", *words, allowed=(*NEEDS, *TESTERS))
    assert " passed" in said


def test_the_page_names_its_parts():
    (parts,) = blocks(PAGE, "text")
    assert set(parts.split()) == {"__init__.py", *(f"{room}.py" if room in FILES else f"{room}/" for room in SMALL)}
