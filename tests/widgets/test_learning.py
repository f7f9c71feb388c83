"""Watch it learn: the same pictures with their captions of each evaluation, in panel, report and comparison."""

import json
import re
import shutil
from html import unescape

import pytest

from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.watched_file import captions_writer, pictures_path, read_watched, rows_path
from mmfsdp.kit.widgets.compare import Comparison, write_comparison
from mmfsdp.kit.widgets.learning import MAX_STOPS, LearningStrip, learning_html
from mmfsdp.kit.widgets.panel import RunPanel
from mmfsdp.kit.widgets.report import report_html
from tests.run.test_runs import GONE, record
from tests.watched import SAID, TRUTHS, watch
from tests.widgets.test_report import Page


@pytest.fixture
def run(finished_run):
    return watch(finished_run)


def said_in(html: str) -> list[list[str]]:
    """The captions of each picture, in the order of the slider."""
    return [json.loads(unescape(texts)) for texts in re.findall('data-said="(.*?)"', html)]


def test_the_newest_captions_stand_and_the_slider_has_all(run):
    html = learning_html(run)
    Page(html)
    assert "✓ two small red hearts</span>" in html and "✗ one red circle</span>" in html
    assert said_in(html)[0] == ["✗ ? ?", "✗ two red", "✓ two small red hearts"]
    assert json.loads(unescape(re.search('data-times="(.*?)"', html)[1])) == ["step 5", "step 10", "step 20"]
    assert 'max="2"' in html and 'value="2"' in html and 'aria-valuetext="step 20"' in html
    assert html.count("data:image/png") == 2, "a picture is there once, and not once an evaluation"


def test_texts_are_escaped_and_no_picture_comes_from_elsewhere(run):
    html = learning_html(run)
    assert "<img src=x" not in html and "<b>" not in html.replace("<b data-time>", "")
    assert f"✗ {SAID[10][1]}" in said_in(html)[1]
    write_json(pictures_path(run), {"pictures": [{"image": "../secret.png", "truth": truth} for truth in TRUTHS]})
    assert (run.parent / "secret.png").is_file() and "data:image" not in learning_html(run)


def test_a_row_that_does_not_fit_the_pictures_is_left_out(run):
    with rows_path(run).open("a") as file:
        for row in ({"step": 21, "captions": ["one"]}, {"step": "22", "captions": ["a", "b"]}, {"step": 23}, 24):
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 25, "captions": ["a", 1]}\n{"step": 26')
    assert [row["step"] for row in read_watched(run).rows] == [5, 10, 20]


def test_captions_of_later_steps_go_when_a_run_takes_up_an_earlier_one(run):
    captions_writer(run, after=10)
    assert [row["step"] for row in read_watched(run).rows] == [5, 10]


def test_of_many_evaluations_the_first_and_the_last_stay(finished_run):
    said = {step: (f"a {step}", f"b {step}") for step in range(1, 1001)}
    texts, _ = said_in(learning_html(watch(finished_run, said=said)))
    assert len(texts) == MAX_STOPS and len(set(texts)) == MAX_STOPS
    assert texts[0] == "✗ a 1" and texts[-1] == "✗ a 1000"


def test_a_strip_is_made_again_only_when_the_run_has_said_more(run):
    strip = LearningStrip(run)
    html = strip.html()
    assert strip.html() is html
    captions_writer(run, after=20).write({"step": 25, "captions": ["three", "four"]})
    assert "step 25" in strip.html()


def test_report_panel_and_comparison_show_the_same_rows(run):
    other = shutil.copytree(run, run.with_name("second"))
    rows = said_in(learning_html(run))
    record(**GONE).write(run)
    panel = RunPanel(run)
    panel.wait()
    assert said_in(panel.learning.value) == rows
    report = report_html(run)
    Page(report)
    assert said_in(report) == rows and "Captioned 3 times: 1.5 s, in which rank 0 sent 3 MiB" in report
    assert said_in(Comparison([run, other]).learning.value) == rows * 2
    page = write_comparison([run, other], run.parent / "comparison.html").read_text()
    assert said_in(page) == rows * 2 and page.count("const mmLearning") == 1


def test_a_run_without_watched_pictures_shows_none(finished_run):
    assert learning_html(finished_run) == "" and "Watch it learn" not in report_html(finished_run)
    watch(finished_run, said={})
    assert learning_html(finished_run) == "", "no evaluation is over"
