"""`mmfsdp course DIR`: from a checkout, and from a wheel in an environment of its own. A first cell that installs."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from books import read
from IPython.core.inputtransformer2 import TransformerManager

from mmfsdp.kit import cli
from mmfsdp.kit.cli.class_copy import TUTOR_NOTE
from tests.test_install import make_wheel

ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def tracked(*folders: str) -> set[str]:
    """Return the files of the repository's folders, but not what runs have left there."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    return set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def dead_links(folder: Path) -> list[str]:
    """Links of pages that lead to no file, also out of the folder: a copy has neither the package nor its tests."""
    dead = []
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            if not place.exists() or not place.is_relative_to(folder.resolve()):
                dead.append(f"{page.relative_to(folder)}: {target}")
    return dead


@pytest.mark.real
def test_the_teachers_copy_is_whole_and_what_is_there_is_kept(tmp_path, capsys):
    own = tmp_path / "notebooks/contents.ipynb"
    own.parent.mkdir()
    own.write_text("mine")
    (tmp_path / "notes.txt").write_text("mine, too")
    assert cli.main(["course", str(tmp_path)]) == 0
    assert "kept, although they differ from the course: notebooks/contents.ipynb; --replace" in capsys.readouterr().out
    assert own.read_text() == "mine"
    assert files_of(tmp_path) == tracked("notebooks", "slides") | {"notes.txt"}
    assert cli.main(["course", str(tmp_path), "--replace"]) == 0
    assert ": 1 of " in capsys.readouterr().out
    assert own.read_bytes() == (ROOT / "notebooks/contents.ipynb").read_bytes()
    assert not dead_links(tmp_path)
    assert cli.main(["course", str(tmp_path / "student"), "--student"]) == 0 and not dead_links(tmp_path / "student")
    assert cli.main(["course", str(tmp_path), "--student", "--replace"]) == 2
    assert "01_data_parallel.ipynb has solutions; name another folder" in capsys.readouterr().err


def test_what_is_no_folder_to_copy_into_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for folder, words in ((file, "is a file"), (ROOT, "is the course itself")):
        assert cli.main(["course", str(folder)]) == 2
        assert words in capsys.readouterr().err


RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
book = nbformat.v4.new_notebook(cells=cells)
NotebookClient(book, timeout=600, kernel_name=sys.argv[1]).execute()
for cell in cells:
    for output in cell.outputs:
        print(output.get("text") or output.get("data", {}).get("text/html", ""), end="")
"""


class Environment:
    """An environment that sees the packages that are installed here, but neither this checkout nor a network."""

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=True)
        self.python = folder / "bin/python"
        (self.packages,) = (folder / "lib").glob("python*/site-packages")
        # A .pth file in there adds this checkout. Those of a folder that a .pth file names are not read.
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        self.variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
            "PIP_NO_INDEX": "1"
        }

    def run(self, *words: object, cwd: Path, text: str | None = None, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, words)),
            cwd=cwd,
            env=self.variables | variables,
            input=text,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def notebook(self, *cells: str, cwd: Path, kernel: str = "python3", **variables: str) -> str:
        """What a notebook of these cells prints in a kernel of this environment."""
        return self.run(self.python, "-c", RUN, kernel, cwd=cwd, text=json.dumps(cells), **variables)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the repository, without what runs and builds have left."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked("mmfsdp", "notebooks", "slides", *(path.name for path in ROOT.iterdir() if path.is_file())):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.real
def test_a_wheel_brings_the_course_and_its_notebooks_run_in_another_environment(source, tmp_path):
    env = Environment(tmp_path / "env")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    env.run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("mmfsdp-*.whl")
    env.run(*pip[:3], "--python", env.python, *pip[3:], "install", "--no-deps", wheel, cwd=tmp_path)
    said = env.run(env.python.parent / "mmfsdp", "course", "class", "--student", cwd=tmp_path)
    assert "files written" in said and "jupyter lab class/notebooks/contents.ipynb" in said
    copy = tmp_path / "class"
    assert (copy / "AGENTS.md").read_text() == (copy / "CLAUDE.md").read_text() == TUTOR_NOTE
    assert not (copy / "slides").exists() and not (copy / "notebooks/rendered").exists()
    cells = [cell.source for cell in read(copy / "notebooks/01_data_parallel.ipynb").cells if cell.cell_type == "code"]
    first_ranks = next(i for i, cell in enumerate(cells) if cell.startswith("%%ranks"))
    where = "import mmfsdp, course; print(mmfsdp.__file__, course.__file__)"
    outputs = env.notebook(*cells[: first_ranks + 1], where, cwd=copy / "notebooks")
    assert "I am rank 0 of 2" in outputs and "I am rank 1 of 2" in outputs
    assert f"{env.packages}/mmfsdp/__init__.py {copy}/notebooks/course/__init__.py" in outputs
    with zipfile.ZipFile(env.packages / "mmfsdp/course_files.zip") as packed:
        brought = {name for name in packed.namelist() if not name.endswith("/")}
    assert brought == tracked("notebooks", "slides"), "the teacher's copy is whole, too"
    assert not [name for name in files_of(env.packages / "mmfsdp") if name.endswith(".ipynb")], "solutions are packed"


@pytest.mark.real
def test_a_first_cell_installs_into_the_running_kernel_and_makes_one_for_the_class(source, tmp_path):
    """torch stays, to the byte; a package that the kernel has loaded and that changes is named."""
    env = Environment(tmp_path / "env")
    for folder, version in ((env.packages, "0.1.0"), (tmp_path / "wheels", "9.0")):
        make_wheel(folder, "braceexpand", version)  # mmfsdp needs 0.1.7
    (old,) = env.packages.glob("braceexpand-*.whl")
    zipfile.ZipFile(old).extractall(env.packages)
    old.unlink()
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    before = {path: path.stat().st_mtime_ns for path in torch.glob("*")}
    install = f"%run {source}/install.py --here"
    offline = {"PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
    outputs = env.notebook(
        "import braceexpand, importlib.util as u; print('mmfsdp before:', u.find_spec('mmfsdp'))",
        install,
        "import mmfsdp, torch; print('now:', mmfsdp.__file__, torch.__file__)",
        f"{install} --kernel fsdp-course --prefix {tmp_path}/prefix",
        cwd=tmp_path,
        **offline,
        MMFSDP_CLUSTERS="/shared/clusters",
    )
    assert "mmfsdp before: None" in outputs
    assert "Installed. Restart the kernel now, then go on: it has loaded braceexpand 0.1.0, now 9.0." in outputs
    assert f"now: {env.packages}/mmfsdp/__init__.py {torch}/__init__.py" in outputs, "without a restart"
    assert {path: path.stat().st_mtime_ns for path in torch.glob("*")} == before
    assert not list(env.packages.glob("torch*"))
    assert "Installed: this Python imports mmfsdp now." in outputs, "the second time nothing changes"
    there = {"JUPYTER_PATH": f"{tmp_path}/prefix/share/jupyter"}
    specs = json.loads(env.run(sys.executable, "-m", "jupyter", "kernelspec", "list", "--json", cwd=tmp_path, **there))
    assert specs["kernelspecs"]["fsdp-course"]["spec"]["argv"][0] == str(env.python)
    code = "import mmfsdp, os; print(mmfsdp.__file__, os.environ['MMFSDP_CLUSTERS'])"
    started = env.notebook(code, cwd=tmp_path, kernel="fsdp-course", **there)
    assert started.strip() == f"{env.packages}/mmfsdp/__init__.py /shared/clusters"


def test_a_copy_for_colab_installs_itself_there_and_does_nothing_elsewhere(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "colab"
    url = "https://github.com/somebody/their-fork/tree/spring/colab"
    assert cli.main(["course", str(copy), "--student", "--colab", url]) == 0 and not dead_links(copy)
    badges = re.findall(r"github/somebody/their-fork/blob/spring/colab/(\S+)\)", (copy / "README.md").read_text())
    assert sorted(badges) == sorted(name for name in files_of(copy) if name.endswith(".ipynb"))
    calls = []

    class Shell:
        def system(self, command):
            calls.append(command)

        def run_line_magic(self, name, line, **options):
            calls.append(f"{name} {line}")

    for name in badges:
        cells = read(copy / name).cells
        assert cells[0].source.startswith("# ") and "google.colab" in cells[1].source
    code = TransformerManager().transform_cell(cells[1].source)
    exec(code, {"get_ipython": Shell})
    assert calls == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    exec(code, {"get_ipython": Shell})
    clone, install, course, folder = calls
    assert "-b spring https://github.com/somebody/their-fork /content/mmfsdp" in clone
    assert install.endswith("/content/mmfsdp/install.py --here") and course.endswith("/content/course --student")
    assert folder == "cd /content/course/notebooks"


@pytest.mark.parametrize("words", [["--colab", "https://github.com/a/b/tree/main/c"], ["--student", "--colab", "a/b"]])
def test_an_address_for_colab_is_a_folder_on_github_and_for_students(tmp_path, capsys, words):
    assert cli.main(["course", str(tmp_path / "copy"), *words]) == 2
    assert "--colab" in capsys.readouterr().err and not (tmp_path / "copy").exists()
