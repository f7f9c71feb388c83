"""plan_answer: a plan and its cost as the object that `mmfsdp plan --json` prints."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.plan import Unit, WrapPlan
from ...predict import Estimate, Mesh, Times
from ...predict.data_figures import DataFigures
from .answers import CostFigures, DataSizes, LaterPhase, MeshFigures, PlanAnswer, StepSeconds, UnitFigures


def plan_answer(plan: WrapPlan, cost: Estimate, rates: str, times: Times | None, meshes: Sequence[Mesh]) -> PlanAnswer:
    """Return a plan for programs.

    Args:
        plan: The plan, with its findings.
        cost: Its cost on each rank.
        rates: Learning rates by part in words; empty if all are equal.
        times: Seconds of a step on a machine, if one was named.
        meshes: Every mesh of its ranks there, the best first.
    """
    units = [unit for unit in plan.units if unit.params]
    return PlanAnswer(
        ok=not plan.refused,
        backend=str(plan.backend),
        ranks=plan.world_size,
        dp_replicate=plan.replicate,
        dp_shard=plan.shard,
        sharding_strategy=str(plan.fsdp.sharding_strategy),
        frozen_policy=str(plan.fsdp.frozen_policy),
        why=plan.why,
        parameters=sum(unit.numel for unit in units),
        trainable_parameters=sum(unit.trainable_numel for unit in units),
        cost=cost_figures(plan, cost),
        learning_rates=rates,
        step=_seconds(times) if times else None,
        meshes=[_mesh(mesh) for mesh in meshes],
        units=[_unit(plan, unit) for unit in units],
        findings=list(plan.lint),
    )


def later_phase(begin: int, answer: PlanAnswer) -> LaterPhase:
    """Return a phase of a run that begins after so many steps, from the answer of its plan."""
    return LaterPhase(
        begin=begin,
        trainable_parameters=answer.trainable_parameters,
        cost=answer.cost,
        learning_rates=answer.learning_rates,
        step=answer.step,
        findings=answer.findings,
    )


def cost_figures(plan: WrapPlan, cost: Estimate) -> CostFigures:
    """Return what a plan costs each rank, in bytes."""
    return CostFigures(
        sent_bytes=cost.wire_bytes,
        at_rest_bytes=plan.bytes_at_rest,
        memory_bytes=cost.memory_bytes,
        peak_bytes=cost.peak_bytes,
        peak_when=cost.peak_when,
        batch_peak_bytes=cost.batch_peak_bytes,
        batch=cost.batch,
        data=_data_sizes(cost.data) if cost.data else None,
    )


def _data_sizes(data: DataFigures) -> DataSizes:
    values = {name: getattr(data, name) for name in DataSizes.model_fields if hasattr(data, name)}
    return DataSizes(**values, possible_peak_bytes=data.possible_peak.bytes)


def _seconds(times: Times) -> StepSeconds:
    return StepSeconds(
        machine=times.machine,
        seconds=times.overlapped,
        usual_seconds=times.usual or None,
        slowest_seconds=times.slowest,
        bound_by=times.bound,
        **times.parts,
    )


def _mesh(mesh: Mesh) -> MeshFigures:
    return MeshFigures(
        dp_replicate=mesh.replicate,
        dp_shard=mesh.shard,
        fits=mesh.fits,
        peak_bytes=mesh.cost.peak_bytes or mesh.cost.memory_bytes,
        within_node_bytes=mesh.times.inside,
        between_nodes_bytes=mesh.times.between,
        seconds=mesh.times.overlapped,
    )


def _unit(plan: WrapPlan, unit: Unit) -> UnitFigures:
    return UnitFigures(
        name=unit.name,
        kind=str(unit.kind),
        frozen_policy=str(unit.frozen_policy) if unit.frozen_policy else None,
        grad_flow=unit.grad_flow,
        parameters=unit.numel,
        trainable_parameters=unit.trainable_numel,
        at_rest_bytes=unit.bytes_at_rest,
        gathered_bytes=unit.unsharded_bytes,
        gathers_forward=unit.gathers_forward,
        gathers_backward=unit.gathers_backward,
        sent_bytes=plan.wire_bytes(unit),
    )
