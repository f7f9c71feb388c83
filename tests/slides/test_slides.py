"""The deck is built from the package, and every slide shows whole in a browser that has no network."""

import re
import sys
from pathlib import Path

import pytest

from tests.browser.lab import chromium

ROOT = Path(__file__).resolve().parent.parent.parent
DECK = (ROOT / "slides" / "deck.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "slides"))

MIN_PIXELS = 18
"""Letters on a slide of 1280 x 720, so that the last row of a room can read them."""
LETTERS = """() => {
    const shown = [Reveal.getCurrentSlide(), document.querySelector('.slide-number')], sizes = []
    for (const root of shown) {
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
        while (walker.nextNode()) {
            const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement
            if (!text || element.closest('aside, title, style') || !element.getClientRects().length) continue
            const matrix = element.getScreenCTM?.()  // of the text in a picture, with all that scales it
            const scale = matrix ? Math.hypot(matrix.a, matrix.b) : root.closest('.slides') ? Reveal.getScale() : 1
            sizes.push([text.slice(0, 40), parseFloat(getComputedStyle(element).fontSize) * scale])
        }
    }
    return sizes
}"""
"""Each text in sight, and the size of its letters in pixels of the screen."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from build import page, slides, to_pdf
    from figures import figures

    folder, sections = tmp_path_factory.mktemp("slides"), slides(DECK, figures())
    (folder / "index.html").write_text(page(sections), encoding="utf-8")
    to_pdf(sections, folder / "deck.pdf")
    return folder


@pytest.mark.real
def test_every_slide_shows_whole_without_network(built):
    asked, errors = [], []
    with chromium(viewport={"width": 1280, "height": 720}, offline=True) as tab:
        tab.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda e: errors.append(str(e)))
        tab.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else asked.append(r.url))
        tab.goto((built / "index.html").as_uri())
        tab.wait_for_function("window.Reveal && Reveal.isReady()")
        count = tab.evaluate("Reveal.getTotalSlides()")
        assert count == len(DECK.split("\n---\n")) >= 50
        wrong, small = [], []
        for i in range(count):
            tab.evaluate(f"Reveal.slide({i})")
            found = tab.evaluate(
                """() => { const s = Reveal.getCurrentSlide(); return {
                    words: s.innerText.trim().length, high: s.scrollHeight, wide: s.scrollWidth,
                    past: [...s.querySelectorAll('*')].filter(e => e.scrollWidth > 1290 && !e.closest('svg')).length,
                    raw: s.innerText.includes('{{') || s.innerText.includes('**') || s.innerText.includes('](')} }"""
            )
            for words, pixels in tab.evaluate(LETTERS):
                if pixels < MIN_PIXELS:
                    small.append((i + 1, round(pixels, 1), words))
            if not found["words"] or found["high"] > 700 or found["wide"] > 1285 or found["past"] or found["raw"]:
                wrong.append((i + 1, found))
        of_play_head = next(i for i, text in enumerate(DECK.split("\n---\n")) if "{{flamingo}}" in text)
        tab.evaluate(f"Reveal.slide({of_play_head})")
        words = tab.locator(".mm-now").inner_text()
        tab.locator(".mm-head").focus()
        tab.keyboard.press("Home")
        assert tab.locator(".mm-now").inner_text() == tab.locator(".mm-head").get_attribute("aria-valuetext") != words
        assert tab.evaluate("Reveal.getIndices().h") == of_play_head, "the keys move the head, not the deck"
    assert not asked and not errors and not wrong, (asked, errors, wrong)
    assert not small, f"smaller than {MIN_PIXELS} pixels: {small}"


def test_every_slide_that_is_no_chapter_has_notes_with_its_minutes_and_they_fit_the_half_day():
    bare, minutes = [], []
    for text in DECK.split("\n---\n"):
        title = text.strip().splitlines()[0]
        said = re.search(r"^Note:\n\((\d+) min\) ", text, re.MULTILINE)
        minutes.append(int(said[1]) if said else 0)
        if title.startswith("## ") and not said:
            bare.append(title)
    assert not bare
    plan = (ROOT / "notebooks" / "reference" / "teaching.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d):(\d\d) \| (\d+) \|[^|]*\|(?: (\d+) to (\d+) )?", plan, re.MULTILINE)
    assert rows
    clock = 0
    for hours, past, room, first, last in rows:
        assert clock == 60 * int(hours) + int(past)
        clock += int(room)
        assert not first or sum(minutes[int(first) - 1 : int(last)]) <= int(room), (first, last)


@pytest.mark.real
def test_the_pdf_has_every_slide(built):
    pages = len(re.findall(rb"/Type\s*/Page\b", (built / "deck.pdf").read_bytes()))
    assert pages == len(DECK.split("\n---\n"))
