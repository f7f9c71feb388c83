"""Find mistakes in a plan: one finding per kind, with the parameter and the fix.

An error stops a launch before any rank starts. A warning is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.group import guessed_layer_classes
from ..core.guards import changed_since, error, note, some, warning
from ..core.names import plain_name, tied_names
from ..core.plan import UnitKind, WrapPlan
from ..core.trace import Trace, need_gradient
from ..core.units import replicates_frozen
from ..params import AutoWrapPolicy, FrozenPolicy
from ..params.findings import Finding

LEVELS = ("error", "warning", "note")
"""The levels of findings, in the order in which they are told."""


def lint(model: nn.Module, plan: WrapPlan, *, trace: Trace | None = None, wrapped: bool = False) -> tuple[Finding, ...]:
    """Return the findings, errors first. What costs more than it need is found by cost.py.

    trace: of the plan's example. wrapped: the plan was read from the model, which is wrapped.
    """
    trace = trace or Trace()
    findings: list[Finding] = []
    if not wrapped:
        findings += changed_since(model, plan)
        # All other findings would follow from this one.
        if any(finding.code == "wrapped-before" for finding in findings):
            return tuple(findings)
    findings += _guessed_layers(model, plan)
    findings += _without_effect(plan)
    findings += _one_rank_along_the_shard_axis(plan)
    findings += _nothing_trains(model, plan)
    findings += _two_kinds_in_a_unit(plan)
    findings += _scalars(plan)
    findings += used_outside(plan, trace)
    findings += _batch_norms(model)
    findings += _tied_adapters(model)
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def _guessed_layers(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    if plan.fsdp.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP and not plan.fsdp.layer_classes:
        names = ",".join(guessed_layer_classes(model))
        yield warning("guessed-layers", f"transformer_layer_cls is not set; the model's lists of layers hold {names}")


def _without_effect(plan: WrapPlan) -> Iterator[Finding]:
    for name in plan.fsdp.without_effect:
        value = getattr(plan.fsdp, name)
        reason = plan.fsdp.unavailable(name, value)
        yield warning("without-effect", f"{name}: {value!r} {reason}")


def _one_rank_along_the_shard_axis(plan: WrapPlan) -> Iterator[Finding]:
    """Tell that frozen units are replicated although their policy is another one."""
    policy = plan.fsdp.frozen_policy
    if policy is FrozenPolicy.REPLICATE or not replicates_frozen(plan.fsdp, plan.shard):
        return
    replicated = [unit for unit in plan.units if unit.frozen_policy is FrozenPolicy.REPLICATE]
    if replicated:
        yield note(
            "one-shard",
            f"frozen_policy: {policy} is REPLICATE here, for {len(replicated)} frozen units: one rank along the shard "
            "axis holds all of them anyway, and sharded ones would be copied each time that they are needed; with "
            f"more ranks along it the plan takes {policy}",
        )


def _nothing_trains(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    names = [plain_name(name, model) for name, _ in model.named_parameters()]
    if not names:
        yield error("no-parameters", "model: it has no parameters, so there is nothing to train or to shard")
    elif not any(p.trainable for p in plan.params):
        # The last parameter is the head's in most models: a pattern that can be typed as it is.
        yield error("nothing-trains", f"freeze: every parameter is frozen; add a pattern such as '!{names[-1]}'")


def _batch_norms(model: nn.Module) -> Iterator[Finding]:
    names = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            if need_gradient(list(module.parameters())):
                names.append(plain_name(name, model))
    if names:
        yield warning(
            "batch-norm",
            f"{some(names)}: each rank normalizes by its own samples and has its own running statistics; only "
            "rank 0's are saved; freeze it, or on GPUs call nn.SyncBatchNorm.convert_sync_batchnorm before make_plan",
        )


def _tied_adapters(model: nn.Module) -> Iterator[Finding]:
    """Find adapters of PEFT, and copies that it trains (`modules_to_save`), on one of two tied parameters."""
    tied: dict[str, list[str]] = {}
    for names in tied_names(model).values():
        tied.update({name: [other for other in names if other != name] for name in names})
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            what, inner = "an adapter", "base_layer.weight"
        elif hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            what, inner = "a copy that trains (modules_to_save)", "original_module.weight"
        else:
            continue
        others = tied.get(f"{name}.{inner}", [])
        if others:
            yield warning(
                "tied-adapter",
                f"{plain_name(name, model)}: has {what}, and is tied to {some(others)}, which does not: merged or "
                "saved, one of the two gets the change of the other, or they drift apart; set ensure_weight_tying of "
                "PEFT's configuration, leave the tied modules out, or untie them before the adapter is added",
            )
            return


# ---- the contents of units ----


def _two_kinds_in_a_unit(plan: WrapPlan) -> Iterator[Finding]:
    """Find a unit with gradients of two dtypes, and what FSDP1 does not take: integers, two dtypes, two kinds."""
    fsdp1 = plan.rules.flat
    for unit in plan.sharded_units:
        integers = [p.name for p in unit.params if not p.is_floating]
        if fsdp1 and integers:
            yield error("integers", f"{some(integers)}: FSDP1 shards no integers; set backend to FSDP2")
            return
        # FSDP2 gathers any dtypes, but reduces gradients in one. FSDP1 has one flat parameter.
        by_dtype = {p.dtype: p for p in unit.params if p.trainable or fsdp1}
        if len(by_dtype) > 1:
            first, second = list(by_dtype.values())[:2]
            # FSDP2 reduces only what trains.
            fix = "set backend to FSDP2" if first.trainable != second.trainable else "cast the model to float32"
            yield error(
                "two-dtypes",
                f"unit {unit.name} holds {first.name} in {first.dtype} and {second.name} in {second.dtype}, and one "
                f"collective has one dtype; {fix} before make_plan",
            )
            return
        if fsdp1 and unit.kind is UnitKind.MIXED:
            mixed = [other.name for other in plan.sharded_units if other.kind is UnitKind.MIXED]
            frozen = [p.name for p in unit.params if not p.trainable]
            yield warning(
                "mixed-unit",
                f"{some(mixed)}: frozen ({some(frozen)}) and trainable in one unit, and FSDP1 reduces gradients as "
                "if all were trainable; set backend to FSDP2, or auto_wrap_policy to FROZEN_AWARE",
            )
            return


def _scalars(plan: WrapPlan) -> Iterator[Finding]:
    scalars: list[str] = []
    for unit in plan.sharded_units:
        for p in unit.params:
            if not p.shape:
                scalars.append(p.name)
    if scalars:
        yield error(
            "scalar",
            f"{some(scalars)}: a scalar has no dim to shard; give it the shape (1,) where the model is built: "
            f"model.{scalars[0]} = nn.Parameter(model.{scalars[0]}.detach().reshape(1))",
        )


# ---- parameters that their unit does not gather when they are needed ----


def used_outside(plan: WrapPlan, trace: Trace) -> Iterator[Finding]:
    """Find a parameter that is used while its unit is not gathered."""
    for unit in plan.sharded_units:
        for p in unit.params:
            # A parameter is gathered while a module of its unit runs. Used at another time, it is a shard or empty.
            if any(running.isdisjoint(unit.modules) for running in trace.uses.get(p.name, ())):
                yield error(
                    "used-outside",
                    f"{p.name}: used while the forward of {unit.name}, which gathers it, is not running; call the "
                    "module itself, or give make_plan an example, so that a module further up gathers it",
                )
                return
