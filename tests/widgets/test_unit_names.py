"""The names of units in pictures: parts of the model and patterns are told apart, whatever is around them."""

from itertools import pairwise
from xml.etree import ElementTree

import torch
from torch import nn

from mmfsdp.kit.widgets.markup import width_of
from mmfsdp.kit.widgets.pictures.labels import FONT, LABEL_GAP, WIDER, Label, placed
from mmfsdp.kit.widgets.pictures.plan_pictures import plan_pictures
from mmfsdp.kit.widgets.pictures.rank_picture import Lanes, rank_picture
from mmfsdp.kit.widgets.pictures.unit_boxes import unit_boxes
from mmfsdp.kit.widgets.pictures.unit_names import part_names, unit_names
from mmfsdp.params import FSDPParams
from mmfsdp.planning import make_plan

EACH_LAYER = FSDPParams(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=64)


class Chain(nn.Module):
    """Modules that run in the order in which they are named to it, wherever they are."""

    def __init__(self, order, **modules):
        super().__init__()
        self.order = order
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, input):
        for name in self.order:
            input = self.get_submodule(name)(input)
        return input


def layers(number=30):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(number)))


def boxes_of(model):
    model.requires_grad_(True)
    return unit_boxes(make_plan(model, EACH_LAYER, world_size=2, example={"input": torch.ones(2, 8)}))


def different(names):
    """The names without repetitions side by side."""
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def in_transformers_layout():
    text = Chain([], embed_tokens=nn.Linear(8, 8), layers=layers())
    picture = Chain(["encoder.layers"], encoder=Chain([], layers=layers()))
    inner = Chain(["language_model.embed_tokens", "vision_tower", "projector", "language_model.layers"])
    inner.add_module("language_model", text)
    inner.add_module("vision_tower", picture)
    inner.add_module("projector", nn.Linear(8, 8))
    return Chain(["model", "lm_head"], model=inner, lm_head=nn.Linear(8, 8))


def test_parts_of_a_transformers_model_are_told_apart():
    boxes = boxes_of(in_transformers_layout())
    assert different(part_names(boxes)) == ["embed tokens", "vision tower", "projector", "language model", "lm head"]
    several = [name for name, box in zip(unit_names(boxes), boxes, strict=True) if len(box.units) > 1]
    assert set(several) == {"encoder.layers", "language_model.layers"}


def texts(svg, y):
    """(words, left edge, right edge) of the texts of a picture at this height."""
    found = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if abs(float(element.get("y")) - y) < 0.1:
            width = width_of(element.text, FONT)
            left = float(element.get("x")) - {"start": 0.0, "middle": width / 2}[element.get("text-anchor", "start")]
            found.append((element.text, left, left + width))
    return found


def test_the_names_of_narrow_parts_stand_beside_them_with_a_line_to_each():
    order = ["embed_tokens", "resampler", "projector", "layers"]
    model = Chain(order, layers=layers(), **{name: nn.Linear(8, 8) for name in order[:-1]})
    lanes = Lanes(make_plan(model, EACH_LAYER, world_size=8, example={"input": torch.ones(2, 8)}), 430)
    svg = rank_picture(lanes.plan, lanes=lanes)
    parts, patterns = texts(svg, FONT), texts(svg, lanes.bottom + 13)
    assert [words for words, *_ in parts] == ["embed tokens", "resampler", "projector", "layers"]
    assert [words for words, *_ in patterns] == [f"{max(len(box.units) for box in lanes.boxes)} × layers"]
    for (_, start, end), (_, width) in zip(parts[:-1], lanes.places, strict=False):
        assert end - start > width, "the part is narrower than its name"
    assert [label.words[0] for label, _, left in lanes.part_names if label.is_beside(left)] == [
        "resampler",
        "projector",
    ]
    assert svg.count('stroke-width=".7"') == 2
    assert all(end < start for (_, _, end), (_, start, _) in pairwise(parts)), "names overlap"
    assert parts[0][1] >= 0 and parts[-1][2] <= lanes.width


def test_of_names_without_room_the_smallest_is_shortened_then_left_out():
    named = [Label(("a long name", "short"), start=x, end=x + 3, anchor=0.0, weight=x) for x in (0, 3, 6)]
    longest, shortest = WIDER * width_of("a long name", FONT), WIDER * width_of("short", FONT)
    assert [words for _, words, _ in placed(named, 3 * longest + 2 * LABEL_GAP)] == ["a long name"] * 3
    assert [words for _, words, _ in placed(named, 3 * longest)] == ["short", "a long name", "a long name"]
    assert [words for _, words, _ in placed(named, shortest)] == ["short"] and placed(named, 1) == []


def test_containers_around_a_whole_model_change_no_name():
    model = in_transformers_layout()
    wrapped = Chain(["base.inner"], base=Chain([], inner=model))
    for names in (part_names, unit_names):
        assert names(boxes_of(wrapped)) == names(boxes_of(model))


def test_parts_of_ones_own_model_are_its_modules():
    model = Chain(
        ["sees", "tells", "head"], sees=layers(), tells=Chain(["stack"], stack=layers()), head=nn.Linear(8, 8)
    )
    boxes = boxes_of(model)
    assert different(part_names(boxes)) == ["sees", "tells", "head"]
    assert different(unit_names(boxes)) == ["sees", "stack", "head"]
    html = plan_pictures(make_plan(model, EACH_LAYER, world_size=2), None)
    assert "30 × sees" in html and "30 × stack" in html


def test_an_encoder_of_each_kind_of_media_is_a_part():
    encoders = Chain([], vision=layers(), audio=layers())
    order = ["encoders.vision", "encoders.audio", "language_model"]
    boxes = boxes_of(Chain(order, encoders=encoders, language_model=layers()))
    assert different(part_names(boxes)) == ["vision encoder", "audio encoder", "language model"]
