"""What README.md promises is there: links, folders, make targets, commands with their flags, and the picture."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from mmfsdp import cli
from mmfsdp.params import RunParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [line.split("#")[0].split() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if line]


def test_links_and_named_paths_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    paths = re.findall(r"`((?:mmfsdp|notebooks|tests)/[\w/.]*)`", TEXT)
    assert links and paths
    for name in links + paths:
        assert (ROOT / name).exists(), name


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
    assert words[1] in cli.COMMANDS
    if words[1] in ("plan", "run", "launch"):
        assert isinstance(cli.parse(words[1], words[2:]), RunParams)


def test_python_snippets_compile():
    for kind, block in BLOCKS:
        if kind == "python":
            compile(block, "README.md", "exec")


def test_the_picture_is_real_and_light():
    path = ROOT / re.search(r"!\[.+\]\((.+)\)", TEXT)[1]
    assert Image.open(path).size[0] >= 800 and path.stat().st_size < 300_000
