"""`make slides`: deck.md and figures drawn from the package, as one HTML page that needs no network, and a PDF."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mistune  # JupyterLab brings it

HERE = Path(__file__).resolve().parent
FIGURE = re.compile(r"\{\{(\w+)\}\}")
OPTIONS = """{hash: true, transition: "none", slideNumber: "c/t", controls: false, width: 1280, height: 720,
  margin: 0.04, plugins: [RevealNotes]}"""


def slides(deck: str, figures: dict[str, str]) -> list[str]:
    """Each slide as an HTML section. Raises ValueError for a figure that nobody draws."""
    missing = set(FIGURE.findall(deck)) - set(figures)
    if missing:
        raise ValueError(f"deck.md: no figure {', '.join(sorted(missing))}; there are {', '.join(sorted(figures))}")
    return [_slide(text.strip(), figures) for text in deck.split("\n---\n")]


def page(sections: list[str]) -> str:
    """The deck as one page that reveal.js drives."""
    from mmfsdp.kit.widgets.static_files import play_head_script

    code = "".join(f"<script>{(HERE / 'reveal' / name).read_text()}</script>" for name in ("reveal.js", "notes.js"))
    deck = f"<div class='reveal'><div class='slides'>{''.join(sections)}</div></div>"
    return _html(
        deck + play_head_script() + code + f"<script>Reveal.initialize({OPTIONS})</script>",
        "reveal/reveal.css",
        "style.css",
    )


def paper(sections: list[str]) -> str:
    """The deck as pages to print: no script, one slide a page."""
    return _html(f"<div class='reveal'><div class='slides'>{''.join(sections)}</div></div>", "style.css", "paper.css")


def to_pdf(sections: list[str], pdf: Path) -> None:
    """Print the deck with Chromium. Raises RuntimeError if there is none."""
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        raise RuntimeError("slides: the PDF needs Chromium or Chrome (Debian: sudo apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder, "paper.html")
        html.write_text(paper(sections), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        where = [f"--user-data-dir={folder}/profile", "--no-pdf-header-footer", f"--print-to-pdf={pdf}", html.as_uri()]
        subprocess.run([*command, *where], check=True, capture_output=True, timeout=180)


def _slide(text: str, figures: dict[str, str]) -> str:
    words, _, notes = text.partition("\nNote:\n")
    render = mistune.create_markdown(escape=False, plugins=["table"])
    body = FIGURE.sub(lambda m: figures[m[1]], str(render(words)))
    aside = f"<aside class='notes'>{render(notes)}</aside>" if notes else ""
    return f"<section{' class=chapter' if text.startswith('# ') else ''}>{body}{aside}</section>"


def _html(body: str, *styles: str) -> str:
    style = "".join((HERE / name).read_text() for name in ("reveal/reset.css", *styles))
    head = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Mostly frozen</title>{head}"
        f"<style>{style}</style></head><body>{body}</body></html>"
    )


def main() -> int:
    """Build the deck into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--to", type=Path, default=HERE / "build")
    parser.add_argument("--no-pdf", action="store_true")
    given = parser.parse_args()
    from figures import figures

    sections = slides((HERE / "deck.md").read_text(encoding="utf-8"), figures())
    given.to.mkdir(parents=True, exist_ok=True)
    html, pdf = (given.to / name for name in ("index.html", "deck.pdf"))
    html.write_text(page(sections), encoding="utf-8")
    print(html)
    if given.no_pdf:
        return 0
    try:
        to_pdf(sections, pdf.resolve())
    except RuntimeError as error:
        print(f"{error}; the page above is whole without it, and --no-pdf leaves it out", file=sys.stderr)
        return 1
    print(pdf)
    return 0


if __name__ == "__main__":
    sys.exit(main())
