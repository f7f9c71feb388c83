"""Find in a wrapped model what its plan does not show: switches of torch that somebody has set on its units."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...core.guards import some, warning
from ...core.names import plain_name
from ...core.plan import WrapPlan
from ...core.reshard import parameter_groups
from ...lint.cost import reentrant_layers
from ...params.findings import Finding

NO_PICTURE_PAGE = "notebooks/reference/no_picture.md"


def lint_switches(model: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Find the switches that make a step wrong, or gather more than it need. plan: the wrapped model's."""
    trainable = [unit.name for unit in plan.sharded_units if any(p.trainable for p in unit.params)]
    frozen = any(not p.trainable for p in plan.params)
    if frozen and len(trainable) > 1 and reduces_unused(model):
        yield warning(
            "reduces-unused",
            "set_reduce_scatter_unused_params(True) is set, and a part of the model is frozen: a unit whose inputs "
            "require no gradient on one rank, as without a picture, is reduced later there than on the others. The "
            f"gradients of two units of equal size are then mixed without an error (of those here: {some(trainable)}), "
            f"and units of other sizes stop the ranks; set it to False, and give batches a picture: {NO_PICTURE_PAGE}",
        )
    if twice := gathered_twice(model):
        yield warning(
            "reentrant-prefetch",
            f"{some(twice)}: checkpointed with use_reentrant=True, so forward hooks run again in backward, and gather "
            "what set_modules_to_forward_prefetch() names once more, for nothing; switch activation checkpointing on "
            'with {"use_reentrant": False}, or take transformers 5.23',
        )


def gathered_twice(model: nn.Module) -> list[str]:
    """Return the units of FSDP2 that prefetch others each time that reentrant checkpointing runs them again."""
    again = {id(module) for module in reentrant_layers(model) if hooks_run_again(module)}
    names = []
    for name, module in model.named_modules():
        # Private in torch; read in torch 2.11 to 2.15.
        if id(module) in again and isinstance(module, FSDPModule):
            if module._get_fsdp_state()._states_to_forward_prefetch:  # type: ignore[attr-defined]
                names.append(plain_name(name, model))
    return names


def hooks_run_again(layer: nn.Module) -> bool:
    """Return True if transformers checkpoints the call of a layer, with its hooks: in versions before 5.23."""
    for kind in type(layer).__mro__:
        if kind.__name__ == "GradientCheckpointingLayer":
            return "__call__" in vars(kind)
    return False


def reduces_unused(model: nn.Module) -> bool:
    """Return True if torch's `set_reduce_scatter_unused_params(True)` (torch 2.13) was called on a unit of FSDP2."""
    # The attribute is private in torch; it was read in torch 2.13 to 2.15. Earlier ones have neither.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                if getattr(group, "reduce_scatter_unused_params", False):
                    return True
    return False
