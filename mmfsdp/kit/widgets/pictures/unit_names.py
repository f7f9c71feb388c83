"""Name units in pictures: by the part of the model that they are in, and by the shortest names that tell them apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from ....core.plan import ROOT, Unit
from .unit_boxes import Box, short_text

Path = tuple[str, ...]
"""Parts of a module's dotted name."""
ONE_OF = {"encoders": "encoder", "projectors": "projector"}
"""Modules of kit/models/multimodal.py that hold one for each kind of media: encoders.audio is the audio encoder."""


def part_names(boxes: Sequence[Box]) -> list[str]:
    """Return the part of the model that each box is in, in words: language model.

    That is the module's name below what is around all layers: `model.visual` is in the part visual, since transformers
    keeps all layers in `model`. Where a part stands at several places between others, the largest has its name, and the
    others that of the module there: embed tokens before the pictures, language model after.
    """
    around = _around_all_layers(boxes)
    names = [_part_of(box.unit, around) for box in boxes]
    runs: dict[str, list[range]] = {}  # boxes side by side that are in one part
    start = 0
    for name, group in groupby(names):
        end = start + len(list(group))
        runs.setdefault(name, []).append(range(start, end))
        start = end
    for places in runs.values():
        places.sort(key=lambda place: sum(boxes[index].numel for index in place))
        for place in places[:-1]:
            name = _shared_name([boxes[index] for index in place])
            for index in place:
                names[index] = name or names[index]
    return names


def unit_names(boxes: Sequence[Box]) -> list[str]:
    """Return the end of each box's dotted name, without numbers, as long as it takes to tell boxes apart.

    `layers` where only one list of layers has that name, else `text_model.layers` and `encoder.layers`.
    """
    paths = [_words(box.unit) for box in boxes]
    names = []
    for box, path in zip(boxes, paths, strict=True):
        length = 1
        while length < len(path) and any(other != path and other[-length:] == path[-length:] for other in paths):
            length += 1
        names.append(short_text(".".join(path[-length:]) or box.unit.name))
    return names


def pattern_name(boxes: Sequence[Box], names: Sequence[str]) -> str:
    """Return the name of a pattern: 24 × (cross_attention, decoder_layer). names: of its boxes."""
    different: list[str] = []
    counts: list[int] = []
    for name in names:
        if different and different[-1] == name:
            counts[-1] += 1
        else:
            different.append(name)
            counts.append(1)
    words = [f"{number} × {name}" if number > 1 else name for name, number in zip(different, counts, strict=True)]
    inside = ", ".join(words)
    times = len(boxes[0].units)
    if times == 1:
        return inside
    return f"{times} × ({inside})" if len(words) > 1 or counts[0] > 1 else f"{times} × {inside}"


def _paths(unit: Unit) -> list[Path]:
    """Return the parts of the dotted names of a unit's modules; none for the root."""
    return [tuple(name.split(".")) for name in unit.modules if name]


def _words(unit: Unit) -> Path:
    """Return the names that are around all modules of a unit, without numbers; of a unit of one place, all."""
    paths = _paths(unit)
    shared = _shared(paths)
    words = tuple(name for name in shared if not name.isdigit())
    if words or not paths:
        return words
    return tuple(name for name in paths[0] if not name.isdigit())


def _shared(paths: Sequence[Path]) -> Path:
    """Return what all paths begin with."""
    shared: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared)


def _around_all_layers(boxes: Sequence[Box]) -> Path:
    """Return the module around all lists of layers of a model, such as `model` of transformers; empty if none is."""
    parameters = [tuple(p.name.split(".")) for box in boxes for unit in box.units for p in unit.params]
    around: Path = ()
    while True:
        depth = len(around)
        with_layers: dict[str, bool] = {}  # by the name below `around`: whether that is a list itself
        for path in parameters:
            below = path[depth:]
            if path[:depth] == around and any(name.isdigit() for name in below[1:]):
                with_layers[below[0]] = with_layers.get(below[0], False) or below[1].isdigit()
        if len(with_layers) != 1 or True in with_layers.values():
            return around
        around += tuple(with_layers)


def _part_of(unit: Unit, around: Path) -> str:
    """Return the part that a unit is in; of one in several parts, its modules: norm, lm head."""
    if unit.name == ROOT:
        return "root"
    parts, modules = [], []
    for path in _paths(unit):
        inside = path[len(_shared([path, around])) :] or path  # a head may lie beside what is around the layers
        part = _in_words(inside[0])
        if inside[0] in ONE_OF and len(inside) > 1:
            part = f"{_in_words(inside[1])} {ONE_OF[inside[0]]}"
        parts.append(part)
        words = [name for name in path if not name.isdigit()]
        modules.append(_in_words((words or path)[-1]))
    return short_text(", ".join(dict.fromkeys(parts if len(set(parts)) == 1 else modules)))


def _shared_name(boxes: Sequence[Box]) -> str:
    """Return the name of the module around boxes, in words; empty if there is none."""
    words = [name for name in _shared([path for box in boxes for path in _paths(box.unit)]) if not name.isdigit()]
    return _in_words(words[-1]) if words else ""


def _in_words(name: str) -> str:
    return re.sub("_+", " ", name).strip() or name
