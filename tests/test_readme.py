"""What README.md and the reference pages promise is there: links, folders, make targets, commands with their flags,
snippets that compile, and the picture."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

import mmfsdp
from mmfsdp import cli, cli_sweep
from mmfsdp.params import RunParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks/reference").glob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    """The code blocks of one language."""
    return [text for name, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S) if name == kind]


COMMANDS = [shlex.split(line, comments=True) for p in PAGES for b in blocks(p, "sh") for line in b.splitlines() if line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_named_paths_lead_somewhere(page):
    text = page.read_text()
    links = [page.parent / link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = [ROOT / name for name in re.findall(r"`((?:mmfsdp|notebooks|tests)/[\w/.]*)`", text)]
    assert page.name != "README.md" or (links and paths)
    for path in links + paths:
        assert path.exists(), path


def test_every_part_of_the_package_is_on_the_map():
    for path in (ROOT / "mmfsdp").iterdir():
        if path.is_dir() and path.name not in ("__pycache__", "presets"):
            assert f"`mmfsdp/{path.name}/`" in TEXT, path.name


def test_make_targets_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = [words[1] for words in COMMANDS if words[0] == "make"] + re.findall(r"`make (\w+)`", TEXT)
    assert {"lab", "demo", "test", "lint"} <= set(named) <= set(targets)


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[0] == "mmfsdp"], ids=shlex.join)
def test_commands_are_understood(words):
    _, command, *rest = words
    assert command in cli.COMMANDS
    if command == "plan":
        cli._taken(rest, "--machine"), cli._taken(rest, "--world-size")  # plan's own, before it reads the fields
    if command in ("plan", "run", "launch"):
        assert isinstance(cli.parse(command, [word for word in rest if word != "--dry-run"]), RunParams)
    elif command == "resume":
        assert isinstance(cli.parse(command, rest[3:] if rest[1:2] == ["--step"] else rest[1:]), RunParams)
    elif command == "sweep" and rest[0].startswith("-"):
        assert isinstance(cli_sweep.read(rest)[0], RunParams)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_snippets_compile_and_import_what_there_is(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
        for names in re.findall(r"^from mmfsdp import (.+)$", block, flags=re.M):
            assert set(names.split(", ")) <= set(mmfsdp.__all__)


def test_the_picture_is_real_and_light():
    path = ROOT / re.search(r"!\[.+\]\((.+)\)", TEXT)[1]
    assert Image.open(path).size[0] >= 800 and path.stat().st_size < 300_000
