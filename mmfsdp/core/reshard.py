"""Between two steps each unit is sharded and idle: free what is gathered, and end what an error has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._common_utils import TrainingState as FSDP1State
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from .model_record import record_of
from .names import modules_of
from .recompute import in_backward


def reshard(model: nn.Module, *, order_length: int = 0) -> None:
    """Free what forwards without a backward left unsharded, so that the next step gathers as every other does.

    Units that a forward has entered and not left become idle.

    order_length: entries of FSDP2's order of forward that a later backward still needs.
    """
    for module in modules_of(model):
        if isinstance(module, FSDPModule):
            end_forward(module)
            groups = parameter_groups(module)
            if any(group._all_gather_result is not None for group in groups):
                module.unshard()  # ends an all-gather that was started ahead of need for a forward that never came
            module.reshard()
            # torch 2.11 clears the order of forward in backward only; it would set the next backward's prefetch.
            del forward_order(module)[order_length:]
            for group in groups:
                group._post_forward_indices[:] = [i for i in group._post_forward_indices if i < order_length]
        elif isinstance(module, FullyShardedDataParallel) and module._is_root is not None:  # None: has never run
            # torch 2.11: FSDP1 has no public call for this.
            handle = module._handle
            if in_forward(module):  # in this state, torch would keep the views of the whole parameters
                module.training_state = FSDP1State.IDLE
                if handle is not None:
                    handle._training_state = HandleTrainingState.IDLE
            # Each call adds an event to the rate limiter of all-gathers, so call it only if there is something to free.
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                fsdp1._reshard(module, handle, True)


def in_forward(module: nn.Module | FSDPModule) -> bool:
    """Return True if a forward has entered this unit and not left it."""
    if isinstance(module, FSDPModule):
        return module._get_fsdp_state()._training_state is TrainingState.FORWARD
    if not isinstance(module, FullyShardedDataParallel):
        return False
    handle = module._handle
    if handle is None:
        return module.training_state is FSDP1State.FORWARD_BACKWARD
    return handle._training_state is HandleTrainingState.FORWARD


def end_forward(module: FSDPModule) -> None:
    """Make a unit of FSDP2 idle if a forward has entered it and not left it.

    A unit of several modules is left after the last of them. If only a part of the model runs, it may never be; then
    FSDP2 does not reshard it, and takes it for the root of the next forward.
    """
    if not in_forward(module):
        return
    state: Any = module._get_fsdp_state()
    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None
    for group in parameter_groups(module):
        group._training_state = TrainingState.IDLE


def drop_failed_step(model: nn.Module) -> bool:
    """Drop all gradients if an error has stopped a backward or a micro-batch of `train_step`. Return True if so."""
    record = record_of(model)
    failed = record.step_failed or any(backward_failed(root) for root in roots(model))
    if failed:
        drop_gradients(model)
        record.step_failed = False
    return failed


def drop_gradients(model: nn.Module) -> None:
    """Drop all gradients, also those that have not been reduced yet, and make each unit sharded and idle.

    For a step that an error has stopped. FSDP2 would never finish a backward again, and FSDP would add to the next step
    what the stopped one has not reduced.
    """
    for root in roots(model):
        if isinstance(root, FullyShardedDataParallel):
            reset_fsdp1(root)
        else:
            reset_fsdp2(root)
    model.zero_grad(set_to_none=True)


def roots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that FSDP1 or FSDP2 took for a root in their first forward."""
    for module in modules_of(model):
        if isinstance(module, FSDPModule):
            if module._get_fsdp_state()._is_root:
                yield module
        elif isinstance(module, FullyShardedDataParallel) and module._is_root:
            yield module


def backward_failed(root: nn.Module) -> bool:
    """Return True if an error has stopped a backward through this root: it has begun, and does not run."""
    if in_backward():
        return False
    if isinstance(root, FSDPModule):
        return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
    if not isinstance(root, FullyShardedDataParallel) or not root._is_root:  # None: has never run
        return False
    in_backward_states = (HandleTrainingState.BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)
    return any(state._handle and state._handle._training_state in in_backward_states for state in root._all_fsdp_states)


def reset_fsdp2(root: Any) -> None:
    """Make the units below a root of FSDP2 sharded and idle, without gradients."""
    if hasattr(root, "reset_iter_state"):  # torch 2.14
        root.reset_iter_state()
    else:
        reset_older_fsdp2(root)
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in parameter_groups(module):
            for p in group.fsdp_params:
                p.unsharded_accumulated_grad = None  # of earlier micro-batches, in the dtype of the reduction
                if hasattr(p, "_unsharded_param"):  # not there before its first all-gather
                    p._unsharded_param.grad = None


def reset_older_fsdp2(root: Any) -> None:
    """Do what `reset_iter_state` does. For torch 2.11 to 2.13."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # nothing is in flight, so each tensor below can go
    state = root._get_fsdp_state()
    communication = state._comm_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for unit in state._state_ctx.all_states:
        unit._training_state = TrainingState.IDLE
        unit._modules_to_run_forward.clear()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in parameter_groups(module):
            group._training_state = TrainingState.IDLE
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._partial_reduce_output = None  # of replicas that have not been added up
            if group._all_gather_result is not None:
                group.unshard()
                group.wait_for_unshard()
            group._post_forward_indices.clear()
            group.reshard()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def reset_fsdp1(root: FullyShardedDataParallel) -> None:
    """Make the units below a root of FSDP1 sharded and idle, without gradients."""
    for state in root._all_fsdp_states:
        handle = state._handle
        if handle is not None:
            flat: Any = handle.flat_param
            if hasattr(flat, "_saved_grad_shard"):  # reduced, and not yet handed to the optimizer
                del flat._saved_grad_shard
            flat.grad = None
            flat._post_backward_called = False
    # As at the end of a backward: reshards, removes hooks and sets each state.
    fsdp1._post_backward_final_callback(root, root)


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of parameters of a module: one, or several on several meshes in newer torch versions."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def forward_order(model: nn.Module) -> list[Any]:
    """Return the list in which FSDP2 notes the units that ended forward; empty for others."""
    if not isinstance(model, FSDPModule):
        return []
    return getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", [])  # not there before the first forward
