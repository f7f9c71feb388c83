"""report.html: says what the run folder says, whole in itself, safe, and robust where parts are missing."""

import json
import re
from html.parser import HTMLParser

import pytest

from mmfsdp.kit.run.files.folder import MetricsWriter
from mmfsdp.kit.widgets.report import caption_cards, report_html
from mmfsdp.params.in_words import size


class Page(HTMLParser):
    """Tags that stay open, and everything that a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith(("data:", "#"))]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_says_what_the_folder_says(finished_run):
    text = report_html(finished_run)
    cost = json.loads((finished_run / "plan.json").read_text())["estimate"]
    for words in (
        "93%",
        "61 s",
        "3 at first, 0.15 now",
        "tower",
        size(cost["wire_bytes"]),
        "FSDP2, FULL_SHARD, frozen weights SHARD",
        "parameters train",
        "What each rank holds",
        "steps: 20",
        "two stars",
        "torch 2.11.0",
    ):
        assert words in text, words


def test_the_report_says_how_long_each_stage_took(finished_run):
    assert "building the model" not in report_html(finished_run)
    moments = [("beat", "building"), ("beat", "planning"), ("rank", {"state": "done"})]
    with (finished_run / "events.jsonl").open("a") as file:
        for number, (kind, value) in enumerate(moments):
            file.write(json.dumps({"time": 100.0 + 1.5 * number, "kind": kind, "value": value}) + "\n")
    assert "building the model 1.5 s, planning 1.5 s" in report_html(finished_run)


def test_what_was_predicted_is_drawn_beside_what_was_measured(finished_run):
    found = json.loads((finished_run / "plan.json").read_text())
    assert "- - predicted" not in report_html(finished_run), "nothing was"
    found["estimate"] |= {"peak_bytes": 95 << 20, "peak_when": "backward of head"}
    (finished_run / "plan.json").write_text(json.dumps(found))
    assert "first 8 batches" not in report_html(finished_run)
    batch = {"parameters": 7 << 20, "module_buffers": 0, "activations": 1 << 20, "when": "backward of head"}
    found["estimate"] |= {"batch_peak": batch, "batch": "the largest of the data's first 8 batches"}
    (finished_run / "plan.json").write_text(json.dumps(found))
    text = report_html(finished_run)
    assert "predicted 95" not in text
    assert "<b>8 MiB</b>peak memory of the largest of the data&#x27;s first 8 batches" in text
    result = json.loads((finished_run / "result.json").read_text())
    result["peak"] = {"bytes": 80 << 20, "when": "backward of head", "batch": "input_ids 2 x 5"}
    (finished_run / "result.json").write_text(json.dumps(result))
    measured = {"samples": 64, "samples_per_s": 100.0, "step_s": 0.6, "memory_bytes": 60 << 20}
    MetricsWriter(finished_run).write({"step": 21, "loss": 0.1, **measured})
    text = report_html(finished_run)
    assert "predicted 80" in text and "-25.0%" in text
    assert "first 8 batches" not in text, "the largest that ran stands in its place"


def test_texts_are_escaped_and_pictures_outside_the_folder_are_not_read(finished_run):
    text = report_html(finished_run)
    assert "<img src=x" not in text and "one &lt;img src=x onerror=alert(1)&gt; &amp; $circle$" in text
    assert len(re.findall("data:image/png", text)) == 1


def test_what_the_data_lacked_is_told_by_source(finished_run):
    assert "Skipped data" not in report_html(finished_run)
    result = json.loads((finished_run / "result.json").read_text())
    whole = {"path": "shapes", "records": 0, "reasons": {}, "cut": 0}
    reasons = {f"{i}\x1b[31m.jpg": "is <truncated>" for i in range(7)}
    lacking = {"path": "parts", "records": 7, "reasons": reasons, "cut": 4}
    (finished_run / "result.json").write_text(json.dumps(result | {"skipped": {"data": lacking, "data.more.0": whole}}))
    text = report_html(finished_run)
    assert "Skipped data" in text and "&#x27;0.jpg&#x27;, which is &lt;truncated&gt;" in text
    assert text.count(".jpg&#x27;, which is") == 5, "the first of them"
    assert "parts: 7 records skipped, 4 texts cut to data.max_length" in text and "shapes: " not in text


def test_splits_stand_apart_and_mistakes_are_marked(finished_run):
    seen, unseen = caption_cards(finished_run).split("that no training has ever shown")
    assert "✗" in seen and "truth:" in seen and "✓" not in seen
    assert "✓" in unseen and "truth:" not in unseen
    assert "combinations that the training has shown" in seen
    result = json.loads((finished_run / "result.json").read_text())
    only_new = [row for row in result["captions"] if row["split"] == "heldout"]
    (finished_run / "result.json").write_text(json.dumps(result | {"captions": only_new}))  # as of data of one's own
    assert "New pictures:" in caption_cards(finished_run) and "combinations" not in caption_cards(finished_run)


@pytest.mark.parametrize("name", ["params.yaml", "plan.json", "metrics.jsonl", "result.json", "captions/0.png"])
@pytest.mark.parametrize("damage", [None, b"", b"{\xff", b"[1, 2]", b'{"plan": {}, "captions": [{}]}'])
def test_parts_that_are_missing_or_damaged_are_left_out(finished_run, name, damage):
    (finished_run / name).unlink() if damage is None else (finished_run / name).write_bytes(damage)
    page = Page(report_html(finished_run))
    assert page.open == []


def test_an_empty_folder_still_has_a_report(tmp_path):
    assert "LOST" in report_html(tmp_path) or "QUEUED" in report_html(tmp_path)
