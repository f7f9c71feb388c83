"""SeveralOptimizers: optimizers of different parameters as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ..params import ParamError
from .optimizer_states import READ_BY_KERNELS


class SeveralOptimizers(Optimizer):
    """Join optimizers, each of parameters of its own, so that a step, a schedule and a checkpoint take them for one.

    It has the groups of all of them, the same objects, in their order, and the states of all their parameters.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        """Raise ParamError if a parameter is in two of them, or if there are none."""
        self.optimizers = optimizers
        self._owner: dict[torch.Tensor | int, Optimizer] = {}
        """The optimizer of each parameter, and by its id that of each group without parameters."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"] or [id(group)]:
                    if p in self._owner:
                        shape = tuple(p.shape) if isinstance(p, torch.Tensor) else ()
                        words = f"a parameter of shape {shape} is in two of the optimizers; give each its own"
                        raise ParamError("optimizer", words)
                    self._owner[p] = optimizer
        if not optimizers:
            raise ParamError("optimizer", "there is none; give at least one")
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            states.update(optimizer.state)
        super().__init__([{"params": [torch.zeros(())]}], {})  # for torch's hooks; the groups are those below
        self.param_groups, self.state = groups, states
        self.defaults = {"fused": all(optimizer.defaults.get("fused") for optimizer in optimizers)}
        supported = (getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
        self._step_supports_amp_scaling = all(supported)  # torch's own name, which train_step looks at

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # torch puts new groups in their place when a state is loaded: each optimizer gets its own.
        self._groups = groups
        for optimizer in self.optimizers:
            optimizer.param_groups = [group for group in groups if self._owner_of(group) is optimizer]

    def _owner_of(self, group: dict[str, Any]) -> Optimizer | None:
        return self._owner.get(group["params"][0] if group["params"] else id(group))

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all parameters."""
        return self._states

    @state.setter
    def state(self, states: defaultdict[torch.Tensor, Any]) -> None:
        self._states = states
        for optimizer in self.optimizers:
            optimizer.state = states

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and states, as `load_state_dict` hands them over."""
        self.param_groups, self.state = state["param_groups"], state["state"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each make its step. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("closure: several optimizers make one step of the same gradients; give none")
        of_kernels: dict[str, Any] = {name: vars(self)[name] for name in READ_BY_KERNELS if name in vars(self)}
        for optimizer in self.optimizers:
            vars(optimizer).update(of_kernels)  # as train_step has set them
            try:
                optimizer.step()
            finally:
                for name in of_kernels:
                    del vars(optimizer)[name]
