"""The cockpit in a real JupyterLab: what is in sight, choices by mouse and keyboard, a run that starts and is found."""

import re

import pytest
from lab import chromium, open_notebook, run_cell, serious_findings, set_theme, shot, smallest_text, write_notebook
from playwright.sync_api import expect

pytestmark = pytest.mark.real

HOSTILE = "<img src=x onerror=document.title='owned'>"
CELLS = {
    "cockpit": "from mmfsdp.widgets import Cockpit\n"
    "few = {'train.steps': 40, 'train.batch_size': 4, 'train.eval_samples': 20}\n"
    "cockpit = Cockpit('tiny', **few, **{'launch.folder': 'cockpitruns'})\ncockpit",
    "wait": "print(cockpit.wait())",
    "rows": "%%writefile my_rows.py\nfrom PIL import Image\ndef read():\n"
    '    return [{"image": Image.new("RGB", (8, 8)), "text": f"<b>row {i}"} for i in range(40)]\n',
    "wrong": "%%writefile my_rows.py\nfrom PIL import Image\ndef read():\n"
    '    return [{"image": Image.new("RGB", (8, 8)), "text": f"<b>row {i}"} for i in renge(40)]\n',
}
CELL_AT_1280 = {"width": 1280, "height": 720}
FIGURES, STEP_PICTURE, FIRST_CHART = ".mm-cockpit-figures", (".mm-plan svg", 1), (".mm-run canvas", 0)
CHOICES = (".mm-cockpit-top", ".mm-choices")
PLAN = (FIGURES, (".mm-plan svg", 0), STEP_PICTURE)
RUN = (".mm-run-head", FIRST_CHART, (".mm-run canvas", 1))


@pytest.fixture
def page(lab):
    base, token, folder = lab
    write_notebook(folder / "cockpit.ipynb", CELLS)
    with chromium(viewport=CELL_AT_1280) as page:
        open_notebook(page, base, token, "cockpit.ipynb")
        page.evaluate("window.jupyterapp.shell.collapseLeft()")
        yield page
        assert page.problems == [] and page.title() != "owned"


def press(page, name):
    button(page, name).click()


def button(page, name):
    """A button by its whole text; an icon may stand before it."""
    return page.locator(".mm-cockpit").get_by_role("button", name=re.compile(rf"^\W*{name}$")).first


def lit(page):
    """The pressed buttons of the policy and the backend."""
    return page.locator(".mm-buttons .mod-active").all_inner_texts()[:2]


def write(page, label, text):
    box = page.locator(".mm-choices").get_by_label(label, exact=True).last
    box.fill(text)
    box.press("Tab")


def to_top(page):
    page.locator(".mm-cockpit").evaluate("e => e.scrollIntoView()")


def out_of_sight(page, *parts):
    """Return which parts do not lie, as a whole, within what the window shows of the notebook.

    All are measured at one moment: widgets redraw themselves. A part is a selector, or (selector, which of them).
    """
    return page.evaluate(
        """parts => parts.filter(part => {
             const [selector, index] = Array.isArray(part) ? part : [part, 0];
             const element = document.querySelectorAll(selector)[index];
             if (!element) return true;
             const box = element.getBoundingClientRect();
             const view = element.closest('.jp-WindowedPanel-outer').getBoundingClientRect();
             return !(box.height > 0 && box.top >= view.top - 2 && box.bottom <= view.bottom + 2
                      && box.left >= view.left && box.right <= view.right);
           })""",
        list(parts),
    )


def planned(page):
    expect(page.locator(".mm-cockpit-figures", has_text="peak, longest texts")).to_be_visible()  # torch is imported


def shapes(page):
    """The shapes of the picture of the ranks, without what names and places them."""
    return page.locator(".mm-plan svg").first.inner_html()


def test_choose_see_pin_launch_and_watch_on_one_screen(page):
    run_cell(page, "cockpit")
    planned(page)
    to_top(page)
    assert out_of_sight(page, *CHOICES, *PLAN) == []
    assert page.locator(".mm-cockpit").evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    assert smallest_text(page, ".mm-cockpit") >= 12
    assert serious_findings(page, ".mm-cockpit") == []
    shot(page, "cockpit-light")

    # The ways to hold frozen weights draw differently, beside a pinned plan.
    press(page, "Pin")
    drawn = [shapes(page)]
    for way in ("KEEP", "REPLICATE"):
        press(page, way)
        expect(button(page, way)).to_have_class(re.compile("mod-active"))
        page.wait_for_function("before => document.querySelector('.mm-plan svg').innerHTML !== before", arg=drawn[-1])
        drawn.append(shapes(page))
    expect(page.locator(".mm-cockpit-figures .mm-less")).to_be_visible()
    expect(page.locator(".mm-cockpit-figures .mm-more").first).to_be_visible()
    press(page, "DDP")
    page.wait_for_function("before => document.querySelector('.mm-plan svg').innerHTML !== before", arg=drawn[-1])
    assert len({*drawn, shapes(page)}) == 4
    shot(page, "cockpit-pinned")
    page.locator(".mm-cockpit summary", has_text="what differs from the pinned plan").click()
    unfolded = page.locator(".mm-cockpit details[open]")
    expect(unfolded).to_contain_text("backend: FSDP2 → DDP")
    before = shapes(page)
    press(page, "FSDP2")
    page.wait_for_function("before => document.querySelector('.mm-plan svg').innerHTML !== before", arg=before)
    expect(unfolded).to_contain_text("frozen_policy: SHARD → REPLICATE")  # it stays open, and follows
    expect(unfolded).not_to_contain_text("backend: FSDP2 → DDP")
    unfolded.locator("summary").click()
    expect(unfolded).to_have_count(0)

    # Pointing at a unit lights it in both pictures.
    lit = "e => getComputedStyle(e).outlineStyle"
    unit, in_step = page.locator("svg g.mm-b3").first, page.locator("svg path.mm-b3").first
    page.wait_for_function(  # FSDP2's pictures are drawn
        """() => ['svg g.mm-b3', 'svg path.mm-b3'].every(
             s => document.querySelector(s) && getComputedStyle(document.querySelector(s)).outlineStyle === 'none')"""
    )
    unit.hover()
    expect(page.locator(".mm-about .mm-b3")).to_be_visible()
    assert unit.evaluate(lit) == in_step.evaluate(lit) == "solid"
    in_step.hover()
    assert unit.evaluate(lit) == "solid"
    expect(page.locator(".mm-hint")).to_be_hidden()
    unit.focus()
    page.keyboard.press("Tab")
    expect(page.locator(".mm-about .mm-b4")).to_be_visible()

    # The play head moves by keyboard, and stays where it is when another way is drawn.
    head, now = page.locator(".mm-head"), page.locator(".mm-now > span")
    cell = "window.jupyterapp.shell.currentWidget.content.activeCellIndex"
    active = page.evaluate(cell)
    head.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(cell) == active, "the keys are the head's"
    expect(now).to_contain_text("Each rank")
    expect(now).to_be_visible()
    assert now.inner_text() == head.get_attribute("aria-valuetext")
    at = head.input_value()
    before = shapes(page)
    press(page, "SHARD")
    page.wait_for_function("before => document.querySelector('.mm-plan svg').innerHTML !== before", arg=before)
    expect(now).to_be_visible()
    assert head.input_value() == at
    assert smallest_text(page, ".mm-cockpit") >= 12
    to_top(page)
    shot(page, "cockpit-play-head")
    page.set_viewport_size({"width": 1920, "height": 1080})  # the pictures are larger there
    to_top(page)
    track = page.locator(".mm-head-track").bounding_box()
    x = track["x"] + 0.7 * track["width"]
    page.mouse.click(x, track["y"] + 30)
    line = page.locator(".mm-head-line").bounding_box()
    assert abs(line["x"] + line["width"] / 2 - x) <= track["width"] / int(head.get_attribute("max"))
    expect(now).to_be_visible()
    shot(page, "cockpit-play-head-1920")
    page.set_viewport_size(CELL_AT_1280)

    # All ways at once: a click on a dot, or Enter, chooses its way; the dot keeps the focus.
    press(page, "All ways")
    expect(page.get_by_text("The line is AUTO")).to_be_visible()
    dots, picture = page.locator(".mm-way"), page.locator("svg", has=page.locator(".mm-way"))
    expect(dots).to_have_count(5)
    assert serious_findings(page, ".mm-cockpit") == [] and smallest_text(page, ".mm-cockpit") >= 12
    for width, height in ((1920, 1080), (CELL_AT_1280["width"], CELL_AT_1280["height"])):
        page.set_viewport_size({"width": width, "height": height})
        picture.scroll_into_view_if_needed()
        shot(page, f"cockpit-all-ways-{width}")
    ddp, replicate = page.locator("[data-way='DDP']"), page.locator("[data-way='FSDP2 REPLICATE']")
    ddp.click()
    expect(button(page, "DDP")).to_have_class(re.compile("mod-active"))
    expect(ddp).to_have_attribute("aria-pressed", "true")
    replicate.focus()
    page.keyboard.press("Enter")
    expect(button(page, "REPLICATE")).to_have_class(re.compile("mod-active"))
    expect(replicate).to_have_attribute("aria-pressed", "true")
    expect(replicate).to_be_focused()
    press(page, "All ways")
    expect(picture).to_be_hidden()
    to_top(page)

    # A mistake stands where it was made, and beside the button that it disables.
    write(page, "steps", "0")
    expect(page.locator(".mm-choices .mm-error")).to_contain_text("greater than or equal to 1")
    launch = page.locator(".mm-launch").get_by_role("button", name="Launch")
    expect(launch).to_be_disabled()
    write(page, "steps", "4e1")
    expect(page.locator(".mm-choices .mm-error")).to_have_count(0)
    planned(page)

    launch.click()
    expect(page.locator(".mm-of-run").get_by_role("button", name="Stop")).to_be_enabled()
    expect(page.locator(".mm-launch").get_by_role("button", name="Running")).to_be_disabled()
    log = page.locator(".mm-log").last
    expect(log).to_contain_text("step 1/40")
    expect(page.locator(".mm-run canvas").nth(1)).to_be_visible()
    to_top(page)
    assert out_of_sight(page, *CHOICES, *PLAN, *RUN) == [], "beside a pinned plan, with a run"
    assert serious_findings(page, ".mm-cockpit") == []
    shot(page, "cockpit-running")

    # The log stands still while a person reads older lines.
    run_cell(page, "wait", wait=False)
    follow = page.get_by_label("Follow")
    page.locator(".mm-log-box").hover()
    expect(page.get_by_text("COMPLETED, step 40 of 40").first).to_be_visible()
    expect(page.locator(".mm-of-run").get_by_role("button", name="Run again")).to_be_enabled()
    expect(page.locator(".mm-launch").get_by_role("button", name="Completed")).to_be_disabled()
    if page.locator(".mm-log-box").evaluate("e => e.scrollHeight > e.clientHeight"):
        page.locator(".mm-log-box").hover()
        page.mouse.wheel(0, -200)
        expect(follow).not_to_be_checked()
        follow.check()
        page.wait_for_function("() => document.querySelector('.mm-log-box').scrollTop > -8")

    # Stacked where the side bar is open: choices and figures together, then figures, pictures and the run.
    page.evaluate("window.jupyterapp.shell.expandLeft()")
    page.wait_for_function("document.querySelector('.mm-cockpit').clientWidth < 860")
    to_top(page)
    assert out_of_sight(page, *CHOICES, *PLAN) == []
    page.locator(".mm-cockpit-right").evaluate("e => e.scrollIntoView()")
    assert out_of_sight(page, *PLAN, ".mm-run-head", FIRST_CHART) == []
    shot(page, "cockpit-stacked")
    page.locator(".mm-plan svg").last.evaluate("e => e.scrollIntoView({block: 'end'})")
    assert out_of_sight(page, FIGURES, STEP_PICTURE) == [], "the figures stay in view"
    assert page.locator(".mm-cockpit").evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    page.evaluate("window.jupyterapp.shell.collapseLeft()")

    # The kernel restarts: the same cell finds the run.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    run_cell(page, "cockpit")
    planned(page)
    press(page, "REPLICATE")
    page.locator(".mm-launch").get_by_role("button", name="Launch").click()
    expect(page.locator(".mm-run-head")).to_contain_text("COMPLETED, step 40 of 40")
    expect(page.locator(".mm-stale")).to_have_count(0)  # what is drawn is REPLICATE's plan
    set_theme(page, "JupyterLab Dark")
    to_top(page)
    shot(page, "cockpit-dark")
    assert serious_findings(page, ".mm-cockpit") == []
    set_theme(page, "JupyterLab Light")
    page.problems[:] = [text for text in page.problems if "WebSocket" not in text]


def test_all_choices_are_searched_shared_and_tried(page):
    run_cell(page, "rows")
    run_cell(page, "cockpit")
    planned(page)
    press(page, "All choices")
    search = page.get_by_placeholder("search all parameters")
    search.fill("launch.name")
    search.press("Enter")
    name = page.locator(".mm-form .mm-row", has=page.get_by_label("name", exact=True)).first.get_by_label(
        "name", exact=True
    )
    name.fill(HOSTILE)
    name.press("Tab")
    expect(page.locator(".mm-cockpit > .widget-html .mm-error")).to_contain_text("launch.name")
    name.fill("first")
    name.press("Tab")
    search.fill("reader")
    search.press("Enter")
    row = page.locator(".mm-form .mm-row", has=page.get_by_label("reader", exact=True)).first
    expect(row).to_contain_text("data.reader")
    reader = row.get_by_label("reader", exact=True)
    reader.fill("my_rows:read")
    reader.press("Tab")
    row.get_by_role("button", name="Try").click()
    words = "my_rows:read: 39 rows to train on, 1 held out; first: user: <image> assistant: <b>row"
    expect(row).to_contain_text(words)
    shot(page, "cockpit-all-choices")
    search.fill("")
    search.press("Enter")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        set_theme(page, theme)
        assert serious_findings(page, ".mm-cockpit") == []
    assert smallest_text(page, ".mm-cockpit") >= 12
    search.fill("reader")
    search.press("Enter")
    run_cell(page, "wrong")
    row.get_by_role("button", name="Try").click()
    expect(row.get_by_role("alert")).to_contain_text("'my_rows:read' raised NameError: name 'renge' is not defined")
    press(page, "All choices")

    press(page, "YAML, command")
    page.locator(".lm-TabBar-tab", has_text="command").last.click()
    told = page.locator(".mm-copyable pre:visible")
    expect(told).to_contain_text("mmfsdp run --config tiny")
    expect(told).to_contain_text("--train.steps 40")
    assert serious_findings(page, ".mm-cockpit") == []
    page.locator(".mm-copy:visible").click()
    expect(page.locator(".mm-copy:visible")).to_have_text("Copied")

    # The lit choice is the one that is written and drawn; where it cannot be, the picture is dimmed and says so.
    stale = page.locator(".mm-stale-words:visible")
    for way in ("KEEP", "AUTO", "SHARD"):
        press(page, way)
        expect(told).to_contain_text(f"--fsdp.frozen-policy {way}" if way != "SHARD" else "--train.steps 40")
        expect(stale).to_have_count(0)
        assert lit(page) == [way, "FSDP2"]
        expect(page.get_by_text("SHARD needs")).to_be_visible(visible=way == "AUTO")
    press(page, "DDP")
    expect(told).to_contain_text("--fsdp.backend DDP")
    expect(page.locator(".mm-choices")).to_contain_text("has no effect with DDP: every rank holds all weights")
    expect(button(page, "SHARD")).to_be_disabled()
    write(page, "your data", "/nowhere")
    expect(page.locator(".mm-choices .mm-error")).to_contain_text("'/nowhere' is neither here nor a name of the hub")
    expect(stale).to_contain_text("This is the choice before: data.path has a mistake")
    expect(button(page, "Launch")).to_be_disabled()
    write(page, "your data", "")
    expect(stale).to_have_count(0)
    expect(button(page, "Launch")).to_be_enabled()
    expect(page.locator(".mm-choices .mm-error")).to_have_count(0)
    press(page, "FSDP2")
    press(page, "YAML, command")

    # The machine is checked, ranks on it too, line by line.
    press(page, "Check this machine")
    expect(button(page, "End the check")).to_be_visible()
    lines = page.locator(".mm-check .mm-check-table")
    expect(lines.get_by_role("row", name=re.compile("^ok run folder "))).to_be_visible()
    expect(button(page, "Check this machine")).to_be_visible()
    expect(page.locator(".mm-check [role=status]")).to_contain_text(re.compile(r"\d+ checks"))
    expect(lines.get_by_role("row", name=re.compile("^ok gloo "))).to_be_visible()
    assert serious_findings(page, ".mm-check") == []

    # Every input has a name, and what scrolls takes the keyboard's focus.
    nameless = """root => [...root.querySelectorAll('input, select, textarea, button, [role=slider]')].filter(e => {
        const labels = [...(e.labels || [])].map(label => label.textContent).join('');
        const name = labels + (e.getAttribute('aria-label') || '') + e.textContent;
        return e.checkVisibility() && !/\\w/.test(name);
    }).map(e => e.outerHTML)"""
    assert page.locator(".mm-cockpit").evaluate(nameless) == []
    # By keyboard, from the preset on.
    page.locator(".mm-cockpit-top select").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent.includes('All choices')")
    unit = page.locator(".mm-plan svg [tabindex]").nth(3)
    unit.focus()
    expect(unit).to_have_accessible_name(re.compile("parameters"))
