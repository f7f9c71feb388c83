"""Form and plan in a real JupyterLab and browser: by mouse and keyboard, in both themes, on a narrow page."""

import re

import pytest
from lab import chromium, open_notebook, run_cell, set_theme, shot, write_notebook
from playwright.sync_api import expect

pytestmark = pytest.mark.real

CELLS = {
    "form": "from mmfsdp.widgets import PlanView, RunForm\nform = RunForm('tiny')\nform",
    "view": "view = PlanView(form)\nview",
    "two": "other = RunForm('openflamingo_9b')\nother",
    "count": "import threading, time, ipywidgets\n"
    "end = time.time() + 60\n"
    "while sum(t.name == 'plan' for t in threading.enumerate()) > 1 and time.time() < end: time.sleep(0.1)\n"
    "print('threads', sum(t.name == 'plan' for t in threading.enumerate()), "
    "'forms', sum(isinstance(w, RunForm) for w in ipywidgets.widgets.widget._instances.values()))",
}
ROWS = """%%writefile my_rows.py
from PIL import Image
def read():
    return [{"image": Image.new("RGB", (8, 8)), "text": f"<b>row {i}"} for i in range(SIZE)]
"""
CELLS |= {"write": ROWS.replace("SIZE", "40"), "again": ROWS.replace("SIZE", "50")}
CELLS["wrong"] = CELLS["write"].replace("range(40)", "renge(40)")
expect.set_options(timeout=20_000)
HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture
def page(lab):
    base, token, folder = lab
    write_notebook(folder / "form.ipynb", CELLS)
    with chromium(viewport={"width": 1200, "height": 1500}) as page:
        open_notebook(page, base, token, "form.ipynb")
        yield page
        assert page.problems == [] and page.title() != "owned"


def write(page, label, text):
    box = page.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Tab")


def field(page, label):
    """The row of a field."""
    return page.locator(".mm-row", has=page.get_by_label(label, exact=True)).last


def test_choose_by_form_and_see_the_plan_follow(page):
    run_cell(page, "form")
    steps, policy = page.get_by_label("steps", exact=True), page.get_by_label("frozen policy", exact=True)
    expect(steps).to_be_visible(timeout=3_000)
    run_cell(page, "view")

    write(page, "steps", "0")
    expect(field(page, "steps").locator(".mm-error")).to_contain_text("greater than or equal to 1")
    write(page, "steps", "60")
    expect(page.locator(".mm-error")).to_have_count(0)
    page.get_by_label("backend", exact=True).select_option("FSDP1")
    expect(field(page, "frozen policy")).to_contain_text("AUTO not now: cannot be honored by FSDP1.")
    policy.select_option("AUTO")
    expect(field(page, "frozen policy").locator(".mm-error")).to_contain_text("FSDP2")
    policy.select_option("SHARD")
    page.get_by_label("backend", exact=True).select_option("FSDP2")
    expect(page.get_by_label("memory budget (GiB)")).to_be_disabled()
    expect(field(page, "memory budget (GiB)")).to_contain_text("unless frozen_policy is AUTO")

    sends = page.locator(".mm-figures div", has_text="sends a step")
    expect(sends).to_be_visible(timeout=120_000)  # torch is imported, by a thread
    before = sends.inner_text()
    policy.select_option("REPLICATE")
    expect(sends).not_to_have_text(before, timeout=60_000)
    shot(page, "form-light")

    write(page, "name", HOSTILE)
    expect(field(page, "name").locator(".mm-error")).to_be_visible()
    write(page, "name", "first")
    policy.select_option("SHARD")

    peak = page.locator(".mm-figures div", has_text="greatest length")
    expect(peak).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Pin to compare").click()
    policy.select_option("REPLICATE")
    expect(page.locator("li", has_text="frozen_policy: SHARD → REPLICATE")).to_be_visible()
    expect(page.get_by_text("counting activations")).to_have_count(0, timeout=60_000)
    expect(sends.locator(".mm-less")).to_have_text(re.compile("−.* %"))
    expect(page.locator("path.mm-pinned")).to_be_visible()
    lit = "e => getComputedStyle(e).outlineStyle"
    unit, in_step = page.locator("svg g.mm-b3").first, page.locator("svg rect.mm-b3").first
    assert unit.evaluate(lit) == in_step.evaluate(lit) == "none"
    unit.hover()
    expect(page.locator(".mm-about .mm-b3")).to_be_visible()
    assert unit.evaluate(lit) == in_step.evaluate(lit) == "solid", "pointing at a unit lights it in both pictures"
    in_step.hover()
    expect(page.locator(".mm-about .mm-b3")).to_be_visible()
    assert unit.evaluate(lit) == "solid"
    expect(page.locator(".mm-hint")).to_be_hidden()
    unit.focus()
    page.keyboard.press("Tab")
    expect(page.locator(".mm-about .mm-b4")).to_be_visible()
    page.locator(".mm-changes").evaluate("e => e.scrollIntoView()")
    shot(page, "plans-compared")


def test_two_forms_again_and_again_in_the_dark_on_a_narrow_page(page):
    for cell in ("form", "view", "two") * 2:
        run_cell(page, cell)
    run_cell(page, "form")  # the view of the form before follows this one
    run_cell(page, "count")
    expect(page.locator(".jp-OutputArea-output", has_text="threads")).to_have_text(re.compile("threads [01] forms 2"))
    names = page.get_by_label("name", exact=True)
    expect(names).to_have_count(2)
    assert [names.nth(i).input_value() for i in range(2)] == ["tiny", "openflamingo-9b"], "each has its own"
    names.first.focus()
    for label in ("ranks", "executor", "steps"):
        page.keyboard.press("Tab")
        assert page.get_by_label(label, exact=True).first.evaluate("e => e === document.activeElement")
    expect(page.locator(".mm-figures")).to_be_visible(timeout=120_000)
    policy = page.get_by_label("frozen policy", exact=True).first
    policy.select_option("REPLICATE")
    expect(page.locator(".mm-plan g[tabindex]", has_text="REPLICATE").first).to_be_visible()
    policy.select_option("AUTO")
    expect(page.locator(".mm-error")).to_contain_text("needs a budget")
    set_theme(page, "JupyterLab Dark")
    shot(page, "form-dark")
    page.set_viewport_size({"width": 640, "height": 1600})
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    shot(page, "form-narrow")
    page.locator(".mm-plan g[tabindex]").last.focus()
    shot(page, "plan-narrow")
    assert page.locator(".mm-form").evaluate_all("all => all.every(e => e.scrollWidth <= e.clientWidth + 1)")
    set_theme(page, "JupyterLab Light")


def test_a_module_written_in_a_cell_is_tried_in_the_form_and_again_after_an_edit(page):
    run_cell(page, "write")
    run_cell(page, "form")
    page.get_by_text("More: data").click()
    write(page, "reader", "my_rows:read")
    row = field(page, "reader")
    expect(row).to_contain_text("Import path of your own reader")
    row.get_by_role("button", name="Try").click()
    words = "my_rows:read: 39 rows to train on, 1 held out; first: user: <image> assistant: <b>row"
    expect(row).to_contain_text(words, timeout=60_000)  # the first time, the kernel imports torch
    shot(page, "own_reader")
    run_cell(page, "again")
    row.get_by_role("button", name="Try").click()
    expect(row).to_contain_text(re.compile(r"my_rows:read: 4\d rows to train on, [1-9] held out"))
    run_cell(page, "wrong")
    row.get_by_role("button", name="Try").click()
    expect(row.get_by_role("alert")).to_contain_text("'my_rows:read' raised NameError: name 'renge' is not defined")
    expect(row.locator("pre")).to_contain_text('my_rows.py", line 3, in read')
    shot(page, "own_reader_error")
