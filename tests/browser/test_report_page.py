"""report.html in a real browser: from a file, with no network, on a phone and on a desk, light and dark."""

import shutil

import pytest
from lab import chromium, serious_findings, shot

from mmfsdp.params import RunParams
from mmfsdp.run.folder import read_json, write_json
from mmfsdp.widgets.compare import write_comparison
from mmfsdp.widgets.report import write_report

pytestmark = pytest.mark.real

SCREENS = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}


@pytest.mark.parametrize("screen, scheme", [("phone", "dark"), ("desk", "light"), ("desk", "dark")])
def test_the_report_opens_offline_and_fits_the_screen(finished_run, screen, scheme):
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


def test_a_comparison_sorts_by_a_click_and_filters(finished_run):
    other = shutil.copytree(finished_run, finished_run.with_name("second"))
    RunParams().change(**{"fsdp.frozen_policy": "KEEP", "train.steps": 20}).to_yaml(other / "params.yaml")
    write_json(other / "result.json", read_json(other / "result.json") | {"heldout_exact_match": 0.5})
    path = write_comparison([other, finished_run], finished_run.parent / "comparison.html")
    with chromium(viewport=SCREENS["desk"], color_scheme="dark", offline=True) as page:
        page.goto(path.as_uri())
        rows = page.locator(".mm-sortable tbody tr")
        assert [text.split("\t")[0].split("/")[-1] for text in rows.all_inner_texts()] == ["first", "second"]
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
        shot(page, "comparison-dark")
        assert serious_findings(page) == []
        assert page.problems == []
