"""The lint: one finding per kind of mistake, naming the parameter and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..params import AutoWrapPolicy, Backend
from .group import SMALL
from .ties import home
from .trace import Trace, has_forward, tied_names
from .units import Finding, Unit, WrapPlan

TINY = 50
"""A unit of fewer parameters than so many-th of the largest is mostly latency, if it is below LATENCY, too."""
LATENCY = 20_000
WASTE = 0.1
"""Share of padding in what is gathered, above which there are too many ranks for the rows."""


def lint(
    model: nn.Module,
    plan: WrapPlan,
    *,
    seen: Trace | None = None,
    optimizer: Optimizer | None = None,
    batches: Sequence[Mapping[str, Any]] = (),
    wrapped: bool = False,
) -> tuple[Finding, ...]:
    """What is wrong with a plan for this model: errors first.

    optimizer: what it was given is looked at, too; the model may be wrapped by then.
    batches: the media ({modality: tensor}) of one batch per rank. wrapped: the plan tells of what has been wrapped.
    """
    found = [*(_wrapped_twice(model) if wrapped or optimizer else _wrapped_before(model))]
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found += [*_other_model(inner, plan), *_contents(plan), *_places(inner, plan, seen or Trace()), *_sizes(plan)]
    found += [*_idle(plan, seen or Trace()), *_statistics(inner), *_optimizer(inner, optimizer), *_batches(batches)]
    return tuple(sorted(found, key=lambda f: f.level))


def lint_training(model: nn.Module, plan: WrapPlan, optimizer: Optimizer) -> tuple[Finding, ...]:
    """What is wrong with a wrapped model and its optimizer before a step: cheap enough to be asked often."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return (*_other_model(inner, plan), *_optimizer(inner, optimizer))


def lint_media(media: Mapping[str, Any], wanted: Iterable[str], *, rank: int) -> Iterator[Finding]:
    """A rank's batch lacks one of the modalities that some rank has."""
    lacks = [n for n in sorted(wanted) if n not in media or media[n] is None or not media[n].numel()]
    if lacks:
        yield _error(
            "modality-missing",
            f"rank {rank}'s batch has no {lacks[0]} and others have: it would skip that encoder's gather and the "
            "others wait for ever; give samples without it a blank one",
        )


def plain_name(name: str) -> str:
    """A parameter's or module's name without what wrappers put into it."""
    for mark in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{mark}.", "").removesuffix(mark).removesuffix(".")
    return name


def _error(code: str, message: str) -> Finding:
    return Finding("error", code, message)


def _warn(code: str, message: str) -> Finding:
    return Finding("warning", code, message)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _other_model(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """The model has changed since it was planned."""
    named = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False) if "_flat_param" not in n}
    unknown = [n for n in named if n not in plan.by_name]
    if unknown:
        yield _error("other-model", f"{_some(unknown)}: not in the plan; make the plan anew for this model")
    thawed = [n for n, p in named.items() if n in plan.by_name and p.requires_grad and not plan.by_name[n].trainable]
    if thawed:
        yield _error(
            "unfrozen-later",
            f"{_some(thawed)}: frozen when the plan was made, trainable now; wrappers fix dtypes and reductions at "
            "the first forward, so un-freeze before make_plan, and wrap again",
        )


def _contents(plan: WrapPlan) -> Iterator[Finding]:
    """What units hold."""
    if not any(p.trainable for p in plan.params):
        yield _error("nothing-trains", "freeze: every parameter is frozen; add a pattern such as '!*head*'")
    fsdp1 = plan.backend is Backend.FSDP1
    for unit in (u for u in plan.units if u.sharded and u.params):
        dtypes = {p.dtype: p.name for p in unit.params if p.trainable or fsdp1}
        if len(dtypes) > 1:
            (one, a), (other, b) = list(dtypes.items())[:2]
            yield _error(
                "two-dtypes",
                f"{a} is {one} and {b} is {other}, both {'in' if fsdp1 else 'trainable in'} unit {unit.name}: one "
                f"collective has one dtype; cast the model to {max(dtypes, key=len)}, or put them into units apart",
            )
        scalars = [p.name for p in unit.params if not p.shape]
        if scalars and not fsdp1:
            yield _error("scalar", f"{_some(scalars)}: a scalar has no dim to shard; give it the shape (1,)")
    mixed = [u for u in plan.units if u.sharded and u.kind == "mixed"]
    if fsdp1 and mixed:
        frozen = [p.name for p in mixed[0].params if not p.trainable]
        yield _warn(
            "mixed-unit",
            f"{_some([u.name for u in mixed])}: frozen ({frozen[0]}) beside trainable; FSDP1 reduces gradients as if "
            "all were trainable. Set auto_wrap_policy to FROZEN_AWARE or backend to FSDP2",
        )


def _places(model: nn.Module, plan: WrapPlan, seen: Trace) -> Iterator[Finding]:
    """Parameters that their unit does not fetch when they are needed."""
    groups, containers = [[m for m in u.modules if m] for u in plan.units], set()
    for unit, modules in zip(plan.units, groups, strict=True):
        for name in modules if unit.sharded else ():
            if not has_forward(model.get_submodule(name)):
                containers.add(unit.name)
                yield _error(
                    "no-forward",
                    f"{name} ({type(model.get_submodule(name)).__name__}) is a container: it has no forward that would "
                    "gather it; make units of the modules inside it",
                )
    in_place = plan.backend is not Backend.FSDP1  # which puts a wrapper in a module's stead, under one of its names
    for names in tied_names(model, apart=in_place).values():
        clean = [plain_name(n) for n in names]
        homes = {home(n, groups) for n in clean}
        if len(homes) > 1 and any(u.sharded and set(clean) & {p.name for p in u.params} for u in plan.units):
            yield _error(
                "tied-apart",
                f"{' and '.join(clean)} are one parameter in {len(homes)} units; put both modules into one unit",
            )
    for unit in plan.units:
        often = max((seen.calls[m] for m in unit.modules), default=0) if seen.calls else 0
        if often > 1 and unit.gathers_forward + unit.gathers_backward > 2:
            yield _warn(
                "runs-often",
                f"{unit.name}: runs {often} times in a forward, and is gathered {unit.gathers_forward} times there and "
                f"{unit.gathers_backward} times in backward; set frozen_policy to REPLICATE where it is frozen, else "
                "make a unit of what calls it",
            )
        away = [p.name for p in unit.params if unit.sharded and not _there(p.name, unit, seen)]
        if away and unit.name not in containers:
            yield _error(
                "used-outside",
                f"{_some(away)}: used while the forward of {unit.name}, which gathers it, is not running; call the "
                "module itself, or give make_plan an example for it to be held further up",
            )
    root, rest = plan.units[0], sum(u.numel for u in plan.units[1:])
    if root.modules == ("",) and rest and not containers and root.numel > min(SMALL, (rest + root.numel) // 10):
        if plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP and root.sharded:
            largest = max(root.params, key=lambda p: p.numel)
            yield _warn(
                "left-in-root",
                f"the root unit holds {root.numel:,} parameters (the largest is {largest.name}) from the first forward "
                "to the end of backward; use each only while its own module's forward runs, and set auto_wrap_policy "
                "to FROZEN_AWARE or name their layers' classes too",
            )


def _idle(plan: WrapPlan, seen: Trace) -> Iterator[Finding]:
    """What trains, but is in no forward."""
    idle = [p.name for p in plan.params if p.trainable and p.name not in seen.used] if seen.used else []
    if idle:
        fails = ", and DDP fails at its second step" if plan.backend is Backend.DDP else ""
        yield _warn(
            "never-used",
            f"{_some(idle)}: trainable, but the example's forward does not use it: it never learns{fails}; freeze it, "
            "or give an example that uses it",
        )


def _there(name: str, unit: Unit, seen: Trace) -> bool:
    return all(any(m in active for m in unit.modules) for active in seen.used.get(name, ()))


def _sizes(plan: WrapPlan) -> Iterator[Finding]:
    """Units too small, too large, or of too few rows."""
    units = [u for u in plan.units if u.sharded and u.params]
    if not units or plan.shard == 1:
        return
    most = max(units, key=lambda u: u.numel)
    small = [u for u in units if u.numel < min(LATENCY, most.numel / TINY) and u.modules != ("",)]
    if len(small) > 1 and plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.FROZEN_AWARE:
        yield _warn(
            "small-units",
            f"{_some([u.name for u in small])}: below {min(LATENCY, most.numel / TINY):,.0f} parameters, so a gather "
            "is all latency; FROZEN_AWARE groups them with neighbors, or raise min_num_params",
        )
    if most.gathered_bytes > sum(u.gathered_bytes for u in units) / 2 and most.numel > SMALL:
        yield _warn(
            "large-unit",
            f"{most.name} is more than half of all that is gathered and sets the peak; split it: FROZEN_AWARE, a lower "
            "min_num_params, or the class names of the layers inside",
        )
    if plan.backend is not Backend.FSDP2:
        return
    padded = {p: p.padded(plan.shard) for u in units for p in u.params}
    waste = sum(padded.values()) - sum(p.numel for p in padded)
    if waste > WASTE * sum(padded.values()):
        worst = max(padded, key=lambda p: padded[p] - p.numel)
        yield _warn(
            "more-ranks-than-rows",
            f"{worst.name} has {worst.shape[0] if worst.shape else 1} rows for {plan.shard} ranks; with it "
            f"{waste / sum(padded.values()):.0%} of what is gathered is padding. Shard over fewer ranks "
            "(sharding_strategy HYBRID_SHARD with a smaller dp_shard)",
        )


def _optimizer(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Finding]:
    if optimizer is None:
        return
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {plain_name(n): p for n, p in model.named_parameters()}
    frozen = [n for n, p in named.items() if id(p) in given and not p.requires_grad]
    if frozen:
        yield _error(
            "frozen-in-optimizer",
            f"{_some(frozen)}: frozen, yet given to the optimizer, which may decay it; give it only the parameters "
            "with requires_grad (build_optimizer does)",
        )
    left = [n for n, p in named.items() if p.requires_grad and id(p) not in given]
    if left:
        yield _warn("not-in-optimizer", f"{_some(left)}: trainable, but the optimizer was not given it; it never moves")


def _statistics(model: nn.Module) -> Iterator[Finding]:
    kind = nn.modules.batchnorm._BatchNorm
    norms = {n: m for n, m in model.named_modules() if isinstance(m, kind) and not isinstance(m, nn.SyncBatchNorm)}
    own = [plain_name(n) for n, m in norms.items() if any(p.requires_grad for p in m.parameters())]
    if own:
        yield _warn(
            "batch-norm",
            f"{_some(own)}: each rank normalizes by its own samples and keeps statistics of its own, of which only "
            "rank 0's are saved; freeze it, or on GPUs use nn.SyncBatchNorm.convert_sync_batchnorm before make_plan",
        )


def _batches(batches: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    wanted = {name for media in batches for name in media}
    for rank, media in enumerate(batches):
        yield from lint_media(media, wanted, rank=rank)


def _wrapped_before(model: nn.Module) -> Iterator[Finding]:
    kinds = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
    found = [plain_name(n) or "the model" for n, m in model.named_modules() if isinstance(m, kinds)]
    if found:
        yield _error(
            "wrapped-before",
            f"{_some(found)}: already wrapped; a unit cannot be made inside or around it. Plan and wrap the plain "
            "model once, or read this one with describe",
        )


def _wrapped_twice(model: nn.Module) -> Iterator[Finding]:
    for name, m in model.named_modules():
        if isinstance(m, FullyShardedDataParallel) and isinstance(m.module, FullyShardedDataParallel):
            yield _error("wrapped-before", f"{plain_name(name) or 'the model'}: wrapped twice; wrap each module once")
            return
