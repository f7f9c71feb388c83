"""run(folder): what every rank of a training run does, from params.yaml to result.json."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn

from ... import checkpoint
from ...checkpoint.steps import checkpoint_step
from ...core.collectives import from_rank_0
from ...core.names import model_digest
from ...core.plan import WrapPlan
from ...core.weights import quantize_weights
from ...core.wrap import apply_plan
from ...params import ParamError, RunParams
from ...params.phases import next_phase
from ...planning import plan_on_rank_0
from ..data.loader import Batches
from ..data.open_sources import Splits, open_for
from ..data.own_random import seed_all
from ..data.processor import SampleProcessor
from ..hangs.rank_server import note_groups
from ..models.build import build_model, freeze_model, open_model
from ..models.generated import needs_backbones
from ..models.kinds import kind_of
from ..models.weight_files import Weights
from ..run.files.folder import read_json, write_json
from ..run.files.plan_file import PLAN_FILE, plan_file_of, plans_by_begin
from ..run.pretraining import ensure_backbones
from ..run.ranks.hang import Heartbeat
from ..run.ranks.rank_imports import bring_back
from .features import FeatureCache
from .handed_plan import NO_PLAN, RunPlan, take_plan
from .learning_rates import rates_line, spell_out_rates
from .loop import take_up, train
from .notices import notices
from .optimizer import build_optimizer, build_scaler
from .process_group import process_group
from .record_lengths import measure_lengths
from .train_state import TrainSetup

if TYPE_CHECKING:
    from .prepare import Prepared

NO_SOURCES = "its weights are random, or no safetensors files have all of them by their names"


def run(folder: Path) -> None:
    """Train as `folder`/params.yaml says, on every rank that torch.distributed's environment variables name.

    Continues from the newest complete checkpoint in the folder, if it has one. Writes a metrics line per rank and step,
    checkpoints, and on rank 0 plan.json and result.json.
    """
    transformers.utils.logging.disable_progress_bar()
    # It warns of in-place operations on a unit's output: nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    beat = Heartbeat(folder, int(os.environ["RANK"]))
    beat("starting")
    params = RunParams.from_yaml(folder / "params.yaml")
    if params.launch.ranks is None:  # by torchrun, say: `launch` writes the number
        params = params.change(**{"launch.ranks": int(os.environ["WORLD_SIZE"])})
    params.fsdp.check_machine()
    if needs_backbones(params.model):
        # Started by torchrun: a launch has pretrained them.
        ensure_backbones(params, lambda label, done: beat(f"starting: {label} {done:.0%}"))
    beat(f"joining: at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    with process_group(params) as device:
        result, data = train_phase(folder, params, device, beat)
        while result is None:
            result, data = train_phase(folder, params, device, beat, data)
        print(f"rank {dist.get_rank()}: done")
        result["world_size"] = dist.get_world_size()
        if dist.get_rank() == 0:
            write_json(folder / "result.json", result)


class OpenData(NamedTuple):
    """The data of a run, which the next phase takes over."""

    sources: Mapping[str, Splits]
    loader: Batches
    """The loader, which stands where the phase before has ended."""


def train_phase(
    folder: Path, params: RunParams, device: torch.device, beat: Heartbeat, data: OpenData | None = None
) -> tuple[dict[str, Any] | None, OpenData]:
    """Build, plan, wrap and train the model from the newest checkpoint to the end of its phase.

    Every rank must call it.

    Args:
        folder: The run folder.
        params: The parameters of the run.
        device: The device of this rank.
        beat: Called with what this rank is about to do.
        data: The open data of the phase before; None in the first one.

    Returns:
        The result, None if another phase follows, and the data.
    """
    newest = checkpoint.newest(folder / "checkpoints")
    done = checkpoint_step(newest) if newest else 0
    phase = next_phase(params, done)
    params = phase.params
    beat("building")
    if data is not None:
        gc.collect()  # the wrapped model of the phase before is part of reference cycles
    built, processor, weights = build(params)
    beat("opening the data")
    sources = data.sources if data else open_for(processor, params)
    if data is None:
        measure_lengths(params, processor, sources, device, beat)
    beat("planning")
    run_plan = plan_of_run(folder, built, params, processor, sources, begin=phase.begin)
    rated = spell_out_rates(built, params)
    features = FeatureCache.open(params, built, device, weights.read if weights else None)
    beat("wrapping")
    model, frozen = wrap(built, run_plan.plan, weights, device, beat)
    note_groups()  # there are all, those of a mesh too
    optimizer, schedule = build_optimizer(model, rated)
    setup = TrainSetup(folder, params, model, optimizer, schedule, build_scaler(model), frozen)
    training = take_up(setup, run_plan, processor, device, beat, features, sources, data.loader if data else None)
    # After taking up: what an earlier phase, or the run that this one began with, has trained comes from a checkpoint.
    before = checkpoint.frozen_checksums(model, lambda name: beat(f"taking up: {name}"))
    result = train(training)
    after = checkpoint.frozen_checksums(model, lambda name: beat(f"trained: {name}"))
    changed = checkpoint.count_changed(before, after)
    if result is not None:
        result["wire_bytes_predicted"] = run_plan.wire_bytes
        result["frozen_parameters_changed"] = changed
    return result, OpenData(sources, training.loader)


def build(params: RunParams) -> tuple[nn.Module, SampleProcessor, Weights | None]:
    """Build the frozen model on the meta device, and on rank 0 the weights from which all will start.

    Without weights (None), rank 0 holds the whole model until it is sharded, and prints why: the parts that are drawn
    at random are known only after drawing. Raises ParamError if the model has no tokenizer.
    """
    rank = dist.get_rank()
    weights: Weights | None = None
    whole, why = not params.fsdp.sync_module_states, ""
    if not whole and rank == 0:
        if not kind_of(params.model).tensors_by_name:
            whole, why = True, "a model of one's own is built with its weights"
        elif kind_of(params.model).is_built_whole(params.model):
            whole, why = True, NO_SOURCES
    if not whole:
        seed_all(params.train.seed)
        model, processor, weights = open_model(params.model, read=rank == 0)
        freeze_model(model, params.model)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        # Frozen random weights are in no checkpoint: they must come from the seed, in the order in which the model
        # draws.
        if rank == 0 and weights is None:
            whole, why = True, NO_SOURCES
        elif weights is not None and weights.new_parameters & frozen:
            whole, why = True, f"frozen parameters are random, such as {min(weights.new_parameters & frozen)}"
    if why and dist.get_world_size() > 1:
        print(f"weights: rank 0 builds the whole model, and sends it to the other ranks: {why}")
    if whole:
        weights = None
        seed_all(params.train.seed)
        model, processor = build_model(params.model)
        freeze_model(model, params.model)
    if processor is None:
        message = "has neither name nor weights to load a processor by; set its name, or that of model.language"
        raise ParamError("model", message)
    return model, processor, weights


def plan_of_run(
    folder: Path,
    built: nn.Module,
    params: RunParams,
    processor: SampleProcessor,
    sources: Mapping[str, Splits],
    *,
    begin: int = 0,
) -> RunPlan:
    """Return the launcher's plan where it was made for what the ranks have.

    Otherwise rank 0 plans as the launcher does, writes the plan and hands it on. Every rank must call it.

    Args:
        folder: The run folder.
        built: The model, frozen and not yet wrapped.
        params: The parameters of the run, with the `model.freeze` of this phase.
        processor: The processor of its samples.
        sources: What `open_sources` gives.
        begin: The steps that are done when this phase of the run begins.

    Raises:
        ParamError: For the lint's errors.
    """
    handed = take_plan(folder, params, built, begin=begin)
    if not isinstance(handed, str):
        handed.plan.check()
        if dist.get_rank() == 0:
            print_findings(handed.plan, handed.rates)
        return handed

    def plan_here() -> WrapPlan:
        bring_back("triton")  # torch's counter of FLOPs warns without it
        from .prepare import plan_for

        plan, _ = plan_for(built, params, processor, sources)
        plan.check()
        return plan

    # To plan an own model is to try its processor on the data, which each rank needs for its own batches.
    alone = kind_of(params.model).example_of_data
    plan = plan_here() if alone else plan_on_rank_0(built, plan_here)
    from .prepare import Prepared, cost_of, with_notices

    rates = rates_line(plan, spell_out_rates(built, params))
    cost = cost_of(plan, params)
    if dist.get_rank() == 0:
        if handed != NO_PLAN:
            print(f"the ranks plan again: {handed}")
        told = with_notices(plan, [each for each in notices(params, sources, processor) if each.level != "error"])
        write_plan(folder, Prepared(params, told, cost, rates, model=model_digest(built)), begin=begin)
    return RunPlan(plan, cost.wire_bytes, rates)


def print_findings(plan: WrapPlan, rates: str) -> None:
    """Print the lint's findings, and the learning rates by part if there are any."""
    for finding in plan.lint:
        print(f"{finding.level}: {finding.message}")
    if rates:
        print(rates)


def write_plan(folder: Path, made: Prepared, *, begin: int = 0) -> None:
    """Write plan.json: plan, cost and versions. Print the lint's findings, and which units the launch did not plan.

    begin: steps that are done when the phase begins; the plans of the other phases stay.
    """
    print_findings(made.plan, made.rates)
    plans = plans_by_begin(read_json(folder / PLAN_FILE) or {})
    planned = plans.get(begin, {}).get("plan")
    if planned and (units := different_units(planned, made.plan)):
        shown = ", ".join(units[:3])
        print(f"warning: {len(units)} units are not those that were planned at the launch, such as {shown}")
    write_json(folder / PLAN_FILE, plan_file_of({**plans, begin: made.to_dict()}))


def different_units(planned: dict[str, Any], plan: WrapPlan) -> list[str]:
    """Return the names of units with other parameters, or another policy, than in an earlier plan, given as its dict.

    That plan may lack what only an example tells, such as how often a unit is gathered.
    """

    def content(unit: dict[str, Any]) -> Any:
        params = [(p["name"], p["trainable"], tuple(p["shape"]), p["dtype"]) for p in unit["params"]]
        return unit["frozen_policy"], sorted(params)

    before = {unit["name"]: content(unit) for unit in planned["units"]}
    now = {unit["name"]: content(unit) for unit in plan.to_dict()["units"]}
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def wrap(
    built: nn.Module, plan: WrapPlan, weights: Weights | None, device: torch.device, beat: Callable[[str], None]
) -> tuple[nn.Module, dict[str, int]]:
    """Quantize and wrap the model of a run. Every rank must call it.

    Args:
        built: The plain model, on the meta device if `weights` is set.
        plan: Its plan.
        weights: The source of the weights, which are read while the model is wrapped, by all ranks that see the files.
        device: The device of this rank.
        beat: Called with `wrapping: NAME` before work on each tensor: all of a large model takes longer than a rank
            may be silent.

    Returns:
        The wrapped model, and by name the checksums of the whole frozen weights that were read or drawn.
    """

    def progress(name: str) -> None:
        beat(f"wrapping: {name}")

    checksums = checkpoint.frozen_checksums(built, progress)
    source = quantize_weights(built, plan.fsdp, weights, progress)
    checksums |= checkpoint.frozen_checksums(built, progress)  # of codes and scales, too
    model = apply_plan(built, plan, device=device, weights=source, progress=progress)
    if weights is not None:  # read shard by shard while wrapping
        checksums = weights.checksums
    return model, from_rank_0(checksums)
