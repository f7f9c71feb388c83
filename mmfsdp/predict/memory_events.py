"""Memory events of a plan: which bytes of activations and gradients one micro-step allocates, and when.

Forward and backward of an example really run, with autograd, checkpointing and the dtypes of the plan, but on fake
parameters, which have shapes and no storage. Hooks stand where the wrapper will have its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from ..core.fake_tensors import ASK_DEVICE, CPU, RealValues, aten, copy_inputs, fake_mode, fake_model, tensors_of
from ..core.micro_batch import is_scalar_loss, loss_of
from ..core.plan import MemoryEvent, Unit, UnitKind, WrapPlan
from ..core.precision import cast_inputs
from ..core.quantize import quantized_copy
from ..core.recompute import checkpoint_activations, in_backward
from ..core.unit_rules import with_bytes
from ..core.units import torch_dtype
from ..core.wrap import modules_to_compile
from ..lint.cost import loss_in_pieces_of_torch, without_gradient
from ..params import ParamError
from .gathers import with_gathers
from .levels import Levels
from .work import Work, WorkCounter

BEGINS = {"pre_forward": "forward", "pre_backward": "backward"}
ENDS = {"post_forward": "forward", "post_backward": "backward", "no_gradient": "backward"}
"""Events between which operators are those of a unit, and the pass that they begin or end. Both may run at once."""
TORCHS_LOSS = "torch_nn::_linear_cross_entropy"
"""Beginning of the names of the operators of `torch.nn.functional.linear_cross_entropy` (torch 2.13)."""


class Recording(NamedTuple):
    """The recording of one micro-step, for a plan."""

    memory_events: tuple[MemoryEvent, ...]
    levels: Levels
    """Bytes held after each allocation, of which the events have the largest."""
    work: Work
    operators: int
    """Operators that were called, views included: the seconds that a recording takes grow with them."""
    unused: tuple[str, ...]
    """Trainable parameters (first names) without a gradient."""
    reduced_twice: frozenset[int]
    """Orders of units that run backward several times, first without gradients."""
    recomputed: frozenset[int]
    """Orders of frozen units that backward computes with. Those without grad flow are recomputed: checkpoints of the
    model's own, for example."""
    without_loss: bool
    """The forward returned no loss, and backward began at the sum of its outputs."""
    torchs_losses: frozenset[torch.dtype]
    """Dtypes of the hidden states with which `torch.nn.functional.linear_cross_entropy` computed a loss in pieces."""


def record_memory(model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> Recording:
    """Run forward and backward on fake tensors, as the plan computes them.

    Replicated units have events, too, at which nothing is gathered: the recording is the same for every policy.

    Args:
        model: The plain model, with or without weights; it is not changed.
        plan: Its units, with the dtypes in which they compute.
        example: Keyword arguments of a forward. Backward begins at the loss, as in `train_step`; where the forward
            returns none, at the sum of all its outputs.

    Returns:
        The recording of one micro-step: its memory events, its operations, and which parameters get no gradient.

    Raises:
        ValueError: If the model does not take the example.
        ParamError: If a module cannot be checkpointed, since it computes other tensors when it runs again.
    """
    mode = fake_mode()
    buffer_dtype = plan.fsdp.buffer_dtype.to_torch() if plan.fsdp.buffer_dtype else None
    dtypes = {}  # in which parameters are computed with; DDP leaves casting to autocast
    for unit in plan.units:
        for p in unit.params:
            dtypes[p.name] = torch_dtype(unit.computed_dtype(p) if plan.rules.shards else p.dtype)
    # In training mode: dropout and batch norm then keep tensors for backward.
    fake = fake_model(quantized_copy(model, plan.fsdp), mode, dtypes, buffer_dtype).train()
    inputs = copy_inputs(example, mode)  # kept to the end, so that no new storage has the address of an input's
    for unit in plan.units:
        # In FSDP1, frozen parameters of a mixed unit get gradients, too: all are views of one flat parameter.
        for p in plan.rules.gradient_params(unit):
            fake.get_parameter(p.name).requires_grad_()
    checkpoint_activations(fake, plan.fsdp, preserve_rng_state=False)
    recorder = MemoryRecorder(plan, fake, inputs)
    autocast: Any = nullcontext()
    if plan.fsdp.autocast_precision:
        autocast = torch.autocast("cpu", dtype=plan.fsdp.autocast_precision.to_torch())
    try:
        with mode, RealValues(), recorder:
            with autocast:
                output = fake(**inputs)
            loss = loss_of(output)
            without_loss = not is_scalar_loss(loss)
            start = sum_of_outputs(output) if without_loss else loss.float() * torch.ones(())  # the step's weight
            del output, loss  # a training step does not keep the output through backward either
            if start is not None and start.requires_grad:
                start.backward()
            recorder.finish()
    except CheckpointError as error:
        # When a language model with its embedding runs again, it sees the text without the features of the pictures.
        choice = plan.fsdp.activation_checkpointing
        problem = (
            f"{choice!r} checkpoints a module that computes other tensors when it runs again; name other modules, such "
            "as the layers inside it, or set it to none"
        )
        raise ParamError("activation_checkpointing", problem) from error
    except Exception as error:
        raise ValueError(f"example: the model's step failed on it ({type(error).__name__}: {error})") from error
    twice, recomputed = frozenset(recorder.reduced_twice), frozenset(recorder.recomputed)
    unused = tuple(recorder.unused)
    losses = frozenset(recorder.torchs_losses)
    return Recording(
        tuple(recorder.events),
        recorder.levels,
        recorder.counter.work,
        recorder.operators,
        unused,
        twice,
        recomputed,
        without_loss,
        losses,
    )


def with_recording(plan: WrapPlan, recording: Recording) -> WrapPlan:
    """Return the plan with its memory events, and with units that know which parameters get no gradient."""
    units = list(plan.units)
    if plan.rules.shards:  # DDP has a place for each gradient in its buckets
        for i, unit in enumerate(units):
            params = tuple(replace(p, unused=p.name in recording.unused) for p in unit.params)
            twice = plan.rules.by_parameter and unit.order in recording.reduced_twice
            again = unit.recomputed
            if unit.sharded and not unit.grad_flow:
                again = again or unit.order in recording.recomputed
            unit = replace(unit, params=params, reduced_twice=twice, recomputed=again)
            units[i] = with_bytes(unit, plan.fsdp, plan.shard)
    lint = (*plan.lint, *without_gradient(recording.unused), *loss_in_pieces_of_torch(recording.torchs_losses))
    plan = replace(plan, units=tuple(units), lint=lint)
    plan = replace(plan, memory_events=recording.memory_events, without_loss=recording.without_loss)
    return with_gathers(replace(plan, **vars(recording.work)))


def sum_of_outputs(output: Any) -> torch.Tensor | None:
    """Return the sum of all outputs that require a gradient, or None."""
    total: torch.Tensor | None = None
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    return total


class MemoryRecorder(TorchDispatchMode):
    """Counts the storages that operators allocate until they are freed, and notes the counts at each event."""

    def __init__(self, plan: WrapPlan, model: nn.Module, inputs: dict[str, Any]):
        super().__init__()
        self.plan = plan
        self.events: list[MemoryEvent] = []
        self.counter = WorkCounter(model)
        to_compile = set(modules_to_compile(plan))
        self.can_be_compiled = {unit.order for unit in plan.units if to_compile & set(unit.modules)}
        self.running: set[tuple[int, str]] = set()  # those of them that run, by the pass
        self.operators = 0
        self.allocated = self.gradients = 0
        self.levels = Levels()
        self.operator: Any = None  # that was called last
        self.hold()
        self.storages = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}  # at rest
        for tensor in tensors_of(inputs):
            self.allocate(tensor)
        self.unused = {p.name: None for p in plan.params if p.trainable}
        self.reduced_twice: set[int] = set()
        self.recomputed: set[int] = set()
        self.torchs_losses: set[torch.dtype] = set()
        self.order_by_storage: dict[int, int] = {}  # of frozen weights that backward is not known to need
        # State of units, by order.
        self.params: dict[int, list[nn.Parameter]] = {}
        self.modules_to_run: dict[int, set[str]] = {}  # of units in forward
        self.in_backward: dict[int, bool] = {}  # False once its backward is over
        self.without_gradient: set[int] = set()
        self.frees_reduce_input = plan.rules.by_parameter and every_backward_frees_reduce_input()
        # FSDP1: units whose backward ends with the last of their gradients.
        self.end_with_gradients: set[int] = set()
        for unit in plan.units:
            self.register_hooks(unit, model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, getattr(func, "_overloadpacket", None)
        if operator is ASK_DEVICE:  # most calls of a forward
            return CPU
        self.operators += 1
        if self.order_by_storage and in_backward():
            for tensor in tensors_of((args, kwargs)):
                order = self.order_by_storage.get(tensor.untyped_storage()._cdata)
                if order is not None:
                    self.recomputed.add(order)
        output = func(*args, **kwargs)
        if func.name().startswith(TORCHS_LOSS) and not in_backward():
            self.torchs_losses.add(args[0].dtype)
        self.counter.add(func, args, kwargs, output, in_unit=bool(self.running))
        self.operator = func
        for tensor in tensors_of(output):
            self.allocate(tensor)
        if operator in (aten.convolution, aten.convolution_backward):
            inputs, weight = args[:2] if operator is aten.convolution else args[1:3]
            scratch = weight.nbytes  # oneDNN on CPUs computes with packed copies, which it frees immediately
            if inputs.shape[1] > 4:  # it packs no input of so few channels, such as a picture
                scratch += inputs.nbytes
            self.hold(scratch)
        return output

    def allocate(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self.storages:  # a view, or changed in place
            return
        self.storages.add(address)
        # Fake storages hold no memory, but they live as long as real ones would.
        weakref.finalize(storage, self.free, address, nbytes)
        self.allocated += nbytes
        self.hold()

    def hold(self, scratch: int = 0) -> None:
        """Note what is held now, with so many bytes that the operator frees immediately."""
        held = self.allocated + scratch
        self.levels.add(self.operator, held, held - self.gradients)

    def free(self, address: int, nbytes: int) -> None:
        """Count a storage out."""
        self.storages.discard(address)
        self.allocated -= nbytes

    def note(self, event: str, order: int) -> None:
        """Note the counts, and begin to look for the peak before the next event."""
        self.counter.fusion.end()
        if order in self.can_be_compiled:
            if event in BEGINS:
                self.running.add((order, BEGINS[event]))
            elif event in ENDS:
                self.running.discard((order, ENDS[event]))
        self.events.append(MemoryEvent(event, order, *self.levels.end(), self.allocated, self.gradients))
        if event == "post_backward":  # the wrapper reduces the gradients and frees them
            self.drop_gradients(self.params[order])
        self.operator = None
        self.hold()

    def register_hooks(self, unit: Unit, model: nn.Module) -> None:
        """Register the hooks that note when the unit's forward, backward and gradients come."""
        for name in unit.modules:
            module = model.get_submodule(name)
            if unit.compute_dtype and self.plan.rules.shards:
                cast = partial(cast_inputs, torch_dtype(unit.compute_dtype))
                module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
            module.register_forward_pre_hook(partial(self.pre_forward, unit), with_kwargs=True, prepend=True)
            module.register_forward_hook(partial(self.post_forward, unit, name))
        if unit.kind is UnitKind.FROZEN and self.plan.rules.shards:
            for p in unit.params:
                self.order_by_storage[model.get_parameter(p.name).untyped_storage()._cdata] = unit.order
        self.params[unit.order] = []
        for p in self.plan.rules.gradient_params(unit):
            parameter = model.get_parameter(p.name)
            self.params[unit.order].append(parameter)
            parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, unit, p.name))

    def pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Note that the unit's first module begins forward, and watch for the end of its backward."""
        if unit.order in self.modules_to_run:  # another module of the unit has begun
            return args, kwargs
        self.modules_to_run[unit.order] = set(unit.modules)
        self.note("pre_forward", unit.order)
        leaves, spec = tree_flatten((args, kwargs))
        indices = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if indices and torch.is_grad_enabled():
            # The unit's backward is over when its inputs have gradients, as for FSDP2's RegisterPostBackwardFunction.
            # Hooks on the inputs would wait for the gradients of other units that have the same inputs.
            inputs = [leaves[i] for i in indices]
            if self.plan.rules.flat and not self.params[unit.order]:
                # FSDP1 frees a frozen unit by hooks on its inputs, after the hooks of the unit that returned them
                # (_runtime_utils.py, _register_post_backward_reshard_only_hook): two units are gathered then.
                # It registers none where forward runs again in backward: they would keep its activations.
                if not in_backward():
                    register_multi_grad_hook(inputs, lambda _: self.post_backward(unit.order))
                return args, kwargs
            outputs = CallAfterBackward.apply(partial(self.post_backward, unit.order), *inputs)
            for i, tensor in zip(indices, outputs, strict=True):
                leaves[i] = tensor
        elif self.plan.rules.flat:
            # FSDP1 reduces when autograd adds to the flat gradient (_runtime_utils.py, _register_post_backward_hook);
            # FSDP2 leaves a unit without inputs that need gradients to the end of backward.
            self.end_with_gradients.add(unit.order)
        return tree_unflatten(leaves, spec)

    def post_forward(self, unit: Unit, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the unit's last module has ended forward, and watch for the start of its backward."""
        self.modules_to_run[unit.order].discard(name)
        ended = [unit.order]
        if not name:  # the model itself: this also ends units whose modules did not all run
            ended = list(self.modules_to_run)
        elif self.modules_to_run[unit.order]:
            return
        for order in ended:
            del self.modules_to_run[order]
            self.note("post_forward", order)
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.pre_backward(unit.order))

    def pre_backward(self, order: int) -> None:
        """Note that the unit's backward begins."""
        if not self.in_backward.get(order):
            self.in_backward[order] = True
            self.note("pre_backward", order)

    def gradient_ready(self, unit: Unit, name: str, parameter: nn.Parameter) -> None:
        """Count a parameter's gradient."""
        assert parameter.grad is not None
        self.unused.pop(name, None)
        self.gradients += parameter.grad.untyped_storage().nbytes()
        if not unit.sharded:  # DDP copies it into a bucket that is always allocated
            self.drop_gradients([parameter])
        elif unit.order in self.end_with_gradients and all(p.grad is not None for p in self.params[unit.order]):
            self.post_backward(unit.order)

    def post_backward(self, order: int) -> None:
        """Note that the unit's backward is over, with or without gradients."""
        params = self.params[order]
        without_gradient = params and self.plan.units[order].sharded and all(p.grad is None for p in params)
        # FSDP1's flat gradient comes when autograd has added up the gradients of all the unit's calls.
        is_over = self.in_backward.get(order) is False
        if is_over or (without_gradient and self.plan.rules.flat):
            return
        self.in_backward[order] = False
        if self.frees_reduce_input and self.plan.units[order].params and (without_gradient or not params):
            self.note("free_reduce_input", order)
        if without_gradient:
            self.without_gradient.add(order)
            self.note("no_gradient", order)
            return
        if order in self.without_gradient:
            self.reduced_twice.add(order)
        self.note("post_backward", order)

    def drop_gradients(self, params: list[nn.Parameter]) -> None:
        """Free gradients as the wrapper does after it has reduced or copied them."""
        for p in params:
            if p.grad is not None:
                self.gradients -= p.grad.untyped_storage().nbytes()
                p.grad = None

    def finish(self) -> None:
        """End backward: units whose inputs needed no gradient are reduced now."""
        for event in list(self.events):  # a copy: post_backward adds events
            self.post_backward(event.unit)
        self.note("end", 0)


def every_backward_frees_reduce_input() -> bool:
    """Return whether an FSDP2 unit without gradients frees the input of the last reduce-scatter when its backward ends.

    In torch 2.14 it does (_fsdp_param_group.py, post_backward). torch 2.11 keeps the input, its only
    `reduce_scatter_state`, until the next reduce-scatter.
    """
    return "reduce_scatter_states" in FSDPCommContext.lazy_init.__code__.co_names


class CallAfterBackward(torch.autograd.Function):
    """Passes tensors through; calls back once their gradients are computed."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> Any:
        """Return the tensors unchanged."""
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Call back, and pass the gradients on."""
        ctx.call()
        return None, *gradients
