"""Hand the launcher's plan on to the ranks, in plan.json: to plan again takes each of them seconds of CPU time.

Ranks take it only if it was made for what they have: the same model, parameters, number of ranks and versions. And only
if it carries a seal that this user's key makes: a run folder may come from somebody else, and a plan decides what is
sharded and gathered. Otherwise they plan as if there were none, and name the reason.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import mmfsdp

from ...core.collectives import gather_json
from ...core.fake_tensors import tensors_of
from ...core.names import model_digest
from ...core.plan import WrapPlan
from ...params import RunParams
from ..models.kinds import kind_of
from ..run.files.folder import read_json
from ..run.files.plan_file import PLAN_FILE, plans_by_begin
from ..run.trust import seal_of

MADE_FOR, SEAL = "made_for", "seal"
NO_PLAN = "there is no plan of a launcher"
DECIDING = ("model", "data", "train", "fsdp")
"""Sections of RunParams that a plan depends on; of `launch` it takes the number of ranks, and the nodes' sizes."""


READABLE = ("ranks, ranks of a node and GPUs", "versions")
"""Names of what a plan was made for that have no digest."""


class BatchPeak(NamedTuple):
    """The peak that was predicted for a batch of a run's own data."""

    shapes: list[str]
    """Shapes of the batch's tensors, by `shapes_of`: a batch of the same shapes has the same peak."""
    bytes: int
    when: str


class RunPlan(NamedTuple):
    """The plan that ranks run by, and what was predicted with it."""

    plan: WrapPlan
    wire_bytes: int
    """Sent by a rank in an optimizer step, as predicted."""
    rates: str
    """The learning rates by part in a line; empty if all are `train.lr`."""
    batch_peak: BatchPeak | None = None
    """None if the launcher did not look at the data; or for a model that reads values, whose peak depends on them."""


def sealed(values: Mapping[str, Any], params: RunParams, digest: str) -> dict[str, Any]:
    """Return what plan.json holds, from a plan's values, with the versions, what it was made for, and the seal.

    digest: of the model, by `model_digest`.
    """
    values = {**values, "versions": versions(), MADE_FOR: made_for(params, digest)}
    values = json.loads(json.dumps(values))  # as it is read back
    return {**values, SEAL: seal_of(values)}


def made_for(params: RunParams, digest: str) -> dict[str, Any]:
    """Return what a plan depends on; `params` of a launcher and of its ranks give the same."""
    sections = {name: value for name, value in params.to_dict().items() if name in DECIDING}
    launch = params.launch
    return {
        "parameters": sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest(),
        "modules and tensors": digest,
        "ranks, ranks of a node and GPUs": [launch.world_size, launch.ranks_per_node, launch.gpu_count],
        "versions": {**versions(), "mmfsdp": mmfsdp.__version__},
    }


def take_plan(folder: Path, params: RunParams, model: nn.Module, *, begin: int = 0) -> RunPlan | str:
    """Return the plan that the launcher has made for this model, or why ranks plan again. Every rank must call it.

    All ranks take the plan, or none: they might otherwise issue different collectives.

    Args:
        folder: The run folder, with plan.json.
        params: The parameters of the run, with the `model.freeze` of this phase.
        model: The model as this rank has built it, frozen and not yet wrapped.
        begin: The steps that are done when this phase of the run begins.
    """
    plans = plans_by_begin(read_json(folder / PLAN_FILE) or {})
    handed = _read_plan(plans.get(begin, {}), params, model)
    reasons = [reason for reason in gather_json(handed if isinstance(handed, str) else "") if reason]
    return reasons[0] if reasons else handed


def _read_plan(values: dict[str, Any], params: RunParams, model: nn.Module) -> RunPlan | str:
    if MADE_FOR not in values:
        return NO_PLAN
    kind = kind_of(params.model)
    if kind.example_of_data:
        return f"a model of kind {params.model.kind} is planned with the data that each rank reads"
    seal = values.pop(SEAL, None)
    if not seal or seal != seal_of(values):
        return "plan.json is not as your key has sealed it"
    expected = json.loads(json.dumps(made_for(params, model_digest(model))))
    for what, value in expected.items():
        before = values[MADE_FOR].get(what)
        if before != value:
            differs = f": {before}, now {value}" if what in READABLE else ""
            return f"{what} of the launcher's plan differ{differs}"
    try:
        plan = WrapPlan.from_dict(values["plan"])
        if not plan.memory_events:
            return "the launcher had no example of the inputs, and did not predict the memory of a step"
        cost, batch_peak = values["estimate"], None
        if cost["batch_peak"] and not kind.planned_with_example:
            batch_peak = BatchPeak(cost["batch_shapes"], cost["batch_peak_bytes"], cost["batch_peak"]["when"])
        return RunPlan(plan, cost["wire_bytes"], values["learning_rates"], batch_peak)
    except (ValueError, KeyError) as error:  # of another state of this package
        return f"plan.json cannot be read: {error}"


def shapes_of(inputs: Mapping[str, Any]) -> list[str]:
    """Return the shape and dtype of each tensor in the keyword arguments of a forward."""
    shapes = []
    for name, value in inputs.items():
        shapes += [f"{name} {list(tensor.shape)} {tensor.dtype}" for tensor in tensors_of(value)]
    return shapes


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a step's bytes and figures depend on, by name."""
    numbers = {name: version(name) for name in ("torch", "transformers", "open_clip_torch")}
    return numbers | {"Python": platform.python_version()}
