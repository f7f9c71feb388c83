"""Guard a wrapped model: stop before it trains wrongly, where it is no longer as its plan says.

`apply_plan` and `train_step` call these each time. What is wrong with a plan itself is found in mmfsdp/lint.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..params import ParamError
from ..params.findings import Finding, stop_at_errors
from .collectives import rank
from .names import ancestors, plain_name
from .parameters import hook_names
from .plan import MAX_SINGLE_LINES, Unit, WrapPlan
from .recompute import in_backward
from .trace import need_gradient

WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, CheckpointWrapper)


def error(code: str, message: str) -> Finding:
    """Return a finding that stops a launch."""
    return Finding("error", code, message)


def warning(code: str, message: str) -> Finding:
    """Return a finding that is only told."""
    return Finding("warning", code, message)


def note(code: str, message: str) -> Finding:
    """Return a finding that is no fault: a choice that may be better, or one that the plan made."""
    return Finding("note", code, message)


def some(names: Sequence[str]) -> str:
    """Return two of the names, and the number of the others."""
    listed = ", ".join(names[:2])
    if len(names) > 2:
        listed += f" and {len(names) - 2} more"
    return listed


def list_all(names: Sequence[str]) -> str:
    """Return all names; where they are many, those that differ only in numbers as one: 28 x layers.*.mlp.weight."""
    if len(names) <= MAX_SINGLE_LINES:
        return ", ".join(names)
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    listed = []
    for pattern, same in alike.items():
        listed.append(same[0] if len(same) == 1 else f"{len(same)} x {pattern}")
    return ", ".join(listed)


def changed_since(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find what keeps a plain model from being wrapped by this plan: each is an error."""
    wrapped_already = list(wrapped_before(model))
    yield from wrapped_already
    if not wrapped_already:  # all other findings would follow from it
        yield from model_changed(model, plan)
        yield from hooks_of_shards(model, plan)


def wrapped_before(model: nn.Module) -> Iterator[Finding]:
    """Find modules that are wrapped already."""
    wrapped = [name or "the model" for name, module in model.named_modules() if isinstance(module, WRAPPERS)]
    if wrapped:
        yield error(
            "wrapped-before",
            f"{some(wrapped)}: already wrapped, and no unit can be made inside or around it; plan and wrap the plain "
            "model once, or read one of FSDP2 with describe",
        )


def model_changed(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find parameters that the plan does not have, and those that have been un-frozen since."""
    unknown = []
    trainable_now = []
    for full_name, p in model.named_parameters(remove_duplicate=False):
        name = plain_name(full_name, model)
        planned = plan.by_name.get(name)
        # FSDP1 without original parameters shows one flat parameter for each unit.
        if planned is None and "_flat_param" not in name:
            unknown.append(name)
        if planned is not None and p.requires_grad and not planned.trainable:
            trainable_now.append(name)
    if unknown:
        yield error("other-model", f"{some(unknown)}: not in the plan; make a new plan for this model")
    if trainable_now:
        yield error(
            "unfrozen-later",
            f"{some(trainable_now)}: frozen when the plan was made, trainable now; wrappers fix dtypes and reductions "
            "at the first forward, so un-freeze before make_plan, and wrap again",
        )


def hooks_of_shards(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find hooks of parameters that will be sharded. A hook of a frozen parameter is never called."""
    sharded: set[str] = set()
    for unit in plan.sharded_units:
        sharded.update(p.name for p in unit.params if p.trainable)
    for full_name, p in model.named_parameters():
        name = plain_name(full_name, model)
        hooks = hook_names(p)
        if name in sharded and hooks:
            yield error(
                "hook",
                f"{name}: has a hook, {some(hooks)}, which was written for the whole gradient, and {plan.backend} "
                "shards this parameter; set backend to DDP, or remove the hook. To protect rows of a table, freeze it, "
                "and train a table of its own for new rows",
            )
            return


def hooks_after_wrapping(model: nn.Module) -> Iterator[Finding]:
    """Find hooks that were put on sharded parameters after the model was wrapped."""
    for full_name, p in model.named_parameters():
        hooks = hook_names(p)
        if not hooks or not p.requires_grad or not isinstance(p, DTensor):
            continue
        # FSDP2 calls hooks of the second kind itself, after the reduction.
        effect = "never calls it: gradients are accumulated in another tensor"
        if hooks[0].startswith("register_post_accumulate_grad_hook"):
            effect = "calls it with this rank's shard of the reduced gradient: rows of other ranks are not in it"
        name = plain_name(full_name, model)
        yield warning("hook-later", f"{name}: has a hook, {some(hooks)}, put on after wrapping; FSDP2 {effect}")


def frozen_later(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find parameters that have been frozen since the plan was made."""
    names = []
    for full_name, p in model.named_parameters():
        name = plain_name(full_name, model)
        if name in plan.by_name and plan.by_name[name].trainable and not p.requires_grad:
            names.append(name)
    yield error(
        "frozen-later",
        f"{some(names)}: trainable when the plan was made, frozen now, and DDP waits for the gradients of all that it "
        "was given; freeze before make_plan and wrap again, or set backend to FSDP2",
    )


def check_order(model: nn.Module, plan: WrapPlan) -> None:
    """Have rank 0 warn, once and after a forward, of what a plan without an example assumed wrongly.

    Training is still correct: a unit that backward is found to pass through is gathered there.
    """
    began: dict[int, str] = {}  # names of units by their order in the plan, as they run
    passed: dict[str, None] = {}  # names of units that backward was not to pass through
    reported: list[str] = []

    def before_unit(unit: Unit, module: nn.Module, *inputs: Any) -> None:
        if in_backward():  # it runs again, in another order
            return
        began.setdefault(unit.order, unit.name)
        if unit.params and not unit.grad_flow and need_gradient(inputs):
            passed[unit.name] = None
            if isinstance(module, FSDPModule):
                module.set_unshard_in_backward(True)

    def after_model(*_: Any) -> None:
        problems = []
        if list(began) != sorted(began):
            problems.append(f"units ran in the order {', '.join(list(began.values())[:3])}, ...")
        if passed:
            problems.append("backward passes through " + ", ".join(passed))
        began.clear()
        if problems and not reported and rank() == 0:
            reported.extend(problems)
            warnings.warn(
                f"plan: {', and '.join(problems)}. The plan was made without an example, by the order of registration: "
                "its bytes may be wrong, and KEEP without effect; give make_plan an example",
                stacklevel=2,
            )

    for unit in plan.sharded_units:
        for name in unit.modules:
            model.get_submodule(name).register_forward_pre_hook(partial(before_unit, unit), with_kwargs=True)
    model.register_forward_hook(after_model)


def refuse_changes(wrapped: nn.Module, model: nn.Module, plan: WrapPlan) -> None:
    """Have the forward raise ParamError if a parameter has been frozen or un-frozen since it was wrapped.

    Un-frozen, its gradient would be missing, or would not be reduced: each rank would train another model. Frozen, DDP
    would wait for its gradient; FSDP does not.
    """
    frozen = [p for p in wrapped.parameters() if not p.requires_grad]
    waited_for = [p for p in wrapped.parameters() if p.requires_grad and not plan.rules.shards]

    def check(*_: Any) -> None:
        if any(p.requires_grad for p in frozen):  # cheap, for every forward
            stop_at_errors(model_changed(model, plan))
        if not all(p.requires_grad for p in waited_for):
            stop_at_errors(frozen_later(model, plan))

    wrapped.register_forward_pre_hook(check)


def refuse_parts_first(wrapped: nn.Module, plan: WrapPlan) -> None:
    """Have sharded parts of the model raise ParamError if they are called before the first forward of the whole model.

    In it FSDP learns which unit is the root. A part that is called before would be taken for it.
    """
    sharded: set[str] = set()  # names of modules that hold sharded parameters, themselves or further down
    for unit in plan.sharded_units:
        for p in unit.params:
            for name in (p.name, *p.aliases):
                sharded.update(ancestors(name))
    sharded.discard("")  # the whole model
    hooks: list[RemovableHandle] = []

    def check(name: str, *_: Any) -> None:
        state: Any = wrapped._get_fsdp_state() if isinstance(wrapped, FSDPModule) else wrapped
        if state._is_root is None:
            raise ParamError(
                "model",
                f"{name} was called before the first forward of the whole model, in which FSDP learns its root; call "
                "the model itself first, such as model(**batch) under torch.no_grad()",
            )
        for hook in hooks:  # from now on they would only take time
            hook.remove()
        hooks.clear()

    for full_name, module in wrapped.named_modules():
        name = plain_name(full_name, wrapped)
        if name in sharded:
            hooks.append(module.register_forward_pre_hook(partial(check, name), prepend=True))
