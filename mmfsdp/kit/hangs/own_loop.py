"""Name a hang of a loop of one's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.model_record import plan_of
from ...core.plan import WrapPlan
from ...params import TrainParams
from .order import StepOrder, step_order
from .rank_server import SOCKETS_VARIABLE, note_groups, serve_here

if TYPE_CHECKING:
    from torch import nn

PLAN = "plan.json"
"""File beside the sockets: the plan of the model that the ranks have wrapped."""


def name_hang(model: nn.Module | None = None) -> bool:
    """Let a hang of this loop be named, if `mmfsdp` or a `%%ranks` cell has started it. Every rank calls it.

    Call it after the model is wrapped.

    Args:
        model: Wrapped by `wrap_fsdp`: then the message names units. Without it, the kind and number of a collective.

    Returns:
        True if a hang of this process will be named.
    """
    served = serve_here()
    note_groups()
    plan = None if model is None else plan_of(model)
    if served and plan is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        temporary = Path(os.environ[SOCKETS_VARIABLE]) / f".{PLAN}"
        temporary.write_text(plan.to_json(), encoding="utf-8")
        temporary.rename(temporary.with_name(PLAN))
    return served


def order_in(file: Path) -> StepOrder | None:
    """Return the collectives of a step of a loop of one's own, by its model's plan in a file; None without one."""
    try:
        plan = WrapPlan.from_dict(json.loads(file.read_text(encoding="utf-8")))
        return step_order(plan, TrainParams())
    except (OSError, ValueError, KeyError, TypeError):
        return None
