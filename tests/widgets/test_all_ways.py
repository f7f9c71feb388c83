"""All ways to shard a run in one picture: what its dots stand for, AUTO's line, the machine's memory, and a press."""

import json
import re
from xml.etree import ElementTree

import pytest

from mmfsdp import RunParams
from mmfsdp.kit.train.prepare import budget_range, preview
from mmfsdp.kit.train.ways import changes_of_ways, ways, ways_of_auto
from mmfsdp.kit.widgets.all_ways import AllWays
from mmfsdp.kit.widgets.pictures.ways_picture import ways_picture
from mmfsdp.kit.widgets.planned_run import PlannedRun
from mmfsdp.params.in_words import size
from mmfsdp.predict import LAPTOP, LAPTOP_BYTES
from mmfsdp.widgets import Cockpit
from tests.tiny import MODEL


@pytest.fixture(scope="module")
def params():
    return RunParams(model=MODEL).change(**{"launch.ranks": 2})


@pytest.fixture(scope="module")
def compared(params):
    return list(ways(params))


def drawn(svg):
    """The buttons of a picture, by the names of their ways, with the place of each dot."""
    dots = {}
    for element in ElementTree.fromstring(svg).iter():
        if element.get("data-way"):
            (circle,) = [part for part in element if part.tag.endswith("circle")]
            dots[element.get("data-way")] = element, float(circle.get("cx")), float(circle.get("cy"))
    return dots


def wall(svg):
    """The x of the wall of the machine's memory."""
    return float(re.search(r'd="M([\d.]+) [\d.]+V[\d.]+" stroke="currentColor" stroke-width="3"', svg)[1])


def test_every_way_is_a_dot_and_one_beyond_the_wall_is_told_as_such(params, compared):
    planned = {way.name: way for way in compared if not way.refused}
    assert planned.keys() == changes_of_ways(params).keys(), "a tiny model goes each way"
    peaks = sorted(way.peak_bytes for way in planned.values())
    capacity = (peaks[0] + peaks[-1]) // 2
    svg = ways_picture(compared, [], capacity=capacity)
    dots = drawn(svg)
    assert dots.keys() == planned.keys()
    for name, (button, x, y) in dots.items():
        way, words = planned[name], button.get("aria-label")
        assert size(way.sent_bytes) in words and size(way.peak_bytes) in words
        assert button.get("aria-pressed") == str(way.is_chosen).lower()
        fits = way.peak_bytes <= capacity
        assert (x <= wall(svg)) == fits == ("DOES NOT FIT" not in words)
        assert fits == ("does not fit" not in "".join(button.itertext()).replace(words, ""))
        for other, (_, other_x, other_y) in dots.items():
            assert (way.peak_bytes <= planned[other].peak_bytes) == (x <= other_x) or x == other_x
            assert (way.sent_bytes <= planned[other].sent_bytes) == (y >= other_y) or y == other_y
    assert size(capacity) in svg and len(svg.encode()) < 10_000
    assert "further right" in ways_picture(compared, [], capacity=100 * peaks[-1])


def test_auto_sends_less_as_its_budget_grows_and_stays_within_it(params, compared):
    least, most = budget_range(params)
    curve = list(ways_of_auto(params, 3))
    for way, budget in zip(curve, (least, (least + most) / 2, most), strict=True):
        assert way.peak_bytes <= budget
    sent = [way.sent_bytes for way in curve]
    assert sent == sorted(sent, reverse=True) and sent[0] > sent[-1]
    by_name = {way.name: way for way in compared}
    assert sent[-1] == by_name["FSDP2 REPLICATE"].sent_bytes
    svg = ways_picture(compared, curve, capacity=most)
    assert "what AUTO chooses as its budget grows" in svg and "what AUTO" not in ways_picture(compared, [], capacity=1)


def test_a_press_on_a_dot_chooses_its_way_and_the_page_stays_small(params, tmp_path):
    path = tmp_path / "small.yaml"
    params.change(**{"launch.folder": str(tmp_path / "runs")}).to_yaml(path)
    cockpit = Cockpit(str(path))
    assert cockpit.plan and not cockpit.ways.picture.html, "no way is planned before somebody asks"
    cockpit.choices.machine.value = LAPTOP
    cockpit.all_ways.value = True
    assert cockpit.ways.wait_for_work(120)
    html = cockpit.ways.picture.html
    assert size(LAPTOP_BYTES // 2) in html and "what AUTO" in html
    assert drawn(html)["FSDP2 SHARD"][0].get("aria-pressed") == "true"
    state = cockpit.ways.picture.get_state(drop_defaults=True) | {"esm": cockpit.ways.picture._esm}
    assert len(json.dumps(state, default=str)) < 12_000
    cockpit.ways.picture.pressed = {"way": "FSDP2 REPLICATE", "at": 1}
    assert cockpit.params.fsdp.frozen_policy == "REPLICATE" and cockpit.plan
    assert cockpit.ways.wait_for_work(120)
    assert drawn(cockpit.ways.picture.html)["FSDP2 REPLICATE"][0].get("aria-pressed") == "true"
    cockpit.ways.picture.pressed = {"way": "<b>no such way", "at": 2}
    cockpit.ways.picture.pressed = {}
    assert cockpit.params.fsdp.frozen_policy == "REPLICATE"
    cockpit.close()


def test_a_way_that_is_refused_is_said_and_not_drawn(params):
    offloading = params.change(**{"fsdp.cpu_offload": True})
    all_ways = AllWays(choose=lambda **changes: None)
    all_ways.show(PlannedRun(offloading, *preview(offloading)), LAPTOP)
    assert "mm-planning-ways" in all_ways._dom_classes, "what is drawn is of other parameters, or nothing"
    assert all_ways.wait_for_work(120) and all_ways.failure is None
    assert "mm-planning-ways" not in all_ways._dom_classes
    refused = {way.name for way in ways(offloading) if way.refused}
    assert "DDP" in refused and refused.isdisjoint(drawn(all_ways.picture.html))
    assert all(f"{name}: " in all_ways.words.value for name in refused)
    all_ways.close()
