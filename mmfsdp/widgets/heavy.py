"""torch and friends are imported by one thread at a time: transformers' lazy modules break when two do it at once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..params import RunParams

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..plan import Moment, WrapPlan

alone = threading.RLock()
"""Held while something heavy is imported, or built for the first time."""
_counting = threading.Lock()
_moments: OrderedDict[Hashable, tuple[Moment, ...]] = OrderedDict()
KEPT = 32
"""Plans whose moments are kept: they take a hundred times as long as all else."""


def plan_of(params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a run and its cost, from any thread. Raises ValueError for what cannot be planned."""
    return list(planned(params))[-1]


def planned(params: RunParams) -> Iterator[tuple[WrapPlan, Estimate]]:
    """The plan of a run and its cost, from any thread: where activations are not known yet, first without, then with.

    Raises ValueError for what cannot be planned.
    """
    with alone:
        from ..plan import make_plan, with_moments
        from ..plan.activity import recorded_alike
        from ..preview import cost_of, example_of

        key = json.dumps(params.to_dict()["model"])
        model = _model(key)
        plan = make_plan(model, params.fsdp, world_size=params.launch.ranks)
    quick = plan, cost_of(plan, params)
    if any(f.level == "error" for f in plan.lint):
        yield quick
        return
    alike = (key, params.train.batch_size, params.data.max_length, recorded_alike(plan))
    if alike not in _moments:
        yield quick
        with _counting:
            _moments[alike] = with_moments(model, plan, example_of(model, params)).moments
            if len(_moments) > KEPT:
                _moments.popitem(last=False)
    plan = replace(plan, moments=_moments[alike])
    yield plan, cost_of(plan, params)


@lru_cache(maxsize=2)
def _model(model: str) -> Any:
    """The frozen model of ModelParams as JSON, without weights; the newest are kept, since other choices change more
    often."""
    from ..preview import frozen_model

    return frozen_model(RunParams.from_dict({"model": json.loads(model)}).model)
