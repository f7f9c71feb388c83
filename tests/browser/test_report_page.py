"""report.html in a real browser: from a file, with no network, on a phone and on a desk, light and dark."""

import pytest
from lab import chromium, shot

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
