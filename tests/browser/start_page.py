"""`python -m tests.browser.start_page`: the first notebook in a real JupyterLab, as a page for the web.

It presses what the notebook says, and writes notebooks/rendered/00_start_here.md with its pictures, of which README
shows the first. The run takes minutes.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import nbformat
from PIL import Image
from playwright.sync_api import Page, expect

from mmfsdp.kit.run.state import run_state
from mmfsdp.kit.widgets.report import show_captions

from .lab import ROOT, chromium, jupyterlab, open_notebook, run_cell

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
from course.rendered import render  # noqa: E402

NAME = "00_start_here"
INTRODUCTION = "when its buttons are pressed. To press them, open it."
WORDS = {
    "cockpit": "The cockpit: choices, what each rank holds and does in a step, and the run on two ranks",
    "guess": "Bars of what each way sends and holds, beside what was guessed",
    "captioner": "A picture, the caption that the model writes, and the probability of each word",
}
"""Cells whose output is a picture on the page -> the picture in words."""
WINDOW = {"width": 1280, "height": 1400}
MARGIN = 8
"""Pixels around an element."""
COLORS = 256


def main() -> None:
    """Run the notebook and write its page."""
    with tempfile.TemporaryDirectory() as directory:
        folder, home = Path(directory) / "root", Path(directory) / "home"
        (folder / "notebooks").mkdir(parents=True)
        shutil.copy(FOLDER / f"{NAME}.ipynb", folder / "notebooks")
        (folder / "notebooks/course").symlink_to(FOLDER / "course")
        with jupyterlab(folder, home) as (address, token), chromium(viewport=WINDOW) as page:
            open_notebook(page, address, token, f"notebooks/{NAME}.ipynb")
            page.evaluate("window.jupyterapp.shell.collapseLeft()")
            pictures = run_notebook(page, folder)
        run = folder / "runs/tiny"
        write_page(pictures, str(run_state(run)), show_captions(run).value)


def run_notebook(page: Page, folder: Path) -> dict[str, Path]:
    """Do what the notebook says, and return a picture of each cell of WORDS."""
    pictures = {cell: folder / f"{cell}.png" for cell in WORDS}
    for cell in ("parameters", "cockpit"):
        run_cell(page, cell)
    expect(page.locator(".mm-cockpit-figures", has_text="peak, longest texts")).to_be_visible()
    run_cell(page, "guess")
    guess = page.locator(".mm-guess-first")
    guess.get_by_role("button", name="KEEP").click()
    guess.get_by_label("MiB of weights").fill("4")
    guess.get_by_role("button", name="Look").click()
    expect(guess.locator(".mm-guess")).to_be_visible()
    page.wait_for_timeout(2000)  # the bars have grown
    keep(page, ".mm-guess-first", pictures["guess"])
    page.locator(".mm-cockpit button", has_text="Pin").click()
    page.locator(".mm-choices button", has_text="REPLICATE").click()
    expect(page.locator(".mm-cockpit-figures .mm-less")).to_be_visible()
    page.locator(".mm-launch button", has_text="Launch").click()
    page.set_default_timeout(1_800_000)  # a run of hundreds of steps
    run_cell(page, "wait-for-it")
    page.wait_for_timeout(2000)
    keep(page, ".mm-cockpit", pictures["cockpit"])
    run_cell(page, "captions")
    run_cell(page, "captioner")
    page.wait_for_timeout(15_000)
    keep(page, ".jp-CodeCell:has-text('Captioner(cockpit') .jp-OutputArea-output", pictures["captioner"])
    return pictures


def keep(page: Page, selector: str, path: Path) -> None:
    """Write a picture of a whole element, with few colors, so that its file is small."""
    page.locator(selector).last.evaluate("e => e.scrollIntoView()")
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    box = page.locator(selector).last.bounding_box()
    assert box is not None and box["height"] <= WINDOW["height"], f"{selector} is higher than the window: {box}"
    around = {
        "x": max(0, box["x"] - MARGIN),
        "y": max(0, box["y"] - MARGIN),
        "width": min(box["width"] + 2 * MARGIN, WINDOW["width"] - box["x"] + MARGIN),
        "height": box["height"] + 2 * MARGIN,
    }
    page.screenshot(path=path, clip=around)
    with Image.open(path) as picture:
        picture.quantize(COLORS).save(path, optimize=True)


def write_page(pictures: dict[str, Path], state: str, captions: str) -> None:
    """Write the notebook as a page of Markdown, with a picture of each cell of WORDS."""
    shown = {cell: html_output(as_image(path.read_bytes(), WORDS[cell])) for cell, path in pictures.items()}
    shown["wait-for-it"] = nbformat.v4.new_output("stream", text=state)
    shown["captions"] = html_output(captions)
    page = FOLDER / f"rendered/{NAME}.md"
    book = nbformat.read(FOLDER / f"{NAME}.ipynb", as_version=4)
    first = book.cells[0]
    lines = [line for line in first.source.splitlines() if f"{page.parent.name}/{page.name}" not in line]
    first.source = "\n".join(lines)  # without the link to this page
    ran = deepcopy(book)
    for cell in ran.cells:
        cell.outputs = [shown[cell.id]] if cell.id in shown else []
    render(book, ran, page, introduction=INTRODUCTION, command="python -m tests.browser.start_page")
    print(page)


def html_output(text: str) -> nbformat.NotebookNode:
    """Return the output of a cell that shows HTML."""
    return nbformat.v4.new_output("display_data", {"text/html": text})


def as_image(picture: bytes, words: str) -> str:
    """Return a picture as HTML."""
    return f'<img src="data:image/png;base64,{base64.b64encode(picture).decode()}" alt="{words}">'


if __name__ == "__main__":
    main()
