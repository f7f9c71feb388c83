"""A lesson that has been run, as a page of Markdown with its pictures beside it, for readers on the web.

`python -m course.verify` writes them: `rendered/01_data_parallel.md` and the folder `rendered/01_data_parallel/`.
The page of lesson 00, which is all buttons, is written by `python -m tests.browser.start_page`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat

NotebookNode = nbformat.NotebookNode
SOLVED = "With the solution:"
INTRODUCTION = "when it is run with its exercises solved. To do them, open it."
LINES = 60
"""Of an output, so many are kept."""


def digest(book: NotebookNode) -> str:
    """A hash of what a notebook's cells say, but for its card, which says how long they took."""
    return hashlib.sha256("\n\0\n".join(cell.source for cell in book.cells[1:]).encode()).hexdigest()[:16]


def render(
    book: NotebookNode,
    ran: NotebookNode,
    page: Path,
    *,
    introduction: str = INTRODUCTION,
    command: str = "python -m course.verify",
) -> None:
    """Write the page of a notebook, with the outputs of a copy of it that ran with its exercises solved.

    introduction: the end of the page's first sentence, on what the notebook shows. command: writes this page.
    """
    folder = page.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notebook = f"../{page.stem}.ipynb"
    parts = [
        f"<!-- {digest(book)} of {page.stem}.ipynb; written by `{command}` -->",
        f"> What [the notebook]({notebook}) shows {introduction}",
    ]
    solved: list[str] = []
    for cell, done in zip(book.cells, ran.cells, strict=True):
        if cell.cell_type == "markdown":
            text = re.sub(r"\]\((?!https?:|#)", "](../", cell.source)
            parts.append(re.sub(r"\]\(\.\./((?!00)\d\d_\w+)\.ipynb\)", r"](\1.md)", text))
            parts += [SOLVED, *solved] if solved else []
            solved = []
            continue
        parts.append(_fenced(cell.source, "python"))
        if any(tag.startswith("exercise-") for tag in cell.metadata.get("tags", [])):
            solved = list(_outputs(done, folder))
        else:
            shown = list(_outputs(done, folder))
            if "check(" in cell.source:  # only what it tells after a right answer
                shown = ["> " + text.strip("`\n").removeprefix("text\n") for text in shown if "Right. " in text]
            parts += shown
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if not any(folder.iterdir()):
        folder.rmdir()


def _outputs(cell: NotebookNode, folder: Path) -> Iterator[str]:
    streams = ""
    for output in cell.outputs:
        if output.output_type == "stream":
            streams += output.text
            continue
        if streams.strip():
            yield _text(streams)
        streams = ""
        data = output.get("data", {})
        if re.search(r"\d%\|", data.get("text/plain", "")):
            continue  # a progress bar, which has ended
        if "application/vnd.jupyter.widget-view+json" in data:
            yield "*(Here the notebook has something to click.)*"
        elif svg := data.get("image/svg+xml"):
            yield _picture(svg, folder)
        elif page := data.get("text/html"):
            yield from _Html(folder).parts_of(page)
        elif text := data.get("text/plain"):
            yield _text(text)
    if streams.strip():
        yield _text(streams)


def _picture(svg: str, folder: Path) -> str:
    """An SVG as a file of its own: on white, as nothing around it gives its text a color."""
    return f"![{_alt(svg)}]({folder.name}/{_keep(_alone(svg), '.svg', folder)})"


def _alt(svg: str) -> str:
    """What an SVG says in words."""
    words = re.search(r"<title>(.*?)</title>|aria-label=(['\"])(.*?)\2", svg)
    return in_brackets((words[1] or words[3]) if words else "")


def in_brackets(words: str) -> str:
    """Words as the alt text of a picture in Markdown."""
    return re.sub(r"[\[\]\n]", " ", words)[:200]


def _alone(svg: str) -> bytes:
    svg = re.sub(r"<svg ", "<svg color='#222' ", svg, count=1)
    return re.sub(r"style=(['\"])", r"style=\1background:#fff;", svg, count=1).encode()


def _keep(content: bytes, ending: str, folder: Path) -> str:
    name = f"{len(list(folder.iterdir())) + 1:02d}{ending}"
    (folder / name).write_bytes(content)
    return name


def plain(text: str) -> str:
    """Text without the folders of the machine that it comes from. Warnings stay: students see them, too."""
    home = Path(__file__).resolve().parents[2]
    prefixes = (sys.prefix, str(Path(sys.prefix).resolve()))
    for prefix in prefixes:
        text = text.replace(prefix, "/home/you/mmfsdp/.venv")
    return text.replace(str(home), "/home/you/mmfsdp")


def _text(text: str) -> str:
    text = plain(re.sub(r"\x1b\[[0-9;]*m", "", text))
    lines = [line.rpartition("\r")[2].rstrip() for line in text.strip("\n").split("\n")]
    more = [f"... and {len(lines) - LINES} lines more"] if len(lines) > LINES else []
    return _fenced("\n".join(lines[:LINES] + more), "text")


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


class _Html(HTMLParser):
    """What HTML says: its text, its embedded pictures as files. Its tags go no further."""

    BREAKS = ("div", "p", "pre", "br", "tr", "li", "figcaption")

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.text, self.parts, self.hidden = folder, "", [], ""

    def parts_of(self, page: str) -> list[str]:
        for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            name = _keep(_alone(svg), ".svg", self.folder)
            page = page.replace(svg, f"<svg name='{name}' alt='{_alt(svg)}'>", 1)
        self.feed(page)
        self._flush()
        return self.parts

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("style", "script"):
            self.hidden = tag
        if tag in ("td", "th"):
            self.text += "  "
        if tag in self.BREAKS:
            self.text += "\n"
        source = given.get("src") or ""
        if tag == "img" and source.startswith("data:image/png;base64,"):
            self._image(_keep(b64decode(source.partition(",")[2]), ".png", self.folder), given.get("alt") or "")
        if tag == "svg":
            self._image(str(given["name"]), given.get("alt") or "")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = "" if tag == self.hidden else self.hidden
        if tag in self.BREAKS:
            self.text += "\n"

    def handle_data(self, data: str) -> None:
        self.text += "" if self.hidden else data

    def _image(self, name: str, alt: str) -> None:
        self._flush()
        shown = f"![{in_brackets(alt)}]({self.folder.name}/{name})"
        if self.parts and self.parts[-1].startswith("!["):
            self.parts[-1] += f" {shown}"
        else:
            self.parts.append(shown)

    def _flush(self) -> None:
        lines = [line for line in self.text.split("\n") if line.strip()]
        if lines:
            self.parts.append(_text("\n".join(lines)))
        self.text = ""
