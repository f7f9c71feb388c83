"""What README.md, CONTRIBUTING.md, CHANGELOG.md and the reference pages promise is there: links with their anchors,
files and the names in them, make targets, commands with their flags, snippets that compile, the picture. What the code
says itself is on its page as it says it. `test_doc_snippets.py` runs the snippets."""

import ast
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from PIL import Image

import mmfsdp
from mmfsdp.core.plan import COLUMNS
from mmfsdp.kit import cli
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.params import RunParams
from tests import pages
from tests.density import measure, measure_all
from tests.test_layers import SMALL

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(pages.PAGES.glob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    """The code blocks of one language."""
    return [text for name, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S) if name == kind]


COMMANDS = [shlex.split(line, comments=True) for p in PAGES for b in blocks(p, "sh") for line in b.splitlines() if line]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page ends in on the web; JupyterLab opens the page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = [title.lower().replace("`", "") for title in re.findall(r"^#+ (.+)$", text, flags=re.M)]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_named_paths_lead_somewhere(page):
    text = page.read_text()
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:mmfsdp|notebooks|tests)/[\w/.]*)`", text)
    for path in [page.parent / name for name, _, _ in links] + [ROOT / name for name in paths if "NAME" not in name]:
        assert path.exists(), path
    for name, _, anchor in links:
        assert not anchor or anchor in anchors(page.parent / name if name else page), (name, anchor)
    assert page.name != "README.md" or (links and paths)


def test_every_reference_page_is_linked_from_the_readme():
    for page in pages.PAGES.glob("*.md"):
        assert f"notebooks/reference/{page.name}" in TEXT, page.name


def test_each_test_that_a_page_names_is_in_its_file():
    for page in PAGES:
        for name, path in re.findall(r"\[(test_\w+)\]\(([^)]+\.py)\)", page.read_text()):
            assert f"def {name}(" in (page.parent / path).read_text(), (page.name, name)


@pytest.mark.parametrize("page", [p for p in PAGES if "<!-- made: " in p.read_text()], ids=lambda page: page.stem)
def test_what_the_code_says_is_on_its_page(page):
    text = page.read_text()
    assert text.count("<!-- made: ") == len(pages.MARKED.findall(text))
    assert pages.made(text) == text, "python -m tests.pages writes it anew"


def test_what_errors_quotes_is_what_the_code_says():
    """The hand-written tables: each text of their first column, by its pieces between …"""
    rows = re.findall(r"^\| `(.+?)` \|", (pages.PAGES / "errors.md").read_text(), flags=re.M)
    said = "make: command not found" + pages.all_texts()
    said += "".join((ROOT / name).read_text() for name in ("Makefile", "install.py"))
    assert len(rows) > 12
    for row in rows:
        assert all(piece in said for piece in row.split("…")), row


def test_the_plans_columns_are_explained():
    table = re.findall(r"^\| `(\w+)` \|", (pages.PAGES / "plan.md").read_text().split("## A unit")[0], flags=re.M)
    assert table == COLUMNS.split()


ROWS = re.findall(r"^\|.*\]\(([^)]+)\).*\| `(\w+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)


def test_what_contributing_names_is_in_its_file():
    assert len(ROWS) > 10
    for file, name in ROWS:
        tree = ast.parse((ROOT / file).read_text())
        named = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        named |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert name in named, (file, name)


def test_the_citation_is_whole_and_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and cited["message"] and cited["title"]
    assert all(author["name"] for author in cited["authors"])
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{cited["version"]}"' in project and f'license = "{cited["license"]}"' in project
    assert cited["version"] == mmfsdp.__version__
    assert f"## {cited['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_part_of_the_package_is_on_the_map():
    for path in (ROOT / "mmfsdp").iterdir():
        if path.is_dir() and path.name not in ("__pycache__", "presets"):
            assert f"`mmfsdp/{path.name}/`" in TEXT, path.name


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = [words[1] for words in COMMANDS if words[0] == "make"]
    named += re.findall(r"`make ([\w-]+)`", "".join(p.read_text() for p in PAGES))
    assert {"lab", "demo", "test", "lint"} <= set(named) <= set(targets)


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[0] != "make"], ids=shlex.join)
def test_commands_are_understood(words):
    if words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
        return
    assert words[0] == "mmfsdp"
    if "--json-schema" in words:
        assert cli.main(words[1:]) == 0
        return
    values = read_words(cli.build_parser(), words[1:])
    if hasattr(values, "config"):
        assert isinstance(params_of(values), RunParams)
    if words[1] == "plan" and "tiny" in words:
        assert cli.main(words[1:]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_snippets_compile_and_import_what_there_is(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
        for names in re.findall(r"^from mmfsdp import ([\w, ]+\w)", block, flags=re.M):
            assert set(names.split(", ")) <= set(mmfsdp.__all__)


def test_the_picture_is_real_and_light():
    path = ROOT / re.search(r"!\[.+\]\((.+)\)", TEXT)[1]
    assert Image.open(path).size[0] >= 800 and path.stat().st_size < 300_000


FEW_ROWS = {"training: 15 rows, and at least 16": (15, 32), "held-out: 7 rows, and at least 8": (16, 7)}


@pytest.mark.parametrize("words", FEW_ROWS)
def test_the_script_of_the_page_on_own_loops_refuses_too_few_rows_before_it_starts(monkeypatch, words):
    training, held_out = FEW_ROWS[words]
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = runpy.run_path(str(ROOT / "notebooks/reference/own_loop.py"))
    rows = {64: training, 32: held_out}
    texts = script["texts"]
    monkeypatch.setitem(script["main"].__globals__, "texts", lambda number, seed: texts(rows[number], seed))
    with pytest.raises(SystemExit, match=words):
        script["main"](epochs=2)


def test_the_readme_says_how_large_the_package_is():
    rooms = [ROOT / "mmfsdp" / name for name in SMALL]
    lines = sum(measure_all(path).code if path.is_dir() else measure(path.with_suffix(".py")).code for path in rooms)
    kit = measure_all(ROOT / "mmfsdp/kit").code
    said = re.search(r"small_package\.md\), ([\d,]+) lines of code\. .*?kit,\s+([\d,]+) lines", TEXT, flags=re.S)
    assert said
    figures = [int(figure.replace(",", "")) for figure in said.groups()]
    assert figures == pytest.approx([lines, kit], rel=0.03), f"{lines:,} and {kit:,}: write them anew"
