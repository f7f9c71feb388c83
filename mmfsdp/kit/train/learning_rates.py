"""Learning rates by part: which parameters `train.lr_for` gives which peak learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ...core.plan import Param, WrapPlan
from ...own.calls import OwnCodeError, call_own
from ...params import ParamError, RunParams, Schedule, TrainParams
from ...params.in_words import count
from ...params.own import OwnCode, path_of
from ..models.kinds import kind_of

SCHEDULE = "train.schedule"
OTHERS = "all others"


@dataclass(frozen=True)
class RateGroup:
    """The trainable parameters that share a learning rate."""

    pattern: str
    """The pattern in `train.lr_for`; empty for parameters that no pattern matches, which have `train.lr`."""
    lr: float
    names: tuple[str, ...]
    numel: int

    def __str__(self) -> str:
        return f"{self.lr:g} for {self.pattern or OTHERS} ({len(self.names)} parameters, {count(self.numel)})"


def pattern_of(names: Sequence[str], patterns: Sequence[str]) -> str:
    """Return the last pattern that matches one of a parameter's names, which has several if it is tied; or ""."""
    for pattern in reversed(patterns):
        if any(fnmatchcase(name, pattern) for name in names):
            return pattern
    return ""


def schedule_factor(choice: Schedule | OwnCode, done: int, steps: int) -> float:
    """Return the factor of the peak learning rate after `done` of `steps` steps since the warm-up.

    Raises OwnCodeError for a person's own that fails, or that returns no finite number from 0.
    """
    if isinstance(choice, Schedule):
        return choice.factor(done, steps)
    factor = call_own(SCHEDULE, choice, done, steps)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
        words = f"{path_of(choice)} returned {factor!r} for ({done}, {steps}); return the factor of train.lr, a finite "
        raise OwnCodeError(SCHEDULE, f"{words}number from 0")
    return float(factor)


def try_schedule(train: TrainParams) -> list[float]:
    """Return the factors of the first step after the warm-up, of one in the middle, and of the last.

    Raises OwnCodeError as `schedule_factor`.
    """
    steps = train.steps - train.warmup_steps
    return [schedule_factor(train.schedule, done, steps) for done in (0, steps // 2, max(0, steps - 1))]


def spell_out_rates(model: nn.Module, params: RunParams) -> TrainParams:
    """Return the training's parameters with the parts of a model of transformers in `lr_for` as patterns of names."""
    spelled_out: dict[str, float] = {}
    for pattern, lr in params.train.lr_for.items():
        try:
            patterns = kind_of(params.model).freeze_patterns(model, (pattern,))
        except ParamError as error:
            raise ParamError("train.lr_for", error.message) from None
        for each in patterns:
            spelled_out.pop(each, None)  # the last that matches decides, so it goes to the end
            spelled_out[each] = lr
    return params.train.change(lr_for=spelled_out)


def rate_groups(plan: WrapPlan, train: TrainParams) -> list[RateGroup]:
    """Return the trainable parameters of a plan by their learning rate, those of `train.lr` first.

    Raises ParamError for a pattern that decides on no trainable parameter, unless other parameters train in other
    phases (`train.freeze_from`), and for units of FSDP1 that would need two.
    """
    patterns = list(train.lr_for)
    trainable: dict[str, list[Param]] = {"": []}
    for pattern in patterns:
        trainable[pattern] = []
    for unit in plan.units:
        here = {p.name: pattern_of((p.name, *p.aliases), patterns) for p in unit.params if p.trainable}
        rates = {train.lr_for.get(pattern, train.lr) for pattern in here.values()}
        if len(rates) > 1 and plan.fsdp.use_orig_params is False:
            words = f"{unit.name} has parameters of {len(rates)} learning rates, and is one flat parameter; "
            raise ParamError("train.lr_for", words + "set fsdp.use_orig_params to true")
        for p in unit.params:
            if p.trainable:
                trainable[here[p.name]].append(p)
    groups = []
    for pattern, params in trainable.items():
        if pattern and not params and not train.freeze_from:
            raise ParamError("train.lr_for", f"{pattern!r} {_why_none(pattern, plan)}")
        if params:
            names = tuple(p.name for p in params)
            groups.append(RateGroup(pattern, train.lr_for.get(pattern, train.lr), names, sum(p.numel for p in params)))
    return groups


def _why_none(pattern: str, plan: WrapPlan) -> str:
    """Return why no trainable parameter has the learning rate of a pattern."""
    matched = [p for name, p in plan.by_name.items() if fnmatchcase(name, pattern)]
    if not matched:
        return "matches no parameter; patterns are of parameter names, as in model.freeze"
    if not any(p.trainable for p in matched):
        return f"matches only frozen parameters, such as {matched[0].name}; remove it, or change model.freeze"
    return "has no effect, since later patterns match all that it matches; remove it, or move it down"


def rates_line(plan: WrapPlan, train: TrainParams) -> str:
    """Return the learning rates of a plan's parameters in a line; empty without `lr_for`. Raises as `rate_groups`."""
    if not train.lr_for:
        return ""
    return "learning rates: " + ", ".join(map(str, rate_groups(plan, train)))
