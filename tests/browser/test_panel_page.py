"""The panel in a real JupyterLab: it lives through a reload, an interrupt and a restart, and its buttons work."""

import json
import re
import time

import pytest
from lab import chromium, open_notebook, press, run_cell, serious_findings, set_theme, shot, write_notebook
from playwright.sync_api import expect

from mmfsdp.kit.widgets.style import KERNEL_GONE

pytestmark = pytest.mark.real

CELLS = {
    "import": """import os
from mmfsdp import RunParams, launch
from mmfsdp.widgets import RunPanel
os.environ["CUDA_VISIBLE_DEVICES"] = ""
params = RunParams().change(**{"launch.folder": "panelruns", "train.steps": 3000, "train.warmup_steps": 0})""",
    "launch": 'launch(params, entry="tests.launch_entries:busy")',
    "panel": 'panel = RunPanel("panelruns/first")\npanel',
    "wait": "panel.wait()",
    "resume": "panel.run.resume()",
    "die": 'RunPanel(launch(params.change(**{"launch.name": "killed"}), entry="tests.launch_entries:die").path)',
    "diverge": 'RunPanel(launch(params.change(**{"launch.name": "nan"}), entry="tests.launch_entries:diverge").path)',
}

BEFORE = """() => [...document.querySelectorAll('.jupyter-widgets-disconnected')]
                   .filter(e => e.offsetParent !== null)
                   .map(e => getComputedStyle(e, '::before').content).filter(words => words !== 'none')"""
"""What the page says before each part of a widget that has lost its kernel."""


def command(page, name):
    page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)


def newest_step(log):
    return max(int(step) for step in re.findall(r"step (\d+)/3000", log.text_content()))


def goes_on(page, log):
    """Wait until later steps than now are shown."""
    step, until = newest_step(log), time.monotonic() + 60
    while newest_step(log) < step + 3:
        assert time.monotonic() < until, f"it stands at {newest_step(log)}"
        page.wait_for_timeout(200)


def in_trouble(page, cell, words, fix):
    """Run a cell whose run ends badly: its banner says so once, in sight with the state above it."""
    page.set_viewport_size({"width": 1280, "height": 720})
    run_cell(page, cell)
    banner = page.locator(".mm-trouble").last
    expect(banner).to_contain_text(words)
    expect(banner).to_contain_text(f"What to do: {fix}")
    output = page.locator(".mm-widget:has(.mm-trouble)").last
    expect(output).to_contain_text(re.compile("FAILED|COMPLETED"))
    assert output.inner_text().count(words) == 1 and " left" not in output.inner_text()
    output.evaluate("e => e.scrollIntoView()")
    top, box = output.bounding_box()["y"], banner.bounding_box()
    assert top <= box["y"] < top + 120 and box["height"] < 120, f"{box}, of a panel at {top}"
    shot(page, f"trouble-{cell}")


def is_broken_and_goes_on(page, log):
    """A rank is killed by the keyboard; after a resume the same curve goes on, and shows which steps ran again."""
    kill, breaks = page.get_by_role("button", name="Kill rank 1").last, page.locator(".mm-chart-breaks").last
    kill.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".mm-trouble").last).to_contain_text("rank 1 was killed on purpose")
    expect(page.get_by_text(re.compile("FAILED, step .* of 3000")).first).to_be_visible()
    expect(breaks).to_have_text(re.compile(r"^rank 1 was killed at step \d+$"))
    expect(kill).to_be_disabled()
    for cell in ("resume", "panel"):
        run_cell(page, cell)
    expect(page.locator(".mm-rank-running")).to_have_count(2)
    expect(breaks).to_have_text(
        re.compile(r"^rank 1 was killed at step \d+, resumed from step \d+(: steps? \d+( to \d+)? ran again)?$")
    )
    goes_on(page, log)
    assert serious_findings(page, ".mm-run") == []
    for width, height in ((1280, 720), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        page.locator(".mm-run").last.evaluate("e => e.scrollIntoView()")
        shot(page, f"panel-broken-{width}")


def test_a_run_is_watched_through_reload_interrupt_and_restart_then_cancelled(lab):
    base, token, folder = lab
    write_notebook(folder / "panel.ipynb", CELLS)
    with chromium(viewport={"width": 1300, "height": 1300}, color_scheme="null") as page:
        open_notebook(page, base, token, "panel.ipynb")
        for cell in ("import", "launch", "panel"):
            run_cell(page, cell)
        log = page.locator(".mm-log").last
        expect(log).to_contain_text("1 │ step 5/3000")
        expect(page.locator(".mm-rank-running")).to_have_count(2)
        expect(page.get_by_label(re.compile("loss. training: .* at first"))).to_be_visible()
        page.get_by_title("Show lines of this rank").evaluate("e => e.scrollIntoView({block: 'center'})")
        shot(page, "panel-light")

        command(page, "docmanager:save")
        page.wait_for_timeout(1500)
        page.reload()
        expect(log).to_contain_text("1 │ step")
        goes_on(page, log)

        run_cell(page, "wait", wait=False)
        goes_on(page, log)
        command(page, "notebook:interrupt-kernel")
        expect(page.get_by_text("KeyboardInterrupt: the run first goes on; Cancel ends it")).to_be_visible()
        expect(page.get_by_text("Traceback")).to_have_count(0)
        goes_on(page, log)
        page.get_by_title("Show lines of this rank").select_option("rank 1")
        expect(log).not_to_contain_text("0 │ step")
        page.get_by_title("Show lines with this text").fill("step 1/3000")
        expect(log).not_to_contain_text("step 5/3000")
        page.get_by_title("Show lines with this text").fill("")
        set_theme(page, "JupyterLab Dark")
        press(page, "Report")
        expect(page.get_by_text("report.html")).to_be_visible()
        shot(page, "panel-dark")

        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        # One line, and no broken icon at each part.
        page.wait_for_function(f"words => JSON.stringify(({BEFORE})()) === words", arg=json.dumps([f'"{KERNEL_GONE}"']))
        shot(page, "panel-without-kernel")
        for cell in ("import", "panel"):
            run_cell(page, cell)
        expect(log).to_contain_text("1 │ step")
        goes_on(page, log)
        is_broken_and_goes_on(page, log)
        run_cell(page, "wait", wait=False)  # and while it runs, a button is heard
        press(page, "Cancel")
        expect(page.get_by_text(re.compile("CANCELLED, step .* of 3000")).first).to_be_visible()
        page.set_viewport_size({"width": 620, "height": 1100})
        page.get_by_title("Show lines of this rank").evaluate("e => e.scrollIntoView({block: 'center'})")
        shot(page, "panel-narrow")
        in_trouble(page, "die", "rank 1 died without a traceback", "to need less memory")
        expect(page.locator(".mm-rank", has_text="rank 1").last).to_contain_text("failed first")
        in_trouble(page, "diverge", "2 of 5 steps skipped: loss not finite since step 4", "lower train.lr")
        expect(page.get_by_text("COMPLETED, step 5 of 3000")).to_be_visible()
        assert [text for text in page.problems if "WebSocket" not in text] == []
