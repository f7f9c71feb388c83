"""Prepare a run before any rank starts: check where it runs, open its data once, plan the frozen model, check the plan.

`prepare` is what every launch begins with: the button, the commands, a sweep, a resume and Python's `launch`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import nn

from ...core.optimizer_states import check_shards
from ...core.plan import WrapPlan
from ...core.quantize import quantized_copy
from ...own.calls import load_own
from ...own.modules import OwnSources, own_sources
from ...params import Device, FrozenPolicy, ModelParams, ParamError, RunParams, TrainParams
from ...params.findings import Finding
from ...params.own import module_of
from ...params.phases import Phase, phases_of
from ...params.run import with_cluster
from ...params.variables import with_variables
from ...planning import make_plan
from ...predict import Estimate, estimate
from ...predict.larger_units import with_example
from ...predict.memory import Memory, step_walk
from ...predict.memory_events import with_recording
from ...predict.plan_cache import PlanCache
from ..data import open_sources
from ..data.chat import NO_SYSTEM
from ..data.open_sources import Splits, open_for
from ..data.processor import SampleProcessor
from ..models.build import build_model, freeze_model
from ..models.generated import needs_backbones
from ..models.kinds import kind_of
from ..run.files.plan_file import plan_file_of
from ..run.launchers.registry import launcher_for
from ..run.own_code import sources_of
from ..run.rank_count import with_ranks
from ..run.slurm.site import settled
from ..run.start import check_place
from .data_batch import DataBatch, look_at_data, why_slow_to_read
from .data_sizes import RECORDS, data_figures
from .features import check_cache
from .handed_plan import model_digest, sealed, shapes_of
from .learning_rates import rate_groups, rates_line, spell_out_rates, try_schedule
from .metrics import try_metrics
from .moving_average import check_average
from .notices import notices
from .own_callbacks import check_callbacks
from .start_from import check_start

_building = threading.Lock()


@dataclass(frozen=True)
class Prepared:
    """A run that may start: its parameters with the number of ranks, its plan and its cost on each rank."""

    params: RunParams
    plan: WrapPlan
    """Its findings include what a person should know of the data and the processor."""
    cost: Estimate
    rates: str = ""
    """The learning rates by part in a line; empty if all are `train.lr`."""
    code: OwnSources = OwnSources()
    """The person's own code that was imported for this, and what it imports."""
    model: str = ""
    """The digest of the model that was planned."""
    later: Mapping[int, Prepared] = field(default_factory=dict)
    """With `train.freeze_from`: the later phases, by the steps that are done when each begins."""

    def to_dict(self) -> dict[str, Any]:
        """Return what plan.json holds."""
        values = {"plan": self.plan.to_dict(), "estimate": self.cost.to_dict(), "learning_rates": self.rates}
        later = {begin: phase.to_dict() for begin, phase in self.later.items()}
        return plan_file_of({0: sealed(values, self.params, self.model), **later})


def prepare(params: RunParams, *, activations: bool = False) -> Prepared:
    """Check and plan a run. Needs no weights, no process group and no GPU; nothing is pretrained, written or started.

    Args:
        params: The choices of the run.
        activations: True also predicts the peak with a batch of the data, which takes longer.

    Returns:
        The settled parameters with their plan, its cost, and the warnings.

    Raises:
        ParamError: For what this machine or Slurm cannot do, for data that cannot be read, for what cannot be planned,
            and for the errors of the lint.
    """
    params = settled(params)
    check_place(params)
    check_callbacks(params)
    try_schedule(params.train)
    sources = opened(params)
    _, processor = kept_model(params)
    found = notices(params, sources, processor)
    first, *others = phases_of(params)
    made = prepare_phase(first, sources, found, activations=activations)
    later = {}
    for phase in others:
        try:
            later[phase.begin] = prepare_phase(phase, sources, found, activations=activations)
        except ParamError as error:
            raise ParamError(f"train.freeze_from.{phase.begin}", f"from step {phase.begin + 1} on, {error}") from None
    check_rates_have_effect(params, made, *later.values())
    return replace(made, code=sources_of(params), later=later)


def prepare_phase(
    phase: Phase, sources: Mapping[str, Splits], found: Sequence[Finding], *, activations: bool
) -> Prepared:
    """Plan and check the steps of a run in which the same parameters are frozen. Raises ParamError as `prepare`.

    found: what `notices` returned of the data.
    """
    params = phase.params
    stages = previews(params, sources)
    plan, cost = next(stages)
    plan = with_place(with_notices(plan, found), params)
    plan.check()
    model, processor = kept_model(params)
    check_cache(params, model)
    if not phase.begin:
        check_start(params.train, model, plan)
    try_metrics(params, model, processor, sources)
    if activations or not plan.memory_events:
        for complete, its_cost in stages:
            of_data = its_cost.data.findings() if its_cost.data else ()
            plan, cost = replace(complete, lint=(*plan.lint, *of_data)), its_cost
            if not activations:  # the ranks need the memory events, and take them from here
                break
    return Prepared(params, plan, cost, rates_of(params, plan), model=model_digest(model))


def check_rates_have_effect(params: RunParams, *phases: Prepared) -> None:
    """Raise ParamError for a pattern of `train.lr_for` that decides on nothing that trains in any phase of a run."""
    if not params.train.freeze_from:  # a plan has checked it
        return
    model, _ = kept_model(params)
    rated = spell_out_rates(model, params)
    for pattern in rated.lr_for:
        if not any(group.pattern == pattern for phase in phases for group in rate_groups(phase.plan, rated)):
            raise ParamError("train.lr_for", f"{pattern!r} matches nothing that trains in any phase; remove it")


def preview(
    params: RunParams, sources: Mapping[str, Splits] | None = None, *, most: int | None = RECORDS
) -> tuple[WrapPlan, Estimate]:
    """Return the plan of a run and its cost per rank, whatever the lint finds; see `previews`."""
    return list(previews(params, sources, most=most))[-1]


def quick_look(params: RunParams, *, all_data: bool = False) -> tuple[dict[str, Splits] | None, list[Finding]]:
    """Return the sources of a run, opened, and the notices on them; None and no notices of data that are not opened.

    Only data that are quick to read are opened, and those that the plan needs; with all_data, also all others. A plan
    stands without them: its cost says why they were not looked at.
    """
    params = with_variables(params)
    if not all_data and why_slow_to_read(params.data) and not kind_of(params.model).example_of_data:
        return None, []
    try:
        sources = opened(params)
    except ParamError:  # told with the cost of the plan, or raised where the plan needs them
        return None, []
    return sources, notices(params, sources, kept_model(params)[1])


def previews(
    params: RunParams,
    sources: Mapping[str, Splits] | None = None,
    *,
    for_auto: bool = False,
    most: int | None = RECORDS,
) -> Iterator[tuple[WrapPlan, Estimate]]:
    """Yield the plan and its cost: first without memory events, then with them where they can be recorded, then also
    with the peak of a batch of the run's own data where they can be looked at, or with the reason why not.

    sources: what `open_sources` gives, if they are open. most: the most records of each source to look at, None for
    all. The newest models and recordings are kept, since other choices change more often. for_auto: after the last
    plan, trace what AUTO needs, so that it is quick when chosen.
    """
    params = with_ranks(with_variables(params))
    params = params.change(launch=with_cluster(params.launch))
    model, processor, cache = kept_with_cache(params)
    example = example_of(model, params, processor, sources)
    plan = _with_warnings(plan_run(model, params, example, cache), processor)
    yield plan, cost_of(plan, params)
    if plan.refused or example is None:  # nobody knows the inputs
        return
    if not plan.memory_events:  # AUTO has needed them
        plan = with_example(model, plan, example, cache, planned_train(params))
        yield plan, cost_of(plan, params)
    cost = with_data_peak(plan, cost_of(plan, params), params, sources, most=most)
    yield replace(plan, lint=(*plan.lint, *(cost.data.findings() if cost.data else ()))), cost
    if for_auto and plan.rules.shards:
        with suppress(ValueError):  # AUTO itself says what is wrong, when it is chosen
            cache.group(quantized_copy(model, params.fsdp), params.fsdp, example)


def budget_range(params: RunParams) -> tuple[int, int]:
    """Return the peaks in bytes with all frozen units sharded and with all replicated, the lower one first.

    Between the two AUTO has something to choose. Raises ParamError where nobody knows the inputs.
    """
    peaks = []
    for policy in (FrozenPolicy.SHARD, FrozenPolicy.REPLICATE):
        fsdp = params.fsdp.change(frozen_policy=policy, **params.fsdp.without_auto)
        stages = previews(params.change(fsdp=fsdp))
        peak = next((cost.peak_bytes for _, cost in stages if cost.peak_bytes is not None), None)
        if peak is None:
            words = "AUTO needs to know the inputs of a step, to count its activations, and nobody does here"
            raise ParamError("fsdp.frozen_policy", words)
        peaks.append(peak)
    return min(peaks), max(peaks)


def rates_of(params: RunParams, plan: WrapPlan) -> str:
    """Return the learning rates by part of a planned run in a line; empty if all are `train.lr`."""
    if not params.train.lr_for:
        return ""
    model, _ = kept_model(params)
    return rates_line(plan, spell_out_rates(model, params))


def with_notices(plan: WrapPlan, found: Sequence[Finding]) -> WrapPlan:
    """Return the plan with what a person should know of the data among its findings, errors first."""
    errors = tuple(finding for finding in found if finding.level == "error")
    others = tuple(finding for finding in found if finding.level != "error")
    # Whether a source has system texts is known now.
    of_plan = tuple(finding for finding in plan.lint if finding.code != NO_SYSTEM)
    return replace(plan, lint=(*errors, *of_plan, *others))


def with_place(plan: WrapPlan, params: RunParams) -> WrapPlan:
    """Return the plan with what a person should know of the job among its findings."""
    notes = launcher_for(params).notes(params)
    return replace(plan, lint=(*plan.lint, *(Finding("warning", "cluster", note) for note in notes)))


def _with_warnings(plan: WrapPlan, processor: SampleProcessor | None) -> WrapPlan:
    """Return the plan with what its processor warns of."""
    found = processor.warnings if processor is not None else {}
    return replace(plan, lint=(*plan.lint, *(Finding("warning", code, text) for code, text in found.items())))


def opened(params: RunParams) -> dict[str, Splits]:
    """Return the splits of all sources, opened for a look at the data. Raises ParamError as `open_sources`."""
    if not kind_of(params.model).example_of_data:
        # Pictures as they are, and resized later.
        return open_sources(params.data, image_size=1, seed=params.train.seed)
    _, processor = kept_model(params)
    assert processor is not None
    return open_for(processor, params)  # it is tried on them


def kept_model(params: RunParams) -> tuple[nn.Module, SampleProcessor | None]:
    """Return the model without weights and its processor. Both are kept, and must not be changed."""
    model, processor, _ = kept_with_cache(params)
    return model, processor


def kept_with_cache(params: RunParams) -> tuple[nn.Module, SampleProcessor | None, PlanCache]:
    """Return what `kept_model` does, and what was recorded of the model."""
    key = _model_key(params)
    with _building:  # transformers' lazy modules break when two threads import them
        return kept_by_key(key)


def _model_key(params: RunParams) -> str:
    own = params.model.build
    code: dict[str, bytes] = {}
    if own is not None:
        load_own("model.build", own)  # afresh if its file was edited
        code = own_sources([module_of(own)]).files
    # A generated model's processor, and so its example, is there only after the pretraining.
    return json.dumps([params.to_dict()["model"], needs_backbones(params.model), sorted(map(repr, code.items()))])


@lru_cache(2)
def kept_by_key(key: str) -> tuple[nn.Module, SampleProcessor | None, PlanCache]:
    """Return the model, its processor and its recordings for a key of `_model_key`; the two newest are kept."""
    values, *_ = json.loads(key)
    return *frozen_model(ModelParams.from_dict(values)), cache_by_key(key)


@lru_cache(2)
def cache_by_key(key: str) -> PlanCache:
    """Return where the recordings of the model of a key are kept."""
    return PlanCache()


def frozen_model(params: ModelParams) -> tuple[nn.Module, SampleProcessor | None]:
    """Return the model without weights, frozen as it will be trained, and its processor if that is on this machine."""
    model, processor = build_model(params, meta=True)
    freeze_model(model, params)
    return model, processor


def plan_for(
    model: nn.Module,
    params: RunParams,
    processor: SampleProcessor | None,
    sources: Mapping[str, Splits] | None = None,
) -> tuple[WrapPlan, Estimate]:
    """Return the plan of a model that is frozen already, and its cost per rank; see `plan_run` for the arguments."""
    example = example_of(model, params, processor, sources)
    cache = cache_by_key(_model_key(params))
    plan = _with_warnings(plan_run(model, params, example, cache), processor)
    if not (plan.refused or plan.memory_events or example is None):
        plan = with_example(quantized_copy(model, params.fsdp), plan, example, cache, planned_train(params))
    return plan, cost_of(plan, params)


def planned_train(params: RunParams) -> TrainParams:
    """Return the step that a plan of a run is for: with a micro-batch of each source, on the device of its job."""
    train = params.train.change(accumulation=params.train.accumulation * len(params.data.sources()))
    if train.device is Device.AUTO and params.launch.gpu_count:  # of a job; this machine may have none
        train = train.change(device=Device.CUDA)
    return train


def plan_run(
    model: nn.Module, params: RunParams, example: dict[str, Any] | None, cache: PlanCache | None = None
) -> WrapPlan:
    """Return the plan of a model that is frozen already, without its cost: enough for the lint.

    Args:
        model: The model of `params.model`, frozen, with or without weights.
        params: The parameters of the run, with a number of ranks.
        example: The largest inputs of a micro-step, as `example_of` returns them; None if nobody knows them.
        cache: What was recorded of this model, if it has been planned before.

    Returns:
        The plan, with its findings. It has memory events if AUTO needed them, or the kind of model plans with an
        example.

    Raises:
        ParamError: If the model cannot be wrapped or trained so, by the field that is wrong.
    """
    # AUTO's budget includes activations. Otherwise tracing takes time for nothing where the order is known.
    kind = kind_of(params.model)
    if params.fsdp.frozen_policy is not FrozenPolicy.AUTO and not kind.planned_with_example:
        example = None
    train = planned_train(params)
    fsdp = params.fsdp.with_node_size(params.launch.ranks_per_node)
    ranks = params.launch.world_size
    plan = make_plan(model, fsdp, world_size=ranks, example=example, train=train, cache=cache)
    kind.check_plan(model, plan)
    rates_line(plan, spell_out_rates(model, params))  # or a mistake in them
    check_shards(train.optimizer, plan)
    if params.train.ema is not None:
        check_average(plan)
    return plan


def cost_of(plan: WrapPlan, params: RunParams) -> Estimate:
    """Return what a run's plan costs each rank."""
    return estimate(plan, params.train, sources=len(params.data.sources()))


def with_data_peak(
    plan: WrapPlan,
    cost: Estimate,
    params: RunParams,
    sources: Mapping[str, Splits] | None = None,
    *,
    most: int | None = RECORDS,
) -> Estimate:
    """Return the cost of a run's plan with the peak of the largest batch of its data.

    A plan's own peak is of the longest texts, which may not occur. sources: what `open_sources` gives, if they are
    open. most: see `look_at_data`.
    """
    model, processor, cache = kept_with_cache(params)
    look = look_at_data(params, processor, cache, sources, most=most)
    if not look.largest:
        return replace(cost, batch=look.words)

    def with_peak(batch: DataBatch) -> tuple[DataBatch, Memory]:
        recording = cache.record(quantized_copy(model, params.fsdp), plan, batch.inputs)
        return batch, peak_in_step(with_recording(plan, recording), params, first=batch.first)

    try:
        largest, peak = max(map(with_peak, look.largest), key=_bytes_of_peak)
        possible = max(map(with_peak, look.possible), key=_bytes_of_peak) if look.possible else None
    except ValueError as error:
        words = look.words or "the largest batch"
        return replace(cost, batch=f"the peak of {words} is not known: {error}")
    shapes = tuple(shapes_of(largest.inputs))
    data = None
    if possible is not None and largest.figures is not None and possible[0].figures is not None:
        data = data_figures(params, plan, look.batches, largest.figures, possible[0].figures, possible[1])
    words = look.words if data is None else data.words
    return replace(cost, batch_peak=peak, batch=words, batch_shapes=shapes, data=data)


def _bytes_of_peak(batch_and_peak: tuple[DataBatch, Memory]) -> int:
    return batch_and_peak[1].bytes


def peak_in_step(plan: WrapPlan, params: RunParams, *, first: bool) -> Memory:
    """Return the peak of a step of the plan's micro-batch; first: as the first one of the step, not as a later one."""
    return step_walk(plan, params.train, sources=len(params.data.sources()), first=first).peak


def peak_of(params: RunParams, plan: WrapPlan, inputs: dict[str, Any], *, first: bool) -> dict[str, Any]:
    """Return the peak that the plan predicts for a micro-batch of a run: bytes, and when. first: see `peak_in_step`."""
    model, _, cache = kept_with_cache(params)
    recording = cache.record(quantized_copy(model, params.fsdp), plan, inputs)
    peak = peak_in_step(with_recording(plan, recording), params, first=first)
    return {"bytes": peak.bytes, "when": peak.when}


def example_of(
    model: nn.Module,
    params: RunParams,
    processor: SampleProcessor | None = None,
    sources: Mapping[str, Splits] | None = None,
) -> dict[str, Any] | None:
    """Return the largest inputs of a micro-step, with a picture per sample; None if nobody knows them.

    Raises ParamError if a picture has more tokens than `data.max_length`.
    """
    return kind_of(params.model).example(model, params, processor, sources)
