"""`mmfsdp course DIR`: from a checkout, and from a wheel in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mmfsdp import cli
from mmfsdp.cli.class_copy import TUTOR_NOTE

ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def tracked(*folders: str) -> set[str]:
    """Return the files of the repository's folders, but not what runs have left there."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    return set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.real
def test_the_teachers_copy_is_whole_and_what_is_there_is_kept(tmp_path, capsys):
    own = tmp_path / "notebooks/contents.ipynb"
    own.parent.mkdir()
    own.write_text("mine")
    (tmp_path / "notes.txt").write_text("mine, too")
    assert cli.main(["course", str(tmp_path)]) == 0
    assert "kept, though other than the course's: notebooks/contents.ipynb; --replace" in capsys.readouterr().out
    assert own.read_text() == "mine"
    assert files_of(tmp_path) == tracked("notebooks", "slides") | {"notes.txt"}
    assert cli.main(["course", str(tmp_path), "--replace"]) == 0
    assert ": 1 of " in capsys.readouterr().out
    assert own.read_bytes() == (ROOT / "notebooks/contents.ipynb").read_bytes()
    assert cli.main(["course", str(tmp_path), "--student", "--replace"]) == 2
    assert "01_data_parallel.ipynb has solutions; name another folder" in capsys.readouterr().err


def test_what_is_no_folder_to_copy_into_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for folder, words in ((file, "is a file"), (ROOT, "is the course itself")):
        assert cli.main(["course", str(folder)]) == 2
        assert words in capsys.readouterr().err


FIRST_CELLS = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read("01_data_parallel.ipynb", as_version=4)
last = next(i for i, cell in enumerate(book.cells) if cell.source.startswith("%%ranks"))
book.cells = book.cells[: last + 1]
book.cells.append(nbformat.v4.new_code_cell("import mmfsdp, course; print(mmfsdp.__file__); print(course.__file__)"))
NotebookClient(book, timeout=120).execute()
for cell in book.cells:
    for output in cell.get("outputs", []):
        print(output.get("text") or output.get("data", {}).get("text/html", ""))
"""


@pytest.mark.real
def test_a_wheel_brings_the_course_and_its_notebooks_run_in_another_environment(tmp_path):
    """No checkout is on the path of that environment, and no network is asked."""
    source = tmp_path / "source"
    for name in tracked("mmfsdp", "notebooks", "slides", *(path.name for path in ROOT.iterdir() if path.is_file())):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    offline = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PIP_NO_INDEX": "1"}

    def run(*words: object, cwd: Path = tmp_path) -> str:
        done = subprocess.run(list(map(str, words)), cwd=cwd, env=offline, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("mmfsdp-*.whl")
    shutil.rmtree(source)
    # The environment sees the packages that are installed here, but not this checkout, which a .pth file adds here.
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip[:3], "--python", python, *pip[3:], "install", "--no-deps", wheel)
    said = run(tmp_path / "env/bin/mmfsdp", "course", "class", "--student")
    assert "files written" in said and "jupyter lab class/notebooks/contents.ipynb" in said
    copy = tmp_path / "class"
    assert (copy / "AGENTS.md").read_text() == (copy / "CLAUDE.md").read_text() == TUTOR_NOTE
    assert not (copy / "slides").exists() and not (copy / "notebooks/rendered").exists()
    outputs = run(python, "-c", FIRST_CELLS, cwd=copy / "notebooks")
    assert "I am rank 0 of 2" in outputs and "I am rank 1 of 2" in outputs
    assert f"{packages}/mmfsdp/__init__.py" in outputs and f"{copy}/notebooks/course/__init__.py" in outputs
    brought = {name for name in files_of(packages / "mmfsdp/course_files") if not name.endswith(".pyc")}
    assert brought == tracked("notebooks", "slides"), "the teacher's copy is whole, too"
