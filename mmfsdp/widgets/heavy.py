"""torch and friends are imported by one thread at a time: transformers' lazy modules break when two do it at once."""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..params import RunParams

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..plan import WrapPlan

alone = threading.RLock()
"""Held while something heavy is imported, or built for the first time."""


def plan_of(params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a run and its cost, from any thread. Raises ValueError for what cannot be planned."""
    with alone:
        from ..preview import plan_for

        return plan_for(_model(json.dumps(params.to_dict()["model"])), params)


@lru_cache(maxsize=2)
def _model(model: str) -> Any:
    """The frozen model of ModelParams as JSON, without weights; the newest are kept, since other choices change more
    often."""
    from ..preview import frozen_model

    return frozen_model(RunParams.from_dict({"model": json.loads(model)}).model)
