"""The lint: one finding per kind of mistake, naming the parameter and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..params import AutoWrapPolicy, Backend
from .group import SMALL
from .ties import home
from .trace import Trace, has_forward, tied_names
from .units import Finding, Param, Unit, WrapPlan

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
    if found:  # all else follows from it
        return tuple(found)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    theirs = wrapped and not hasattr(model, "mmfsdp_plan")  # a wrapped model does not show by which policy
    policy = None if theirs and plan.fsdp.auto_wrap_policy is not AutoWrapPolicy.NO_WRAP else plan.fsdp.auto_wrap_policy
    places = [*_places(inner, plan, seen or Trace(), policy)]
    clear = {f.code for f in places}.isdisjoint(("left-in-root", "no-forward"))
    found += [*_other_model(inner, plan, read=theirs), *_contents(inner, plan, policy, root=clear), *places]
    found += [*_sizes(inner, plan, policy, root=clear), *_idle(plan, seen or Trace()), *_statistics(inner)]
    found += [*_optimizer(inner, optimizer), *_batches(batches)]
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


def _also(names: Sequence[str]) -> str:
    """Where else the mistake is that has been told of the first."""
    return f"; so with {_some(names[1:])}" if names[1:] else ""


def _other_model(model: nn.Module, plan: WrapPlan, *, read: bool = False) -> Iterator[Finding]:
    """The model has changed since it was planned. read: the plan has been read from it."""
    named = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False) if "_flat_param" not in n}
    unknown = [n for n in named if n not in plan.by_name]
    if unknown and not read:
        yield _error("other-model", f"{_some(unknown)}: not in the plan; make the plan anew for this model")
    thawed = [n for n, p in named.items() if n in plan.by_name and p.requires_grad and not plan.by_name[n].trainable]
    if thawed:
        yield _error(
            "unfrozen-later",
            f"{_some(thawed)}: frozen when the plan was made, trainable now; wrappers fix dtypes and reductions at "
            "the first forward, so un-freeze before make_plan, and wrap again",
        )


def _contents(model: nn.Module, plan: WrapPlan, policy: AutoWrapPolicy | None, *, root: bool) -> Iterator[Finding]:
    """What units hold. root: what the root unit holds is told of here."""
    if not any(p.trainable for p in plan.params):
        last = [plain_name(n) for n, _ in model.named_parameters()][-1]
        yield _error("nothing-trains", f"freeze: every parameter is frozen; add a pattern such as {'!' + last!r}")
    fsdp1 = plan.backend is Backend.FSDP1
    sharded = [u for u in plan.units if u.sharded and u.params]
    ones = {u.name: [*{p.dtype: p for p in u.params if p.trainable or fsdp1}.values()] for u in sharded}  # of a dtype
    clash = {name: ps for name, ps in ones.items() if len(ps) > 1}
    for name, (a, b, *_) in list(clash.items())[:1]:
        yield _error(
            "two-dtypes",
            f"{a.name} is {a.dtype} and {b.name} is {b.dtype}, both {'in' if fsdp1 else 'trainable in'} unit {name}: "
            "one collective has one dtype; "
            + ("cast the model to float32 before make_plan" if a.trainable == b.trainable else "set backend to FSDP2")
            + _also(list(clash)),
        )
    if scalars := [p.name for u in sharded for p in u.params if not p.shape]:
        yield _error(
            "scalar",
            f"{_some(scalars)}: a scalar has no dim to shard; give it the shape (1,) before make_plan: "
            f"model.{scalars[0]} = nn.Parameter(model.{scalars[0]}.detach().reshape(1))",
        )
    mixed = [u for u in sharded if u.kind == "mixed" and u.name not in clash and (root or u.modules != ("",))]
    if fsdp1 and mixed:
        frozen = [p.name for p in mixed[0].params if not p.trainable]
        owners = [
            {p.name.rpartition(".")[0] for p in u.params if p.trainable is kind}
            for u in mixed
            for kind in (False, True)
        ]
        whole = policy is AutoWrapPolicy.FROZEN_AWARE or any(map(set.intersection, owners[::2], owners[1::2]))
        yield _warn(
            "mixed-unit",
            f"{_some([u.name for u in mixed])}: frozen ({frozen[0]}) beside trainable, and FSDP1 reduces gradients as "
            "if all were trainable; set backend to "
            + ("FSDP2" if whole else "FSDP2, or auto_wrap_policy to FROZEN_AWARE"),
        )


def _places(model: nn.Module, plan: WrapPlan, seen: Trace, policy: AutoWrapPolicy | None) -> Iterator[Finding]:
    """Parameters that their unit does not fetch when they are needed."""
    groups = [[m for m in u.modules if m] for u in plan.units]
    containers = {
        n: u.name for u in plan.units if u.sharded for n in u.modules if n and not has_forward(_bare(model, n))
    }
    for name in list(containers)[:1]:
        inside = _layers_inside(model, [name])
        yield _error(
            "no-forward",
            f"{name} ({type(_bare(model, name)).__name__}) is a container: it has no forward that would gather it; "
            f"make units of the modules inside it{f' ({inside})' if inside else ''}{_also(list(containers))}",
        )
    apart = []
    in_place = plan.backend is not Backend.FSDP1  # which puts a wrapper in a module's stead, under one of its names
    for names in tied_names(model, apart=in_place).values():
        clean = [plain_name(n) for n in names]
        homes = {home(n, groups) for n in clean}
        if len(homes) > 1 and any(u.sharded and set(clean) & {p.name for p in u.params} for u in plan.units):
            apart.append((" and ".join(clean), len(homes)))
    if apart:
        yield _error(
            "tied-apart",
            f"{apart[0][0]} are one parameter in {apart[0][1]} units; put both modules into one unit, as make_plan "
            f"does{_also([names for names, _ in apart])}",
        )
    calls = {u: max((seen.calls[m] for m in u.modules), default=0) for u in plan.units} if seen.calls else {}
    often = [u for u, n in calls.items() if n > 1 and u.gathers_forward + u.gathers_backward > 2]
    for unit in often[:1]:
        yield _warn(
            "runs-often",
            f"{unit.name}: runs {calls[unit]} times in a forward, and is gathered {unit.gathers_forward} times there "
            f"and {unit.gathers_backward} times in backward; set frozen_policy to REPLICATE where it is frozen, else "
            f"make a unit of what calls it{_also([u.name for u in often])}",
        )
    away = {p.name: u.name for u in plan.units if u.sharded for p in u.params if not _there(p.name, u, seen)}
    if away := {p: unit for p, unit in away.items() if unit not in containers.values()}:
        yield _error(
            "used-outside",
            f"{_some(list(away))}: used while the forward of {away[next(iter(away))]}, which gathers it, is not "
            "running; call the module itself, or give make_plan an example for it to be held further up",
        )
    root, rest = plan.units[0], sum(u.numel for u in plan.units[1:])
    if root.modules == ("",) and rest and not containers and root.numel > min(SMALL, (rest + root.numel) // 10):
        if policy is not AutoWrapPolicy.NO_WRAP and root.sharded:
            largest = max(root.params, key=lambda p: p.numel)
            tied = [p.name for p in root.params if p.aliases and p.trainable and 10 * p.numel > root.numel]
            tied = tied if plan.backend is Backend.FSDP1 else []
            yield _warn(
                "left-in-root",
                f"the root unit holds {root.numel:,} parameters (the largest is {largest.name}) from the first forward "
                "to the end of backward; "
                + (
                    f"set backend to FSDP2 and auto_wrap_policy to FROZEN_AWARE, since FSDP1 must hold {tied[0]} here"
                    if tied
                    else "use each only while its own module's forward runs"
                    if policy is AutoWrapPolicy.FROZEN_AWARE
                    else "set auto_wrap_policy to FROZEN_AWARE, or make units of their modules, too"
                ),
            )


def _bare(model: nn.Module, name: str) -> nn.Module:
    """A module by its name, without FSDP1's wrapper."""
    module = model.get_submodule(name)
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def _layers_inside(model: nn.Module, names: Sequence[str]) -> str:
    """The class that holds most of what modules hold, without them: to be named in transformer_layer_cls."""
    held: Counter[str] = Counter()
    for outer in (_bare(model, name) for name in names):
        for module in outer.modules():
            if module is not outer and has_forward(module) and not isinstance(module, FullyShardedDataParallel):
                held[type(module).__name__] += sum(p.numel() for p in module.parameters())
    return held.most_common(1)[0][0] if held else ""


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


def _sizes(model: nn.Module, plan: WrapPlan, policy: AutoWrapPolicy | None, *, root: bool) -> Iterator[Finding]:
    """Units too small, too large, or of too few rows. root: the root unit's size is told of here."""
    units = [u for u in plan.units if u.sharded and u.params]
    if not units or plan.shard == 1:
        return
    aware = policy is AutoWrapPolicy.FROZEN_AWARE
    most = max(units, key=lambda u: u.numel)
    small = [u for u in units if u.numel < min(LATENCY, most.numel / TINY) and u.modules != ("",)]
    if len(small) > 1 and not aware:
        size = policy is AutoWrapPolicy.SIZE_BASED_WRAP
        yield _warn(
            "small-units",
            f"{_some([u.name for u in small])}: below {min(LATENCY, most.numel / TINY):,.0f} parameters, so a gather "
            "is all latency; set auto_wrap_policy to FROZEN_AWARE, which groups them with neighbors, or "
            f"{'raise min_num_params' if size else 'make no units of their classes'}",
        )
    one = max(p.numel for p in most.params) > most.numel / 2  # a parameter cannot be split
    large = most.gathered_bytes > sum(u.gathered_bytes for u in units) / 2 and most.numel > SMALL and not one
    if large and (root or most.modules != ("",)):
        inside = _layers_inside(model, most.modules)
        yield _warn(
            "large-unit",
            f"{most.name} is more than half of all that is gathered and sets the peak; split it: "
            + (
                f"set auto_wrap_policy to TRANSFORMER_BASED_WRAP and transformer_layer_cls to {inside}"
                if aware
                else "set auto_wrap_policy to FROZEN_AWARE"
            ),
        )
    flat = plan.backend is Backend.FSDP1
    held: Sequence[Unit | Param] = units if flat else [p for u in units for p in u.params]

    def padded(one: Unit | Param, shard: int) -> int:
        return one.padded(shard) if isinstance(one, Param) else ceil(one.numel / shard) * shard

    def waste(shard: int) -> float:
        return 1 - sum(p.numel for p in held) / sum(padded(p, shard) for p in held)

    if waste(plan.shard) > WASTE:
        worst = max(held, key=lambda p: padded(p, plan.shard) - p.numel)
        rows = f"{worst.shape[0] if worst.shape else 1} rows" if isinstance(worst, Param) else f"{worst.numel} elements"
        fewer = next(n for n in range(plan.shard // 2, 0, -1) if plan.world_size % n == 0 and waste(n) <= WASTE)
        yield _warn(
            "more-ranks-than-rows",
            f"{worst.name} has {rows} for {plan.shard} ranks, and with it {waste(plan.shard):.0%} of what is gathered "
            f"is padding; shard over fewer ranks: set sharding_strategy to HYBRID_SHARD and dp_shard to {fewer}",
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
    if left and len(left) == sum(p.requires_grad for p in named.values()):
        yield _error(
            "not-in-optimizer",
            f"{_some(left)}: nothing that trains was given to the optimizer; make it after the model is wrapped",
        )
    elif left:
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
    told = {rank: f for rank, media in enumerate(batches) for f in lint_media(media, wanted, rank=rank)}
    for first in list(told.values())[:1]:
        yield replace(first, message=first.message + _also([f"rank {rank}" for rank in told]))


_WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)


def _wrapped_before(model: nn.Module) -> Iterator[Finding]:
    found = [plain_name(n) or "the model" for n, m in model.named_modules() if isinstance(m, _WRAPPERS)]
    if found:
        yield _error(
            "wrapped-before",
            f"{_some(found)}: already wrapped, and a unit cannot be made inside or around it; plan and wrap the plain "
            "model once, or read this one with describe",
        )


def _wrapped_twice(model: nn.Module) -> Iterator[Finding]:
    for name, m in model.named_modules():
        if isinstance(m, _WRAPPERS[1:]) and any(
            isinstance(inner, _WRAPPERS)
            for inner in ([m.module] if isinstance(m, _WRAPPERS[1]) else m.module.modules())
        ):
            yield _error("wrapped-before", f"{plain_name(name) or 'the model'}: wrapped twice; wrap each module once")
            return
