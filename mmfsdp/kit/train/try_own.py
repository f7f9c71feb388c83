"""Try a person's own code of one field, and say in words what is there: for the form, before anything is launched."""

from __future__ import annotations

from typing import Any

from ...core.optimizer_states import FIELD as OPTIMIZER
from ...core.optimizer_states import optimizer_states
from ...own.calls import check_call
from ...params import RunParams
from ...params.own import own_fields, path_of
from ..data.corrupt import shorten
from ..data.sources.stream import GivenRow, Source
from ..run.launchers.registry import FIELD as LAUNCHER
from ..run.launchers.registry import launcher_for
from .learning_rates import SCHEDULE, try_schedule
from .metrics import METRICS
from .own_callbacks import FIELD as CALLBACKS
from .own_callbacks import check_callbacks
from .prepare import kept_model, opened

MAX_WORDS = 300
"""Letters of a first row that are shown."""


def try_own(params: RunParams, name: str) -> list[str]:
    """Import the own code that a field names, call it as `prepare` does, and return lines about it.

    Raises OwnCodeError with the person's own lines, and ParamError for what cannot be used.
    """
    if name == CALLBACKS:
        return check_callbacks(params)
    if name == "data.reader":
        return _try_reader(params)
    if name == "model.build":
        model, _ = kept_model(params)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        return [f"{type(model).__name__}: {total:,} parameters, {trainable:,} of them trainable"]
    if name == OPTIMIZER:
        states = optimizer_states(params.train.optimizer)
        return [f"{path_of(params.train.optimizer)}: its states have {states:.3g} times the bytes of what trains"]
    if name == LAUNCHER:
        used = ", ".join(f"launch.{field}" for field in launcher_for(params).fields)
        return [f"{path_of(params.launch.executor)} is a launcher; it uses {used or 'no further field of launch'}"]
    if name == SCHEDULE:
        factors = ", ".join(f"{factor:.3g}" for factor in try_schedule(params.train))
        return [f"{path_of(params.train.schedule)}: factors {factors} at the begin, in the middle and in the last step"]
    lines = []
    for field, value in own_fields(params):
        if field == name == METRICS:
            check_call(field, value, [], [])
            lines.append(f"{path_of(value)} is there; it is tried on a held-out sample at the launch")
    return lines


def _try_reader(params: RunParams) -> list[str]:
    """Return how many rows there are, what the first one is, and what a person should know."""
    splits = opened(params.change(**{"data.more": []}))["data"]
    train, heldout = splits["train"], splits["heldout"]
    path = path_of(params.data.reader) if params.data.reader else ""
    rows = f"{_count(train)} rows to train on, {_count(heldout)} held out"
    return [f"{path}: {rows}; first: {in_words(next(iter(train)))}", *train.notes, *train.picture_notes]


def _count(source: Source) -> str:
    return "any number of" if source.length is None else f"{source.length:,}"


def in_words(row: Any) -> str:
    """Return a row in a line: its texts, and the sizes of its pictures."""
    if isinstance(row, GivenRow):
        return repr(row.row)[:MAX_WORDS]
    said = " ".join(f"{message.role}: {message.text}" for message in row.messages)
    sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in row.images)
    pictures = f"; pictures of {sizes} pixels" if sizes else "; no picture"
    return " ".join(said.split())[:MAX_WORDS] + shorten(pictures)
