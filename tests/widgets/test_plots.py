"""The picture of a plan: right numbers, right colors, safe texts."""

from xml.etree import ElementTree

import pytest
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.core.make_plan import make_plan
from mmfsdp.params import Backend, FSDPParams
from mmfsdp.widgets import style
from mmfsdp.widgets.plan_picture import plan_picture, treemap


def plan(backend=Backend.FSDP2):
    model = nn.ModuleDict({"tower": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: x
    freeze(model, ("tower.*",))
    return make_plan(model, FSDPParams(backend=backend), world_size=2)


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
