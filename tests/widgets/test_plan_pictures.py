"""The pictures of a plan: what they show for each way to shard, their sizes, names and colors."""

import re
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from mmfsdp.core.plan import UnitKind
from mmfsdp.kit.train.prepare import preview
from mmfsdp.kit.widgets import style
from mmfsdp.kit.widgets.cockpit import PICTURE_WIDTH
from mmfsdp.kit.widgets.markup import width_of
from mmfsdp.kit.widgets.pictures.plan_pictures import HINT, NO_EXAMPLE, OPENS, plan_pictures, timeline_of
from mmfsdp.kit.widgets.pictures.play_head import PlayHead
from mmfsdp.kit.widgets.pictures.rank_picture import MIN_BOX, MIN_STRIPE, Lanes, rank_picture
from mmfsdp.kit.widgets.pictures.step_picture import SENT_HEIGHT, step_picture
from mmfsdp.kit.widgets.pictures.unit_boxes import unit_boxes
from mmfsdp.kit.widgets.plan_figures import Figure, figures_html, plan_figures
from mmfsdp.kit.widgets.report_plan import facts
from mmfsdp.kit.widgets.static_files import play_head_script
from mmfsdp.params import FSDPParams, TrainParams, load
from mmfsdp.params.in_words import size
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate
from mmfsdp.predict.plan_cache import PlanCache
from mmfsdp.predict.timeline import step_timeline
from tests.tiny import tiny_batch, tiny_flamingo

HOSTILE = "<script>alert('$x$ &')</script>"
TRAIN = TrainParams(device="cpu")
EACH_LAYER = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=64)
"""Each layer is a unit."""
WAYS = {
    "SHARD": {},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "DDP": {"backend": "DDP"},
    "AUTO": {"frozen_policy": "AUTO", "memory_budget_gib": 1.0},
    "HYBRID": {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 2},
}


def each_layer(policy):
    budget = 1.0 if policy == "AUTO" else None
    return EACH_LAYER.change(frozen_policy=policy, memory_budget_gib=budget)


@pytest.fixture(scope="module")
def plans():
    model, cache = tiny_flamingo(), PlanCache()
    example = tiny_batch().inputs()
    made = {}
    for name, fields in WAYS.items():
        ranks = 8 if name == "HYBRID" else 2
        made[name] = make_plan(model, FSDPParams(**fields), world_size=ranks, example=example, train=TRAIN, cache=cache)
    return made


@pytest.fixture(scope="module")
def many_layers():
    """30 equal layers, of which every other one trains, on 64 ranks."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(30)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index % 2 == 1)
    return make_plan(model, EACH_LAYER, world_size=64, example={"input": torch.ones(2, 64)})


def elements(svg, kind):
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(f"}}{kind}")]


def words(svg):
    return [element.text for element in elements(svg, "text")]


def rectangles(path):
    """(x, y, width, height) of each rectangle of a path."""
    number = r"(-?[\d.]+)"
    found = re.findall(rf"M{number} {number}h{number}v{number}", path.get("d"))
    return [tuple(map(float, sizes)) for sizes in found]


def filled(svg, kind):
    """The rectangles of what the ranks store."""
    paths = [path for path in elements(svg, "path") if path.get("fill") == style.FILL[kind]]
    return [rectangle for path in paths for rectangle in rectangles(path)]


def areas(svg):
    """The pixels of a picture's filled boxes by color."""
    return {kind: sum(box[2] * box[3] for box in filled(svg, kind)) for kind in ("frozen", "trainable")}


def hatched(svg):
    """The pixels of boxes that are gathered once and kept."""
    total = 0.0
    for path in elements(svg, "path"):
        if path.get("stroke-dasharray") == "2 3" and path.get("stroke") in style.FILL.values():
            widths = re.findall(r"h([\d.]+)", path.get("d"))
            total += float(path.get("stroke-width")) * sum(map(float, widths))
    return total


def places(svg):
    """Attributes of the places that are pointed at, by class."""
    return [(group.get("class"), group[1].attrib) for group in elements(svg, "g") if group.get("class")]


def units_of(svg):
    """The classes of the units in the picture of an opened pattern."""
    return [path.get("class") for path in elements(svg, "path") if path.get("class")]


def test_what_a_rank_holds_is_drawn_by_area_for_each_way(plans):
    drawn = {name: rank_picture(plan) for name, plan in plans.items()}
    full = areas(drawn["DDP"])
    assert full["frozen"] > 1000 and full["trainable"] > 1000
    shares = {}
    for name in ("SHARD", "KEEP", "REPLICATE", "HYBRID"):
        shares[name] = {kind: area / full[kind] for kind, area in areas(drawn[name]).items()}
    half = pytest.approx(0.5, abs=0.01)
    assert shares["SHARD"] == shares["KEEP"] == shares["HYBRID"] == {"frozen": half, "trainable": half}
    assert shares["REPLICATE"]["trainable"] == half
    assert shares["REPLICATE"]["frozen"] > 0.9, "all but the root, which FSDP must shard"
    assert hatched(drawn["KEEP"]) > hatched(drawn["SHARD"]) and not hatched(drawn["DDP"])
    for one, other in combinations(drawn, 2):
        if {one, other} != {"REPLICATE", "AUTO"}:  # AUTO may replicate all
            assert drawn[one] != drawn[other]
    assert {"R", "R∇"} & set(words(drawn["AUTO"])) and "AUTO chose: S shard, K keep, R replicate" in words(
        drawn["AUTO"]
    )
    assert "× 4 groups of 2 ranks, all alike" in words(drawn["HYBRID"])
    lanes = [word for word in words(drawn["HYBRID"]) if word.startswith("rank ")]
    assert lanes == ["rank 0", "rank 1"], "one replica group"


def test_of_many_ranks_three_are_drawn_and_nothing_is_too_small_to_see(many_layers):
    svg = rank_picture(many_layers)
    assert [word for word in words(svg) if word.startswith("rank ")] == ["rank 0", "rank 1", "rank 63"]
    assert "63/64 on other ranks: gathered, used, freed" in words(svg)
    html = plan_pictures(many_layers, None)
    for drawn in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        stripes = filled(drawn, "frozen") + filled(drawn, "trainable")
        assert stripes and all(box[2] >= MIN_BOX and box[3] >= MIN_STRIPE for box in stripes)
        assert all(float(place["width"]) >= MIN_BOX for _, place in places(drawn))
        right = max(box[0] + box[2] for box in stripes)
        assert right <= float(ElementTree.fromstring(drawn).get("width"))


def opening(html):
    """The attributes of the check boxes that lie over the boxes of patterns."""
    boxes = re.findall(r'<input (type="checkbox"[^>]*)>', html)
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', attributes)) for attributes in boxes]


def test_a_box_of_several_units_opens_to_each_of_them(many_layers):
    html = plan_pictures(many_layers, None)
    names = " ".join(words(rank_picture(many_layers)))
    assert re.search(r"1[45] × ", names) and NO_EXAMPLE in html
    lanes, opened = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    merged = dict(places(lanes))
    controls = opening(html)
    several = [box for box in unit_boxes(many_layers) if len(box.units) > 1]
    assert len(controls) == len(several) == 2, "both boxes of the pattern"
    for control in controls:
        name, *classes = control["class"].split()
        position = dict(re.findall(r"([\w-]+):([\d.]+)px", control["style"]))
        assert {edge: position[edge] for edge in ("width", "height")} == {
            edge: merged[name][edge] for edge in ("width", "height")
        }
        assert (position["left"], float(position["top"])) == (merged[name]["x"], float(merged[name]["y"]))
        assert control["type"] == "checkbox" and "each unit by itself" in control["aria-label"]
        assert f".mm-plan:has(.{classes[1]}:checked) .mm-opened0{{display:block}}" in html.replace(
            classes[1][-1] + "{", "0{"
        )
        assert f'<g class="{name}"><title>' in lanes, "the control takes the focus, not what lies beneath"
    units = [unit for box in several for unit in box.units]
    boxes_of_controls = [control["class"].split()[0] for control in controls]
    assert sorted(units_of(opened)) == sorted(boxes_of_controls * 14)
    assert len(units_of(opened)) == len(units) and all(f"{unit.name}: " in opened for unit in units)
    assert f"{HINT} {OPENS}" in html
    assert width_of(f"{HINT} {OPENS}", 12) < PICTURE_WIDTH, "a second line would cover the title below it"


def test_a_plan_without_patterns_has_nothing_to_open(plans):
    html = plan_pictures(plans["SHARD"], None)
    assert not opening(html) and "mm-opened" not in html and OPENS not in html


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2", "DDP"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_timeline_has_the_peak_and_the_traffic_that_the_estimate_has(backend, micro_steps):
    plan = make_plan(tiny_flamingo(), FSDPParams(backend=backend), world_size=2, example=tiny_batch().inputs())
    train = TrainParams(accumulation=micro_steps, device="cpu")
    timeline, cost = step_timeline(plan, train), estimate(plan, train)
    assert timeline.most == cost.memory_bytes
    assert max(timeline.constant + m.without_activations + m.activations for m in timeline.moments) == cost.peak_bytes
    sent = sum(collective.wire_bytes for collective in timeline.collectives)
    control = sum(item.wire_bytes for item in cost.wire if item.phase == "control")
    assert abs(sent - (cost.wire_bytes - control)) <= len(timeline.collectives), "bytes are rounded for each unit"
    assert timeline.frozen + timeline.trainable == sum(unit.bytes_at_rest for unit in plan.units)


def test_plans_of_one_model_have_the_same_events_so_one_scale_holds_both(plans):
    timelines = {name: step_timeline(plan, TRAIN) for name, plan in plans.items()}
    events = {timeline.events for timeline in timelines.values()}
    assert len(events) == 1
    svg = step_picture(plans["REPLICATE"], timelines["REPLICATE"], pinned=timelines["SHARD"])
    (line,) = [element for element in elements(svg, "path") if element.get("class") == "mm-pinned"]
    assert line.get("stroke-dasharray")
    assert "- - pinned plan" in words(svg) and {"forward", "backward"} <= set(words(svg))
    alone = step_picture(plans["REPLICATE"], timelines["REPLICATE"])
    assert "mm-pinned" not in alone and "activations" not in words(alone)
    assert "activations" in words(step_picture(plans["SHARD"], timelines["SHARD"], activations=True))


def test_a_tick_for_each_collective_as_high_as_its_bytes(plans):
    timeline = step_timeline(plans["SHARD"], TRAIN)
    svg = step_picture(plans["SHARD"], timeline)
    groups = [group for group in elements(svg, "g") if group.get("stroke-width") == "3"]
    ticks = [tick for group in groups for tick in group]
    places = set()
    for collective in timeline.collectives:
        event = timeline.event_of(collective)
        places.add((event, collective.kind))
        name = plans["SHARD"].units[collective.unit].name
        assert any(name in e[0].text for e in ticks)
    assert len(ticks) == len(places), "those that begin at one event share a tick"
    assert max(float(tick.get("d").partition("v-")[2]) for tick in ticks) == SENT_HEIGHT


def spans_of(html, look):
    """When each path of a layer of the play head is seen, and whether it is seen where it stands, by x and width."""
    layer = re.search(rf'<g class="mm-{look}" visibility="hidden" .*?</g>', html)
    if not layer:
        return {}
    group = ElementTree.fromstring(layer[0])
    found = {}
    for path in group:
        x = float(re.match(r"M([\d.]+) ", path.get("d"))[1])
        width = float(path.get("stroke-width", group.get("stroke-width")))
        ends = [[int(stop) for stop in span.split("-")] for span in path.get("data-at").split()]
        found[x, width] = [(stops[0], stops[-1]) for stops in ends], path.get("visibility") == "visible"
    return found


def seen_at(spans, event):
    return any(first <= event <= last for first, last in spans)


def units_with_paths(html, plan, look):
    """When each unit of a plan whose boxes are not merged is seen in a layer, by its order."""
    lanes, found = Lanes(plan, 760), {}
    for (x, width), (spans, _) in spans_of(html, look).items():
        for box, (left, box_width) in zip(lanes.boxes, lanes.places, strict=True):
            if left - 0.1 <= x - width / 2 and x + width / 2 <= left + box_width + 0.1:
                (unit,) = box.units
                found[unit.order] = spans
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_play_head_shows_what_is_gathered_and_where_gradients_are(plans, way, accumulation):
    plan, train = plans[way], TRAIN.change(accumulation=accumulation)
    timeline = step_timeline(plan, train)
    html = plan_pictures(plan, timeline)
    gathered, own = (units_with_paths(html, plan, look) for look in ("gathered", "own"))
    largest = defaultdict(int)
    for moment in timeline.moments:
        largest[moment.event] = max(largest[moment.event], moment.gathered)
    for event in range(timeline.events):
        shown = sum(plan.units[order].unsharded_bytes for order, spans in gathered.items() if seen_at(spans, event))
        assert shown >= largest[event], "in flight, a unit is no parameter yet"
        assert bool(shown) or not largest[event]
    reduced = {collective.unit for collective in timeline.collectives if collective.kind != "all-gather"}
    owned = {order for order in reduced if plan.units[order].sharded}
    assert owned == own.keys() and all(seen_at(spans, timeline.events - 1) for spans in own.values())
    assert not any(seen_at(spans, 0) for spans in own.values())
    if way == "DDP":
        assert not gathered and not own and len(spans_of(html, "whole")) == len(reduced)
    head = PlayHead(plan, timeline, Lanes(plan, 760))
    for order in reduced:
        said = [
            stop for stop, happens in enumerate(head.happens) if order in (*happens.get("o", ()), *happens.get("a", ()))
        ]
        words = "to their owners" if plan.units[order].sharded else "with all ranks"
        assert said and all(words in head.sentence(stop) for stop in said)
    frozen = next(unit for unit in plan.units if unit.kind is UnitKind.FROZEN and not unit.grad_flow)
    sentences = [head.sentence(stop) for stop in range(len(head.happens))]
    assert any(f"skips the backward of {frozen.name}," in sentence for sentence in sentences)
    assert not any(re.search(rf"(begins|ends) the backward of {re.escape(frozen.name)}\b", s) for s in sentences)


def test_where_no_script_runs_the_head_stands_where_most_is_held(plans):
    plan, timeline = plans["SHARD"], step_timeline(plans["SHARD"], TRAIN)
    html = plan_pictures(plan, timeline)
    fullest = max(timeline.moments, key=lambda moment: moment.without_activations).event
    for look in ("gathered", "whole", "own"):
        for spans, is_seen in spans_of(html, look).values():
            assert is_seen == seen_at(spans, fullest)
    _, _, most, *_ = plan_figures(plan, estimate(plan, TRAIN))
    assert f"holds {size(most.nbytes)}." in re.search(r'class="mm-now">(.*?)</p>', html)[1]
    first, second = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    for control in re.findall(r'<(?:input type="range"|button).*?>', html, flags=re.S):
        assert " hidden" in control, "it would do nothing"
    assert 'class="mm-head-line"' in second and "data-at" in first
    without = plan_pictures(plan, None)
    assert "mm-now" not in without and "data-at" not in without and "between steps" in without


def test_both_pictures_point_at_the_same_unit(plans):
    html = plan_pictures(plans["SHARD"], step_timeline(plans["SHARD"], TRAIN))
    first, second = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    for name in set(re.findall(r'class="(mm-b\d+)"', first)):
        assert re.search(rf'class="[^"]*\b{name}\b', second), "every unit runs in the step"
        assert f":has(.{name}:is(:hover,:focus-visible))" in html
        assert f'<span class="{name}">' in html


def test_a_plan_of_hundreds_of_units_and_several_micro_steps_is_small():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(120)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index % 3 == 1)
    plan = make_plan(model, EACH_LAYER, world_size=64, example={"input": torch.ones(2, 8)})
    timeline = step_timeline(plan, TrainParams(accumulation=3))
    assert timeline.events > 1000
    html = plan_pictures(plan, timeline, pinned=timeline)
    head = re.findall(r'<input type="range".*?>|<g class="mm-(?:gathered|whole|own|head).*?</g>', html, flags=re.S)
    head_bytes = len("".join(head).encode())
    assert len(html.encode()) - head_bytes < 100_000
    assert len(head) == 5 and head_bytes < 20_000 - len(play_head_script())
    most = max(timeline.moments, key=lambda moment: moment.without_activations)
    assert most.event > 0
    opened = re.findall(r'<div class="mm-opened .*?</svg>', html, flags=re.S)
    several = [box for box in unit_boxes(plan) if len(box.units) > 1]
    drawn = sum(len(units_of(picture[picture.index("<svg") :])) for picture in opened)
    assert drawn == sum(len(box.units) for box in several) > 120
    assert len(opening(html)) == len(several)


def test_a_plan_by_auto_that_changes_from_layer_to_layer_is_small():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(70)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index % 10 == 9)
    example = {"input": torch.ones(2, 64)}
    shard, keep, whole = [
        make_plan(model, each_layer(policy), world_size=64, example=example)
        for policy in ("SHARD", "KEEP", "REPLICATE")
    ]
    by_name = [{unit.name: unit for unit in plan.units} for plan in (keep, whole)]
    units = []
    for index, unit in enumerate(shard.units):  # no pattern repeats
        others = by_name[index % 2]
        units.append(others.get(unit.name, unit) if index * index % 11 < 5 else unit)
    plan = replace(shard, fsdp=each_layer("AUTO"), units=tuple(units))
    timeline = step_timeline(shard, TRAIN)
    assert len(unit_boxes(plan)) > 40
    assert len(plan_pictures(plan, timeline, pinned=timeline, activations=True, width=980).encode()) < 100_000


def test_the_pictures_of_a_plan_with_most_boxes_are_small():
    params = load("tiny_llava").change(**{"fsdp.backend": "FSDP1", "launch.ranks": 8})
    plan, _ = preview(params)
    timeline = timeline_of(params, plan)
    assert len(unit_boxes(plan)) > 50, "each adapter is a unit"
    assert len(plan_pictures(plan, timeline, pinned=timeline, activations=True, width=820).encode()) < 100_000


def test_names_are_escaped_in_both_pictures_and_beneath():
    model = nn.Sequential()
    for index in range(3):
        model.add_module(f"{HOSTILE}{index}".replace(".", ""), nn.Sequential(nn.Linear(8, 8)))
        model[index].requires_grad_(index == 1)
    plan = make_plan(model, EACH_LAYER, world_size=2, example={"input": torch.ones(2, 8)})
    html = plan_pictures(plan, step_timeline(plan, TRAIN))
    assert "<script" not in html and "&lt;script&gt;" in html
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        ElementTree.fromstring(svg)


def test_text_is_at_least_12_pixels_high(plans):
    for svg in (rank_picture(plans["AUTO"]), step_picture(plans["SHARD"], step_timeline(plans["SHARD"], TRAIN))):
        assert {float(element.get("font-size")) for element in elements(svg, "text")} == {12}


def luminance(color):
    channels = []
    for start in (1, 3, 5):
        value = int(color[start : start + 2], 16) / 255
        channels.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors, page", [(style.LIGHT, "#FFFFFF"), (style.DARK, "#212121"), (style.DARK, "#111111")])
def test_colors_are_seen_on_the_page_of_their_theme(colors, page):
    for name, color in colors.items():
        assert contrast(color, page) >= (4.5 if name in ("more", "less") else 3), name
    assert len({*colors.values()}) == len(colors), "a color means one thing"
    assert colors.keys() == style.LIGHT.keys()


def test_figures_tell_their_change_since_the_pinned_plan(plans):
    costs = {name: estimate(plan, TRAIN) for name, plan in plans.items()}
    pinned = plans["SHARD"], costs["SHARD"]
    figures = plan_figures(plans["REPLICATE"], costs["REPLICATE"], pinned=pinned)
    sent, at_rest, most, peak = figures
    assert sent.change.startswith("−") and at_rest.change.startswith("+")
    assert (sent.pinned, most.pinned, peak.pinned) == (
        costs["SHARD"].wire_bytes,
        costs["SHARD"].memory_bytes,
        costs["SHARD"].peak_bytes,
    )
    assert [figure.change for figure in plan_figures(*pinned, pinned=pinned)] == ["same"] * 4
    assert not any(figure.change for figure in plan_figures(*pinned))
    changes = [Figure(nbytes, "", 1000).change for nbytes in (1540, 9_990, 64_300, 1004, 996, 1006, 10)]
    assert (
        changes == ["+54 %", "+899 %", "× 64", "same", "same", "+0.6 %", "−99 %"]
        and Figure(1, "", 0).change == "from 0 B"
    )
    batch = replace(costs["SHARD"].peak, activations=0)
    of_data = {name: replace(cost, batch="the first batch", batch_peak=batch) for name, cost in costs.items()}
    *_, peak, first = plan_figures(plans["REPLICATE"], of_data["REPLICATE"], pinned=(pinned[0], of_data["SHARD"]))
    assert first == Figure(batch.bytes, "peak memory of the first batch", batch.bytes) and first.change == "same"
    *_, peak, ran = plan_figures(plans["SHARD"], of_data["SHARD"], ran=(2**20, 2**21))
    assert "largest batch that ran; measured 2 MiB" in ran.label and "maximum length" in peak.label
    assert "&lt;" in figures_html([Figure(1, "<b>")])


@pytest.mark.parametrize("ddp", [{"sharding_strategy": "NO_SHARD"}, {"enable_fsdp": False}, {"backend": "DDP"}])
def test_a_report_names_the_backend_that_runs(ddp):
    params = FSDPParams(**ddp)
    plan = make_plan(tiny_flamingo(), params, world_size=2)
    html = facts({"fsdp": params.to_dict()}, {"plan": plan.to_dict()}, None, [])
    assert "<dd>DDP, computed in fp32</dd>" in html
