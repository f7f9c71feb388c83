"""Freeze parameters by name patterns: `requires_grad` is set here and nowhere else."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..params import ParamError
from ..params.model import freeze_patterns
from .names import ancestors


@dataclass(frozen=True)
class FreezeReport:
    """Names of the frozen and of the trainable parameters, in the model's order; a tied one by its first name."""

    frozen: tuple[str, ...]
    trainable: tuple[str, ...]


def freeze(model: nn.Module, patterns: tuple[str, ...] | list[str]) -> FreezeReport:
    """Freeze the parameters whose names match, in place.

    A tied parameter matches by each of its names. Parameters that no pattern matches stay as they are.

    Args:
        model: The model, before it is wrapped.
        patterns: Shell-like patterns of parameter names (`*` also matches dots), applied in order, as in a .gitignore.
            A pattern that begins with `!` makes parameters trainable again. The name of a recipe (`params.RECIPES`:
            flamingo, llava_stage1, ...) stands for its patterns.

    Returns:
        The names of the frozen and of the trainable parameters, in the model's order.

    Raises:
        ParamError: If a pattern matches no parameter, or if nothing is left to train.
    """
    if patterns is None:  # ModelParams.freeze may be
        raise ParamError(
            "freeze", "None is no list of patterns; give some, or those of a run: params.model.frozen_patterns"
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in freeze_patterns(patterns):
        wanted = pattern.removeprefix("!")
        matched = [name for name in named if fnmatchcase(name, wanted)]
        if not matched:
            raise ParamError("freeze", f"{pattern!r} matches no parameter{_near(wanted, named)}")
        for name in matched:
            # In the order of the patterns: the last that matches decides.
            if named[name].is_floating_point():  # whole-number weights of quantized layers cannot train
                named[name].requires_grad_(pattern.startswith("!"))
    frozen = []
    trainable = []
    # Without duplicates: a tied parameter is listed once, by its first name.
    for name, p in model.named_parameters():
        if p.requires_grad:
            trainable.append(name)
        else:
            frozen.append(name)
    if frozen and not trainable:
        raise ParamError("freeze", f"{list(patterns)} leaves nothing to train; add a pattern such as '!{frozen[-1]}'")
    return FreezeReport(tuple(frozen), tuple(trainable))


def train_mode(model: nn.Module) -> None:
    """Set train mode for a model, wrapped or not, but keep its frozen modules in eval mode.

    `model.train()` would switch on their dropout, and frozen batch norms would change their running statistics.
    """
    model.train()
    for module in frozen_modules(model):
        module.eval()


def frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that have parameters and whose parameters are all frozen."""
    if next(model.parameters(), None) is None:
        return
    if not any(p.requires_grad for p in model.parameters()):
        yield model
        return
    for child in model.children():
        yield from frozen_modules(child)


def _near(pattern: str, names: dict[str, nn.Parameter]) -> str:
    """Return the end of a message: the names, or the modules followed by .*, that look most like the pattern."""
    modules: set[str] = set()
    for name in names:
        modules.update(f"{module}.*" for module in ancestors(name) if module)
    near = difflib.get_close_matches(pattern, sorted(modules) + list(names), n=3, cutoff=0.5)
    if near:
        return "; near ones are " + ", ".join(near)
    return f"; the first parameter is {next(iter(names), 'absent')}"
