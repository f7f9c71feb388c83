"""report.html in a real browser: from a file, with no network, on a phone and on a desk, light and dark."""

import shutil

import pytest
import torch
from lab import chromium, serious_findings, shot, smallest_text
from playwright.sync_api import expect
from torch import nn

from mmfsdp.kit.run.files.folder import read_json, write_json
from mmfsdp.kit.run.files.watched_file import captions_writer
from mmfsdp.kit.run.state import RankProgress
from mmfsdp.kit.run.trouble import Trouble
from mmfsdp.kit.widgets.banner import banner, tracebacks
from mmfsdp.kit.widgets.charts.charts_page import charts_html
from mmfsdp.kit.widgets.compare import write_comparison
from mmfsdp.kit.widgets.learning import learning_html
from mmfsdp.kit.widgets.markup import note
from mmfsdp.kit.widgets.pictures.plan_pictures import plan_pictures
from mmfsdp.kit.widgets.pictures.rank_grid import rank_grid
from mmfsdp.kit.widgets.report import write_report
from mmfsdp.kit.widgets.static_files import cockpit_sheet, folds_module, learning_script
from mmfsdp.kit.widgets.style import STYLE, WIDGET_STYLE
from mmfsdp.params import FSDPParams, RunParams, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict.timeline import step_timeline
from tests.tiny import tiny_batch, tiny_flamingo
from tests.watched import SAID, watch

pytestmark = pytest.mark.real

HOSTS = {
    "no theme": "<html><body>PARTS</body></html>",
    "Colab, dark": '<html theme="dark"><body style="background:#383838;color:#fff">PARTS</body></html>',
    "VS Code, dark": '<html><body class="vscode-dark" style="--vscode-editor-background:#1f1f1f;background:#1f1f1f;'
    'color:#ccc">PARTS</body></html>',
    "VS Code, dark, a widget": '<html><body class="vscode-dark" style="--vscode-editor-background:#1f1f1f;'
    'background:#1f1f1f;color:#ccc"><div class="cell-output-ipywidget-background" style="background:white">'
    "PARTS</div></body></html>",
}
"""Pages without JupyterLab's variables and attributes. VS Code lays widgets on white, whatever its theme is."""
SCREENS = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}


@pytest.mark.parametrize("screen, scheme", [("phone", "dark"), ("desk", "light"), ("desk", "dark")])
def test_the_report_opens_offline_and_fits_the_screen(finished_run, screen, scheme):
    planned = read_json(finished_run / "plan.json")
    planned["plan"] = make_plan(tiny_flamingo(), FSDPParams(), world_size=2, example=tiny_batch().inputs()).to_dict()
    write_json(finished_run / "plan.json", planned)
    path = write_report(finished_run)
    with chromium(viewport=SCREENS[screen], color_scheme=scheme, offline=True) as page:
        asked, errors = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        shot(page, f"report-{screen}-{scheme}")
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()] and errors == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page scrolls sideways"
        assert page.locator(".mm-card img").evaluate_all("all => all.every(i => i.naturalWidth > 0)")
        for picture in page.locator(".mm-plan > .mm-scroll, section > svg").all():
            box = picture.bounding_box()
            assert box["width"] <= SCREENS[screen]["width"] and box["height"] > 50
        lowest = "all => Math.min(...all.map(e => e.getBoundingClientRect().height))"
        assert page.locator(".mm-plan svg text").evaluate_all(lowest) >= 12, "a narrow page scrolls the pictures"
        assert serious_findings(page) == []
        the_play_head_moves(page)
        shot(page, f"report-{screen}-{scheme}-play-head")
        assert serious_findings(page) == [] and errors == []


def the_play_head_moves(page):
    """Move the play head of the first plan by the keyboard, the mouse and its button."""
    head, now, play = page.locator(".mm-head").first, page.locator(".mm-now").first, page.locator(".mm-play").first
    seen = (
        "plan => [...plan.querySelectorAll('[data-at]')].filter(e => e.getAttribute('visibility') === 'visible').length"
    )
    plan = page.locator(".mm-plan").first
    still, drawn = now.inner_text(), plan.evaluate(seen)
    assert head.get_attribute("aria-valuetext") == still
    head.focus()
    page.keyboard.press("Home")
    expect(now).to_contain_text("begins the forward of")
    assert head.get_attribute("aria-valuetext") == now.inner_text() != still
    assert plan.evaluate(seen) < drawn, "at the beginning a rank holds least"
    fullest = int(head.get_attribute("value"))
    for _ in range(fullest):
        page.keyboard.press("ArrowRight")
    assert (now.inner_text(), plan.evaluate(seen)) == (still, drawn), "the script says what the page said"
    svg = page.locator(".mm-head ~ svg").first
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + 80, box["y"] + 60)
    page.mouse.down()
    early = now.inner_text()
    page.mouse.move(box["x"] + 140, box["y"] + 60, steps=3)
    page.mouse.up()
    assert early != now.inner_text() != still and int(head.input_value()) < fullest
    at = int(head.input_value())
    play.click()
    expect(play).to_have_text("Pause")
    page.wait_for_function("at => Number(document.querySelector('.mm-head').value) > at", arg=at)
    play.click()
    expect(play).to_have_text("Play")


def test_a_pattern_opens_and_closes_by_a_click_on_its_box_and_by_the_keyboard():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(140)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index % 2 == 1)
    fsdp = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=64)
    plan = make_plan(model, fsdp, world_size=64, example={"input": torch.ones(2, 8)})
    timeline = step_timeline(plan, TrainParams())
    with chromium(viewport=SCREENS["desk"], offline=True) as page:
        title = "<title>a plan</title>"
        page.set_content(f'<html lang="en">{title}{STYLE}<main>{plan_pictures(plan, timeline)}</main></html>')
        opened, step = page.locator(".mm-opened:visible"), page.locator(".mm-plan svg").last
        box, neighbor = page.locator(".mm-open").nth(0), page.locator(".mm-open").nth(1)
        expect(opened).to_have_count(0)
        beside = neighbor.bounding_box()
        box.click()
        expect(opened).to_have_count(1)
        assert opened.locator("path[class^=mm-b]").count() > 120
        expect(step).to_be_visible()
        assert serious_findings(page) == []
        shot(page, "pattern-opened")
        page.mouse.click(beside["x"] + beside["width"] / 2, beside["y"] + 5)  # any box of the pattern closes it
        expect(opened).to_have_count(0)
        page.keyboard.press("Tab")
        expect(page.locator(f".mm-about .{neighbor.get_attribute('class').split()[0]}")).to_be_visible()
        for number in (1, 0):
            page.keyboard.press("Space")
            expect(opened).to_have_count(number)
        assert page.problems == []


KEEP_FOLDS = """async script => {
    const values = {folds: {}};
    const model = {get: name => values[name], set: (name, value) => { values[name] = value; }, save_changes() {}};
    const module = await import(`data:text/javascript,${encodeURIComponent(script)}`);
    const widget = document.querySelector("main");
    module.default.render({model, el: widget.querySelector("i")});
    window.draw = html => { widget.querySelector("div").innerHTML = html; };
}"""


def test_what_a_person_has_opened_stays_open_when_a_plan_is_drawn_once_more():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(60)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index >= 30)

    def drawn(**fields):
        fsdp = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=64, **fields)
        plan = make_plan(model, fsdp, world_size=2)
        return f"{plan_pictures(plan, None)}<details data-fold='units'><summary>{plan.backend}</summary>units</details>"

    with chromium(viewport=SCREENS["desk"], offline=True) as page:
        page.set_content(f"{STYLE}<main class='mm-widget'><i></i><div></div></main>")
        page.evaluate(KEEP_FOLDS, folds_module())
        opened, unfolded = page.locator(".mm-opened:visible"), page.locator("details[open]")

        def draw(**fields):
            page.evaluate("html => window.draw(html)", drawn(**fields))

        draw()
        page.locator(".mm-open").nth(1).click()
        page.locator("summary").click()
        for fields in ({}, {"frozen_policy": "REPLICATE"}, {"backend": "DDP"}):
            draw(**fields)
            expect(opened).to_have_count(1)
            expect(opened).to_contain_text("× 30.0, each unit")
            expect(unfolded).to_have_count(1)
        page.locator(".mm-open:checked").click()
        page.locator("summary").click()
        draw()
        expect(opened).to_have_count(0)
        expect(unfolded).to_have_count(0)
        assert page.problems == []


def said(page):
    """The captions and the time that are in sight."""
    return page.locator(".mm-learning [data-said]").all_inner_texts(), page.locator("[data-time]").inner_text()


def test_a_slider_moves_the_captions_of_watched_pictures_through_time_by_keyboard(finished_run):
    newest = ([f"✓ {SAID[20][0]}", f"✗ {SAID[20][1]}"], "step 20")
    path = write_report(watch(finished_run))
    with chromium(viewport=SCREENS["desk"], offline=True, java_script_enabled=False) as page:
        page.goto(path.as_uri())
        assert said(page) == newest and not page.get_by_label("evaluation").is_visible(), "without a script"
    with chromium(viewport=SCREENS["desk"], offline=True) as page:
        page.goto(path.as_uri())
        slider = page.get_by_label("evaluation")
        assert said(page) == newest
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert said(page) == ([f"✗ {text}" for text in SAID[10]], "step 10")
        page.keyboard.press("Home")
        assert said(page) == ([f"✗ {text}" for text in SAID[5]], "step 5")
        assert slider.get_attribute("aria-valuetext") == "step 5"
        shot(page, "watch-it-learn")
        assert serious_findings(page) == [] and page.problems == []


MOVE_SLIDERS = """script => {
    const widget = document.querySelector("main");
    window.draw = html => { widget.querySelector("div").innerHTML = html; };
    const learning = eval(`(() => { ${script}; return mmLearning; })()`)(widget);
    new MutationObserver(learning.restore).observe(widget, { childList: true, subtree: true });
}"""


def test_a_slider_stays_where_a_person_has_put_it_while_the_run_says_more(finished_run):
    run = watch(finished_run)
    with chromium(viewport=SCREENS["desk"], offline=True) as page:
        page.set_content(f"{STYLE}<main class='mm-widget'><div></div></main>")
        page.evaluate(MOVE_SLIDERS, learning_script())

        def draw(step):
            captions_writer(run, after=step - 1).write({"step": step, "captions": [f"red {step}", f"blue {step}"]})
            page.evaluate("html => window.draw(html)", learning_html(run))

        draw(25)
        page.get_by_label("evaluation").focus()
        page.keyboard.press("ArrowLeft")
        assert said(page)[1] == "step 20"
        draw(30)
        assert said(page) == ([f"✓ {SAID[20][0]}", f"✗ {SAID[20][1]}"], "step 20")
        expect(page.get_by_label("evaluation")).to_be_focused()
        page.keyboard.press("End")
        draw(35)
        assert said(page) == (["✗ red 35", "✗ blue 35"], "step 35"), "at the end it follows the run"
        assert page.problems == []


def test_a_comparison_sorts_by_a_click_and_filters(finished_run):
    other = shutil.copytree(finished_run, finished_run.with_name("second"))
    RunParams().change(**{"fsdp.frozen_policy": "KEEP", "train.steps": 20}).to_yaml(other / "params.yaml")
    write_json(other / "result.json", read_json(other / "result.json") | {"heldout_exact_match": 0.5})
    path = write_comparison([other, finished_run], finished_run.parent / "comparison.html")
    with chromium(viewport=SCREENS["desk"], color_scheme="dark", offline=True) as page:
        page.goto(path.as_uri())
        rows = page.locator(".mm-sortable tbody tr")
        assert [text.split("\t")[0] for text in rows.all_inner_texts()] == ["━ first", "━ second"]
        right = page.get_by_role("button", name="new pictures right")
        right.click()
        assert page.locator("th[aria-sort=ascending]").inner_text() == "new pictures right"
        assert "KEEP" in rows.first.inner_text()
        right.click()
        assert "SHARD" in rows.first.inner_text()
        page.get_by_label("filter").fill("keep 50")
        assert [row.is_visible() for row in rows.all()] == [False, True]
        page.get_by_label("filter").fill("")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        title = page.locator(".mm-chart-title").first.bounding_box()
        word = page.locator(".mm-chart-title b").first.bounding_box()
        assert title["y"] <= word["y"] and word["y"] + word["height"] <= title["y"] + title["height"], "cut off"
        shot(page, "comparison-dark")
        assert serious_findings(page) == []
        assert page.problems == []


def parts_of_a_cockpit(run):
    """The HTML of a cockpit and of a run in trouble, as it is outside JupyterLab: without ipywidgets' own inputs."""
    ranks = [RankProgress(0, "failed", error="no", traceback="the cause"), RankProgress(1, "quiet", age_s=9.0)]
    found = [
        Trouble("error", "failed", "rank 0 failed", "lower train.lr", 0),
        Trouble("warning", "skipped", "2 steps skipped"),
    ]
    log = '<pre class="mm-log">a line <b class="mm-level-1">WARNING</b> <b class="mm-level-2">Error</b></pre>'
    many = [RankProgress(rank, "running", tokens_per_s=9.0 + rank) for rank in range(20)]
    html = banner(found) + rank_grid(ranks, found) + rank_grid(many) + tracebacks(ranks, found) + log
    html += note("wrong", "error") + note("careful", "warning") + charts_html([run])
    report = write_report(run).read_text()
    plan = report[report.index('<div class="mm-plan">') :].partition("<h2")[0].partition("</section>")[0]
    figures = '<div class="mm-cockpit-figures"><div class="mm-figures"><div><b>4 MiB <span class="mm-more">+2 %</span>'
    figures += ' <span class="mm-less">−9 %</span></b>peak</div></div></div>'
    body = f'<main class="mm-widget mm-cockpit mm-run"><h1>A run</h1>{figures}{plan}{html}</main>'
    return f"<title>run</title>{STYLE}{WIDGET_STYLE}<style>{cockpit_sheet()}</style>{body}"


def test_a_page_without_jupyterlabs_colors_is_legible(finished_run, tmp_path):
    parts = parts_of_a_cockpit(finished_run)
    with chromium(viewport=SCREENS["desk"], offline=True) as page:
        for name, host in HOSTS.items():
            path = tmp_path / "host.html"
            path.write_text("<!doctype html>" + host.replace("<html", '<html lang="en"').replace("PARTS", parts))
            page.goto(path.as_uri())
            assert page.locator("canvas").count() and page.locator(".mm-rank-failed").count()
            shot(page, f"host-{name}")
            assert serious_findings(page) == [], name
            assert smallest_text(page, "main") >= 12
            behind = page.locator(".mm-cockpit-figures").evaluate("e => getComputedStyle(e).backgroundColor")
            around = page.locator("main").evaluate(
                """e => { while (e && getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
                          return e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)"; }"""
            )
            assert behind == around, f"{name}: the figures stand out from the page"
        assert page.problems == []
