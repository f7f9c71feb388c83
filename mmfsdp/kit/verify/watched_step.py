"""Watch what a step does, by hooks: ModuleModes, WatchedPrecision, and WatchedStep for a loop of one's own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...core.step_batch import IGNORED_LABEL

LOW_PRECISION = {torch.bfloat16, torch.float16}


def has_modes(module: nn.Module) -> bool:
    """Return True for a module that computes otherwise in eval mode: dropout, and norms with running statistics."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _NormBase) and module.running_mean is not None


class ModuleModes:
    """Note the mode in which dropout and batch norms run, and whether the model is in train mode, while entered.

    Only in a forward that begins with gradients enabled: an evaluation may be in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modes: dict[str, set[bool]] = {}
        """Modes of each module by its name: True for train mode."""
        self.of_model: list[bool] = []
        """Mode of the model itself in each of its forwards."""
        self.watched = {name: module for name, module in model.named_modules() if has_modes(module)}
        self.handles: list[Any] = []
        self.depth = 0

    def __enter__(self) -> ModuleModes:
        self.handles.append(self.model.register_forward_pre_hook(self._begin))
        self.handles.append(self.model.register_forward_hook(self._end, always_call=True))
        for name, module in self.watched.items():
            self.handles.append(module.register_forward_pre_hook(self._note(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        self.depth += torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self.of_model.append(module.training)

    def _end(self, *_: Any) -> None:
        self.depth -= torch.is_grad_enabled()

    def _note(self, name: str) -> Any:
        def before_forward(module: nn.Module, _: Any) -> None:
            # A frozen part may run under no_grad inside of the model's forward.
            if self.depth or torch.is_grad_enabled():
                self.modes.setdefault(name, set()).add(module.training)

        return before_forward


class WatchedPrecision:
    """Note which modules compute in 16 bits, and what autocast casts, of all modules that run while it is entered."""

    def __init__(self) -> None:
        self.in_16_bits = False
        """A module has returned such a tensor."""
        self.autocast = False
        """A module has run under autocast."""
        self.cast: set[int] = set()
        """The ids of the frozen matrices in fp32 of modules that have run under autocast."""
        self.handles: list[Any] = []

    def __enter__(self) -> WatchedPrecision:
        self.handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            self.autocast = True
            for p in module.parameters(recurse=False):
                if p.dim() > 1 and p.dtype is torch.float32 and not p.requires_grad:
                    self.cast.add(id(p))

    def _after(self, _: nn.Module, args: Any, output: Any) -> None:
        dtypes = {leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        self.in_16_bits |= bool(dtypes & LOW_PRECISION)


class WatchedStep:
    """Watch one step of a plain model: its backwards, what is in the gradients, and when the optimizer steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.modes = ModuleModes(model)
        self.backwards: list[dict[str, Tensor]] = []
        """The gradient that each backward has computed, without what was there before."""
        self.left_over: list[str] = []
        """Parameters that had a gradient before the first backward."""
        self.dropped = False
        """A later backward found no gradient where an earlier one had left one, without a step in between."""
        self.steps = 0
        self.grads_at_step: dict[str, Tensor] = {}
        """The gradients with which the optimizer steps, themselves."""
        self.changed_later: list[str] = []
        """Parameters whose gradient was changed after the optimizer's step, but not set to zero."""
        self.tokens: list[int] = []
        """Label tokens of each forward with gradients."""
        self.handles: list[Any] = []
        self.in_backward = False
        self.since_step: set[str] = set()

    def __enter__(self) -> WatchedStep:
        for name, p in self.trainable.items():
            self.handles.append(p.register_hook(self._before_accumulation(name, p)))
        self.handles.append(self.model.register_forward_pre_hook(self._count_tokens, with_kwargs=True))
        self.handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        self.handles.append(self.optimizer.register_step_post_hook(self._after_step))
        self.modes.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.modes.__exit__(kind, error, tb)
        for handle in self.handles:
            handle.remove()
        for name, grad in self.grads_at_step.items():
            if grad._version != self._versions[name] and bool(grad.any()):
                self.changed_later.append(name)

    def _before_accumulation(self, name: str, p: nn.Parameter) -> Any:
        def hook(grad: Tensor) -> None:
            if not self.in_backward:
                self.in_backward = True
                self.backwards.append({})
                Variable._execution_engine.queue_callback(self._end_backward)
            has_grad = p.grad is not None and bool(p.grad.any())
            if len(self.backwards) == 1 and has_grad:
                self.left_over.append(name)
            if name in self.since_step and not has_grad:
                self.dropped = True
            self.backwards[-1][name] = grad.detach().clone()

        return hook

    def _end_backward(self) -> None:
        self.in_backward = False
        for name, grad in self.backwards[-1].items():
            if grad.any():
                self.since_step.add(name)

    def _count_tokens(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if torch.is_grad_enabled() and isinstance(labels, Tensor) and labels.dim() == 2:
            self.tokens.append(int((labels[:, 1:] != IGNORED_LABEL).sum()))

    def _before_step(self, *_: Any) -> None:
        self.steps += 1
        self.since_step.clear()

    def _after_step(self, *_: Any) -> None:
        self.grads_at_step = {name: p.grad for name, p in self.trainable.items() if p.grad is not None}
        self._versions = {name: grad._version for name, grad in self.grads_at_step.items()}

    @property
    def total(self) -> dict[str, Tensor]:
        """Return the sum of what all backwards have computed: the gradient before any clipping."""
        total: dict[str, Tensor] = {}
        for grads in self.backwards:
            for name, grad in grads.items():
                total[name] = total[name] + grad if name in total else grad
        return total
