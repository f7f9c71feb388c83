"""Figures: right numbers, right colors, safe texts, and fast enough to be drawn live."""

import math
import re
from xml.etree import ElementTree

import matplotlib
import pytest
from torch import nn

from mmfsdp import plots, style
from mmfsdp.freeze import freeze
from mmfsdp.params import Backend, FSDPParams
from mmfsdp.plan import make_plan

HOSTILE = "<script>alert('$x$ &')</script>"


def rows(n):
    return [{"step": i + 1, "loss": 3 * math.exp(-i / n) + 0.2 * (i % 2)} for i in range(n)]


def texts(svg):
    return ["".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def line_points(svg):
    path = re.search(rf'<path d="([^"]*)"[^>]*stroke: {style.TRAINABLE}', svg, re.I | re.S)
    return len(re.findall(r"[ML] ", path[1]))


def plan(backend=Backend.FSDP2):
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    return make_plan(model, FSDPParams(backend=backend), world_size=2)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_ink_and_colors_stand_out_on_light_and_on_dark(ground):
    assert contrast(style.INK, ground) >= 4
    for color in (style.FROZEN, style.TRAINABLE, style.GATHERED, style.REDUCED):
        assert contrast(color, ground) >= 2.8


def test_a_short_curve_is_drawn_point_by_point_and_a_long_one_thinned():
    assert line_points(plots.curve(rows(40))) == 40
    svg = plots.curve(rows(100_000), total=100_000)
    assert line_points(svg) <= 500 and len(svg) < 100_000


def test_thinning_keeps_mean_extremes_and_last_step():
    points = [(i, float(i % 10)) for i in range(1, 10_001)]
    steps, mean, low, high = plots._thin(points)
    assert steps[-1] == 10_000 and len(steps) == 500
    assert mean.mean() == pytest.approx(4.5) and low.min() == 0 and high.max() == 9


def test_a_curve_survives_missing_and_non_finite_values():
    odd = [{}, {"step": 1, "loss": None}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf}, *rows(3)]
    assert "3 at first" in plots.curve(odd)
    assert "no loss yet" in plots.curve([])
    ElementTree.fromstring(plots.curve([{"step": 1, "loss": 2.0}]))


def test_bars_show_both_numbers_and_leave_out_what_is_unknown():
    svg = plots.bars([("sent", 113.1, 113.1), ("peak", 223.0, None)], unit="MB")
    shown = texts(svg)
    assert shown.count("113.1") == 2 and shown.count("223") == 1 and {"predicted", "measured", "MB"} <= set(shown)


def test_texts_are_escaped_and_never_taken_for_mathematics():
    svg = plots.bars([(HOSTILE, 1, 2)], unit=HOSTILE)
    assert "<script" not in svg and HOSTILE in texts(svg)
    assert "<script" not in plots.curve(rows(3), label=HOSTILE)


def test_the_plan_picture_shows_every_unit_once_with_areas_by_bytes():
    svg = plots.plan_picture(plan())
    titles = [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}title")]
    assert len([t for t in titles if "tower" in t and "frozen" in t]) == 1
    assert len([t for t in titles if "head" in t and "trainable" in t]) == 1
    assert style.FROZEN.lower() in svg and style.TRAINABLE.lower() in svg


def test_the_mosaic_fills_its_frame_in_proportion():
    areas = [5, 1, 1, 8, 0.01, 3, 3, 3]
    places = plots._mosaic(areas, width=9, height=3)
    for area, (x, y, dx, dy) in zip(areas, places, strict=True):
        assert dx * dy == pytest.approx(27 * area / sum(areas))
        assert -1e-9 <= x <= x + dx <= 9 + 1e-9 and -1e-9 <= y <= y + dy <= 3 + 1e-9


def test_figures_are_reproducible_and_leave_the_page_and_matplotlib_as_they_were():
    before = dict(matplotlib.rcParams)
    assert plots.curve(rows(9)) == plots.curve(rows(9))
    assert dict(matplotlib.rcParams) == before
    assert "<style" not in plots.curve(rows(9))  # it would reach the page's other pictures
    assert "matplotlib.org" not in plots.curve(rows(9))
