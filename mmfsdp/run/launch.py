"""launch: prepare a run, and start it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..params import RunParams
from .handle import Run
from .record import TRAIN, check_entry
from .start import Prepared, prepared, start, warn

if TYPE_CHECKING:
    from ..core.plan import Finding


def launch(params: RunParams | Prepared, *, entry: str = TRAIN, tell: Callable[[Finding], object] = warn) -> Run:
    """Check and plan a run, start it, and return. Its ranks outlive the caller: interrupt, restart and death.

    params: those of the run, or what `train.prepare` made of them. `entry` ("module:function", see record.py) is called
    with the run folder on every rank, the variables of torch.distributed set; another than the training is not planned.
    `tell` gets each finding of the plan, by default as a warning of Python. Raises ParamError if the run's name is
    taken, for data that cannot be read, and for what cannot be planned.
    """
    entry = check_entry(entry)
    params, plan = prepared(params, entry, tell)
    return Run(start(params, entry, plan))
