"""report.html: says what the run folder says, whole in itself, safe, and robust where parts are missing."""

import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image
from torch import nn

from mmfsdp import runs
from mmfsdp.estimate import estimate
from mmfsdp.freeze import freeze
from mmfsdp.params import FSDPParams, RunParams, TrainParams
from mmfsdp.plan import make_plan
from mmfsdp.report import captions, report_html, write_report

HOSTILE = "one <img src=x onerror=alert(1)> & $circle$"


class Page(HTMLParser):
    """Tags that stay open, and everything that a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith(("data:", "#"))]

    def handle_startendtag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith(("data:", "#"))]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path):
    """A run folder as the ranks leave it, written by the package's own writers."""
    folder = tmp_path / "first"
    (folder / "captions").mkdir(parents=True)
    RunParams(train=TrainParams(steps=20)).to_yaml(folder / "params.yaml")
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    plan = make_plan(model, FSDPParams(), world_size=2)
    cost = estimate(plan, TrainParams())
    runs.write_json(folder / "plan.json", {"plan": plan.to_dict(), "estimate": cost.to_dict()})
    writer = runs.MetricsWriter(folder)
    for step in range(1, 21):
        writer.write({"step": step, "loss": 3.0 / step, "wire_bytes": cost.wire_bytes})
    Image.new("RGB", (48, 48), "red").save(folder / "captions/0.png")
    rows = [
        {"image": "captions/0.png", "truth": HOSTILE, "caption": "one red circle", "split": "heldout"},
        {"image": "../secret.png", "truth": "two stars", "caption": "two stars", "split": "unseen"},
    ]
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    result = {
        "heldout_exact_match": 0.93,
        "text_only_exact_match": 0.01,
        "wire_bytes_predicted": cost.wire_bytes,
        "wire_bytes_measured": cost.wire_bytes,
        "frozen_parameters_changed": 0,
        "world_size": 2,
        "seconds": 61.0,
        "captions": rows,
    }
    runs.write_json(folder / "result.json", result)
    return folder


def test_the_report_says_what_the_folder_says(folder):
    text = report_html(folder)
    cost = json.loads((folder / "plan.json").read_text())["estimate"]
    for words in ("93%", "61 s", "3 at first, 0.15 now", "tower", f"{cost['wire_bytes']:,}", "steps: 20", "two stars"):
        assert words in text, words


def test_the_report_is_one_file_that_fetches_nothing_and_is_well_formed(folder):
    page = Page(write_report(folder).read_text())
    assert page.fetched == [] and page.open == []
    assert "data:image/png;base64," in report_html(folder)


def test_texts_are_escaped_and_pictures_outside_the_folder_are_not_read(folder):
    text = report_html(folder)
    assert "<img src=x" not in text and "one &lt;img src=x onerror=alert(1)&gt; &amp; $circle$" in text
    assert len(re.findall("data:image/png", text)) == 1


def test_unseen_combinations_and_mistakes_are_marked(folder):
    right, wrong = captions(folder).split("</figure>")[1::-1]
    assert "✓" in right and "never-seen" in right
    assert "✗" in wrong and "truth:" in wrong


@pytest.mark.parametrize("name", ["params.yaml", "plan.json", "metrics.jsonl", "result.json", "captions/0.png"])
@pytest.mark.parametrize("damage", [None, b"", b"{\xff", b"[1, 2]", b'{"plan": {}, "captions": [{}]}'])
def test_parts_that_are_missing_or_damaged_are_left_out(folder, name, damage):
    (folder / name).unlink() if damage is None else (folder / name).write_bytes(damage)
    page = Page(report_html(folder))
    assert page.open == []


def test_an_empty_folder_still_has_a_report(tmp_path):
    assert "LOST" in report_html(tmp_path) or "QUEUED" in report_html(tmp_path)
