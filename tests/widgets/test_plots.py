"""Figures: right numbers, right colors, safe texts, and fast enough to be drawn live."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.core.make_plan import make_plan
from mmfsdp.params import Backend, FSDPParams
from mmfsdp.widgets import curves, style
from mmfsdp.widgets.curves import History, Line, chart, charts
from mmfsdp.widgets.plan_picture import plan_picture, treemap

HOSTILE = "<script>alert('$x$ &')</script>"


def rows(n):
    return [{"step": i + 1, "loss": 3 * math.exp(-i / n) + 0.2 * (i % 2)} for i in range(n)]


def texts(svg):
    return ["".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def line_points(svg):
    return len(re.findall(r"[ML]", re.search(rf'<path d="([^"]*)" fill="none" stroke="{style.TRAINABLE}"', svg)[1]))


def plan(backend=Backend.FSDP2):
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    return make_plan(model, FSDPParams(backend=backend), world_size=2)


def test_a_short_curve_is_drawn_point_by_point_and_a_long_one_in_bounded_memory():
    assert line_points(charts(History(rows(40)))) == 40
    long = History(rows(100_000))
    svg = charts(long, total=100_000)
    drawn = Line("", long["loss"]).drawn()
    assert 150 <= len(drawn) <= 301 and line_points(svg) == len(drawn) and len(svg) < 20_000
    assert (drawn[0].step, drawn[-1].step) == (1, 100_000)
    assert len({later.step - earlier.step for earlier, later in pairwise(drawn[:-1])}) == 1


def test_a_curve_survives_missing_and_non_finite_values():
    odd = [{}, {"step": 1, "loss": None}, {"step": 2, "loss": math.nan}, {"step": None, "loss": 1.0}, *rows(3)]
    assert "loss: 3 at first" in charts(History(odd))
    assert charts(History([])) == ""
    for flat in (0.0, 2.0, -1e30):
        ElementTree.fromstring(charts(History([{"step": 1, "loss": flat}])))


def drawn_lines(svg, color=style.TRAINABLE):
    return len(re.findall(rf'<path d="[^"]*" fill="none" stroke="{color}" stroke-width="1.6"', svg))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400])
def test_a_value_that_is_not_finite_is_a_gap_and_never_0(bad):
    measured = rows(10)
    measured[4]["loss"] = bad
    svg = charts(History(measured))
    assert drawn_lines(svg) == 2 and line_points(svg) == 4, "before the gap, and after it"
    measured[9]["loss"] = bad
    svg = charts(History(measured))
    assert drawn_lines(svg) == 2 and "loss: 3 at first, not finite now" in svg and "not finite" in texts(svg)
    svg = charts(History([{"step": step, "loss": bad, "heldout_loss": bad} for step in range(1, 9)]), total=8)
    assert drawn_lines(svg) == drawn_lines(svg, style.FROZEN) == 0
    assert "held-out not finite" in texts(svg) and "held-out 0" not in svg and "0 now" not in svg
    ElementTree.fromstring(svg)


def test_predictions_stand_beside_what_was_measured():
    measured = History([{"step": i, "memory_bytes": 50 * 2**20} for i in range(1, 9)])
    drawn = charts(measured, predicted={"memory_bytes": 80 * 2**20})
    assert "- - predicted 80" in texts(drawn) and "50" in texts(drawn)


def test_held_out_loss_stands_in_the_chart_of_the_loss():
    measured = [row | ({"heldout_loss": 2.5 + row["loss"]} if row["step"] % 5 == 0 else {}) for row in rows(15)]
    drawn = charts(History(measured))
    assert drawn.count("<svg") == 1 and "held-out: " in drawn
    last = measured[-1]["loss"]
    assert {f"{last:.4g}", f"held-out {2.5 + last:.4g}"} <= set(texts(drawn))


def test_lines_of_many_runs_have_a_name_each():
    names = [f"run {i} {HOSTILE}" for i in range(8)]
    svg = chart(curves.METRICS["loss"], [curves.Line(name, History(rows(5))["loss"]) for name in names])
    (title,) = (e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}title"))
    assert all(name in title for name in names) and svg.count('stroke-width="1.6"') == 8


def test_the_plan_picture_shows_every_unit_once_with_areas_by_bytes():
    svg = plan_picture(plan())
    titles = [e.get("aria-label", "") for e in ElementTree.fromstring(svg).iter()]
    assert len([t for t in titles if "tower" in t and "frozen" in t]) == 1
    assert len([t for t in titles if "head" in t and "trainable" in t]) == 1
    assert style.FROZEN in svg and style.TRAINABLE in svg


def test_thetreemap_fills_its_frame_in_proportion():
    areas = [5, 1, 1, 8, 0.01, 3, 3, 3]
    places = treemap(areas, width=9, height=3)
    for area, (x, y, dx, dy) in zip(areas, places, strict=True):
        assert dx * dy == pytest.approx(27 * area / sum(areas))
        assert -1e-9 <= x <= x + dx <= 9 + 1e-9 and -1e-9 <= y <= y + dy <= 3 + 1e-9
