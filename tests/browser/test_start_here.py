"""The first notebook in a real JupyterLab and browser: choose, see the plan change, launch, watch, caption."""

import re
import shutil
import time

import pytest
from lab import ROOT, chromium, open_notebook, press, run_cell, serious_findings, shot
from playwright.sync_api import expect

pytestmark = pytest.mark.real


def guess_by_keyboard(page):
    """Guess which way sends most, and what a rank holds: the bars come after that, beside the guess."""
    guess = page.locator(".mm-guess-first")
    bars, held = guess.locator(".mm-guess"), guess.get_by_label("MiB of weights")
    guess.get_by_role("button", name="SHARD").focus()
    for key in ("Space", "Tab", "Tab", "Tab"):
        page.keyboard.press(key)
    expect(held).to_be_focused()
    page.keyboard.type("<b>4")
    for key in ("Tab", "Enter"):
        page.keyboard.press(key)
    expect(guess.get_by_role("alert")).to_contain_text("'<b>4' is not a number of MiB")
    expect(bars).to_have_count(0)
    held.fill("4")
    for key in ("Tab", "Enter"):
        page.keyboard.press(key)
    expect(bars).to_be_visible()
    expect(guess.get_by_role("alert")).to_have_count(0)
    words = guess.get_by_text("Right: SHARD sends most")
    expect(words).to_contain_text("you said 4 MiB")
    assert len({bar.bounding_box()["width"] for bar in bars.locator("i").all()}) > 1
    assert serious_findings(page, ".mm-guess-first") == []
    shot(page, "guess")


def test_choose_plan_launch_watch_caption(lab):
    base, token, folder = lab
    (folder / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks/00_start_here.ipynb", folder / "notebooks")
    (folder / "notebooks/course").symlink_to(ROOT / "notebooks/course")
    with chromium(viewport={"width": 1200, "height": 1400}) as page:
        open_notebook(page, base, token, "notebooks/00_start_here.ipynb")
        for cell in ("parameters", "cockpit", "guess"):
            run_cell(page, cell)
        guess_by_keyboard(page)
        steps = page.locator(".mm-choices").get_by_label("steps", exact=True)
        steps.fill("30")
        steps.press("Enter")
        sends = page.locator(".mm-figures div", has_text="sent in a step")
        expect(sends).to_be_visible()
        before = sends.inner_text()
        page.locator(".mm-choices button", has_text="REPLICATE").click()
        expect(sends).not_to_have_text(before)

        page.locator(".mm-launch button", has_text="Launch").click()
        log = page.locator(".mm-log").last
        expect(log).to_contain_text("step 1/30", timeout=900_000)  # backbones may be pretrained first
        expect(page.get_by_label(re.compile("loss. training: .* at first"))).to_be_visible()
        page.locator(".mm-cockpit").evaluate("e => e.scrollIntoView()")
        shot(page, "running")
        expect(page.get_by_text("COMPLETED, step 30 of 30")).to_be_visible()
        press(page, "Report")
        expect(page.get_by_text("written: ")).to_contain_text("report.html")
        run_cell(page, "wait-for-it")  # finds the run of the button, and launches no other
        run_cell(page, "captions")
        expect(page.locator(".mm-card img").first).to_be_visible()
        page.locator(".mm-cards").last.scroll_into_view_if_needed()
        time.sleep(1)
        shot(page, "captions")
        assert "data:image/png" in (folder / "runs/tiny/report.html").read_text()
        assert page.problems == []
