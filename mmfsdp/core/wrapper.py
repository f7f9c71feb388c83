"""Define what planning and wrapping ask of each of torch's data-parallel wrappers.

`Backend.load` returns the object of one: FSDP2's is in fsdp2.py, those of FSDP1 and DDP are in mmfsdp/backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..params import FSDPParams
from .group import join_tied
from .plan import WrapPlan
from .trace import Trace


class Fill(Protocol):
    """Fills what is on the meta device with rank 0's weights."""

    def __call__(self, parts: Sequence[str], mesh: DeviceMesh | None = None) -> None:
        """Fill the modules or parameters of these names.

        mesh: the mesh over which the parameters are sharded next, so that each rank needs the rows of its shard only.
        """


class Wrapper(ABC):
    """One of torch's data-parallel wrappers. What it makes of a unit in bytes is said by its `UnitRules`."""

    @abstractmethod
    def wrap(
        self,
        model: nn.Module,
        plan: WrapPlan,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        replicated: set[nn.Parameter],
        fill: Fill,
    ) -> nn.Module:
        """Wrap a model, and return it.

        Args:
            model: The plain model, in place of which or around which the wrapper stands.
            plan: Its plan.
            device: The device of this rank.
            mesh: The mesh of `make_mesh`.
            replicated: Parameters that stay whole on every rank.
            fill: Fills the modules of these names, if they are on the meta device, with rank 0's weights.
        """

    def groups(self, model: nn.Module, groups: list[list[str]], trace: Trace) -> tuple[list[list[str]], set[str]]:
        """Return the groups that the wrapper can make units of, and the names of parameters that it cannot shard."""
        return join_tied(model, groups, trace), set()

    def trained_too(
        self, model: nn.Module, params: FSDPParams, groups: list[list[str]], replicated: set[str], trace: Trace
    ) -> list[str]:
        """Return the names of frozen parameters whose gradients it computes as well."""
        return []

    def generate(
        self, wrapped: nn.Module, model: nn.Module, plan: WrapPlan, device: torch.device
    ) -> Callable[..., Any]:
        """Return the model's `generate`, which may gather what the wrapper's forward would."""
        generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
        return generate
