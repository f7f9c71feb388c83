"""Trace the order in which modules run, and the frozen weights that backward passes through.

With an example, forward runs on fake parameters: shapes only, no memory and no arithmetic. Without one, modules are
assumed to run in the order in which they were registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..params import FSDPParams
from .fake_tensors import RealValues, copy_inputs, fake_mode, fake_model, tensors_of
from .names import ancestors, plain_name, tied_names
from .precision import cast_to_weights


@dataclass
class Trace:
    """Record of one forward, by module and parameter name. Times only have an order, no unit."""

    forward_start: dict[str, float] = field(default_factory=dict)
    """Time at which a module's first forward begins."""
    forward_end: dict[str, float] = field(default_factory=dict)
    """Time at which a module's last forward ends."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of times that a module's forward runs; without an example, 1 for each module that has a forward."""
    grad_flow: set[str] = field(default_factory=set)
    """Frozen parameters (first names) that backward passes through."""
    returns_gradient: set[str] = field(default_factory=set)
    """Modules whose output requires a gradient."""
    uses: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    """Uses of each parameter, by its first name: for each use, the set of modules whose forward was running."""

    def first_start(self, modules: Iterable[str]) -> float:
        """Return the time at which the first of these modules begins; 0 if one of them does not run."""
        return min(self.forward_start.get(name, 0) for name in modules)

    def last_end(self, modules: Iterable[str]) -> float:
        """Return the time at which the last of these modules ends; 0 if none runs."""
        return max(self.forward_end.get(name, 0) for name in modules)


def trace(
    model: nn.Module,
    example: dict[str, Any] | None,
    also_trainable: Collection[str] = (),
    *,
    fsdp: FSDPParams | None = None,
) -> Trace:
    """Run `model(**example)` with fake parameters; without an example, go by the order of registration.

    Args:
        model: The plain model, with or without weights; it is not changed.
        example: Keyword arguments of one forward, or None.
        also_trainable: Names of frozen parameters that count as trainable.
        fsdp: With its mixed precision, inputs are cast to the dtype of the weights, as those of units are.

    Returns:
        The order in which modules run, how often they run, and the frozen parameters that backward passes through.

    Raises:
        ValueError: If the model does not take the example.
    """
    if example is None:
        return trace_registration(model, also_trainable=also_trainable)
    mode = fake_mode()
    model = fake_model(model, mode)
    if fsdp is not None:
        cast_to_weights(model, fsdp)
    for name in also_trainable:
        model.get_parameter(name).requires_grad_(True)
    inputs = copy_inputs(example, mode)
    recorder = _Recorder(model)
    for name, module in model.named_modules(remove_duplicate=False):
        module.register_forward_pre_hook(partial(recorder.before_forward, name))
        module.register_forward_hook(partial(recorder.after_forward, name))
    try:
        # Autograd must be on even if the caller has switched it off: grad flow is read from `requires_grad`.
        with mode, RealValues(), recorder, torch.enable_grad():
            model(**inputs)
    except Exception as error:
        # Fake tensors have no values, so a forward that branches on them fails here, and only here.
        raise ValueError(
            f"example: the model's forward failed on it ({type(error).__name__}: {error}); correct it, or, if the "
            "forward depends on values that it has computed with parameters, leave the example out: modules are then "
            "assumed to run in the order of registration"
        ) from error
    _drop_bypassed_modules(model, recorder.trace)
    return recorder.trace


def trace_registration(model: nn.Module, *, also_trainable: Collection[str] = ()) -> Trace:
    """Assume that modules run in the order in which they were registered.

    All that comes after something trainable then has grad flow, except embeddings: their inputs are integers, which
    have no gradient.
    """
    trace = Trace()
    modules = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[plain_name(name, model)] = module
    for time, (name, module) in enumerate(modules.items()):
        trace.forward_start[name] = time
        trace.calls[name] = int(has_forward(module))
        # A module ends after all modules inside it, and these end inner ones first: the fraction falls with the depth.
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            trace.forward_end[".".join(parts[:depth])] = time + 1 / (depth + 2)
    first_names = {p: plain_name(name, model) for name, p in model.named_parameters()}
    after_trainable = False
    # By all names: the matrix of a head that is tied to an embedding does have grad flow.
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad or plain_name(name, model) in also_trainable:
            after_trainable = True
        owner = model.get_submodule(name.rpartition(".")[0])
        if output_made_to_require_grad(owner):
            after_trainable = True
            trace.returns_gradient.update(ancestors(plain_name(name, model)))
        if not p.requires_grad:
            # A module may use its own weights after trainable ones inside it, adapters for example.
            around_trainable = need_gradient(list(owner.parameters()))
            if not around_trainable and (not after_trainable or isinstance(owner, nn.Embedding)):
                continue
            trace.grad_flow.add(first_names[p])
        # Every module around it returns what was computed with it.
        trace.returns_gradient.update(ancestors(plain_name(name, model)))
    return trace


class _Recorder(TorchFunctionMode):
    """Record when modules run, and each torch function that takes a parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.clock = count()
        self.running: list[str] = []
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        # Casts and views of a weight stand for the weight. Keep them alive, so that their ids are not used again.
        self.derived: dict[int, str] = {}
        self.keep_alive: list[torch.Tensor] = []

    def before_forward(self, name: str, *_: Any) -> None:
        """Note the start. A forward pre-hook."""
        self.trace.forward_start.setdefault(name, next(self.clock))
        self.trace.calls[name] += 1
        self.running.append(name)

    def after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note the end, and whether the output requires a gradient. A forward hook."""
        self.trace.forward_end[name] = next(self.clock)
        self.running.remove(name)
        if need_gradient(output):
            self.trace.returns_gradient.add(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = tensors_of(out)
        if not outputs:
            # Asking for a shape or a dtype is not a use.
            return out
        inputs = tensors_of((args, kwargs))
        frozen_weights = []
        for tensor in inputs:
            name = self.parameters.get(id(tensor))
            if name is not None:
                self.trace.uses.setdefault(name, set()).add(frozenset(self.running))
            name = name or self.derived.get(id(tensor))
            if name is not None and not tensor.requires_grad:
                frozen_weights.append(name)
        # If the output requires a gradient, the frozen weight is used together with something that does.
        if need_gradient(outputs):
            self.trace.grad_flow.update(frozen_weights)
        elif frozen_weights and len(inputs) == len(frozen_weights):
            for tensor in outputs:
                self.derived.setdefault(id(tensor), frozen_weights[0])
                self.keep_alive.append(tensor)
        return out


def _drop_bypassed_modules(model: nn.Module, trace: Trace) -> None:
    """Count a module as never called if a parameter inside it is used while its forward does not run.

    An FSDP unit of that module would not gather the parameter in time, so a module further up has to, which does run:
    peft's adapters of fused experts use their matrices before they call them.
    """
    names = tied_names(model)
    for name, uses in trace.uses.items():
        owners = {alias.rpartition(".")[0] for alias in names.get(name, [name])}
        for running in uses:
            if owners & running:
                continue  # used inside its module's forward
            for module in owners:
                while module not in running:  # the root always is
                    trace.calls[module] = 0
                    module = module.rpartition(".")[0]


def has_forward(module: nn.Module) -> bool:
    """Return False for a mere container, such as ModuleList."""
    return type(module).forward is not nn.Module.forward


def output_made_to_require_grad(module: nn.Module) -> bool:
    """Return True for an embedding after `enable_input_require_grads()`, by the name of its hook in all libraries."""
    hooks = module._forward_hooks.values()
    return any(getattr(hook, "__name__", "").startswith("make_inputs_require_grad") for hook in hooks)


def need_gradient(value: Any) -> bool:
    """Return True if a tensor in nested collections requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors_of(value))
