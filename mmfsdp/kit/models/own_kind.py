"""OwnKind: a person's own model, `build() -> (model, processor)`, by its import path."""

from __future__ import annotations

import functools
import json
import types
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy

from ...core.fake_tensors import RealValues, copy_inputs, copy_with, fake_mode, fake_model
from ...core.guards import WRAPPERS
from ...core.micro_batch import check_loss, is_scalar_loss, loss_of
from ...core.names import named_tensors
from ...core.parameters import new_parameter
from ...core.precision import cast_to_weights
from ...own.calls import OwnCodeError, call_own, load_own, own_errors
from ...params import FSDPParams, ModelParams, ParamError, RunParams
from ...params.own import path_of
from ..data.open_sources import Splits, open_for
from ..data.own_processor import FIELD, OwnProcessor, check_pickles
from ..data.own_random import own_random
from ..data.processor import SampleProcessor
from .backbones import add_lora
from .kinds import Built, Kind

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Raised by a step that needs the values of tensors that depend on parameters: a plan has none."""
NEEDS_STORAGE = (
    "numpy() is not supported for tensor subclasses",
    "data pointer",
    "fake tensor",
    "faketensor",
    "fake impl",
)
"""In the messages of torch 2.11 to 2.14 to a step that hands such tensors to NumPy, or to a kernel of its own."""


MAX_REASON = 160
"""Letters of another library's message in a warning of ours."""
_on_meta: dict[str, tuple[nn.Module, SampleProcessor]] = {}
"""Models that a rank has built on the meta device, by parameters: they are planned again for the largest batch."""


class OwnKind(Kind):
    """A person's own model and processor."""

    planned_with_example = True
    example_of_data = True
    tensors_by_name = False

    @classmethod
    def of(cls, params: ModelParams) -> Kind:
        """Return the person's own kind, if `model.build` names a class of one; else the kind of what it builds.

        Raises OwnCodeError.
        """
        assert params.build is not None
        named = load_own(FIELD, params.build)
        if isinstance(named, type) and issubclass(named, Kind):
            kind: Kind = call_own(FIELD, params.build)
            return kind
        return cls()

    def build(self, params: ModelParams, *, meta: bool, download: bool, read: bool) -> Built:
        """Call the person's function; for the meta device, under it where it allows that."""
        assert params.build is not None
        load_own(FIELD, params.build)  # under the meta device, an import would make its module's tensors there
        key = json.dumps([params.build, params.lora_rank, params.lora_targets])
        if meta and dist.is_initialized() and key in _on_meta:  # a rank has built it already, and runs one code only
            model, processor = _on_meta[key]
            return Built(without_weights(model), processor, None)
        why = ""
        if not meta:
            model, processor = checked(params, call_own(FIELD, params.build))
        else:
            model, processor, why = build_on_meta(params)
        if params.lora_rank:
            add_lora(model, params.lora_rank, targets=params.lora_targets, meta=meta)
        if not isinstance(processor, SampleProcessor):
            processor = OwnProcessor.of(processor, path=path_of(params.build))
        if why:
            words = f"{path_of(params.build)} needs weights: {why}. Each process builds the whole model, then shards it"
            processor.warnings["own-build"] = f"model.build: {words}"
        if dist.is_initialized():
            _on_meta[key] = without_weights(model), processor
        return Built(model, processor, None)

    def example(
        self,
        model: nn.Module,
        params: RunParams,
        processor: SampleProcessor | None,
        sources: Mapping[str, Splits] | None = None,
    ) -> dict[str, Any] | None:
        """Return what the processor makes of the first rows, after trying the forward on it.

        None where the forward reads values that only weights give. Raises OwnCodeError for a processor or a forward
        that fails, and for a forward without a loss.
        """
        assert processor is not None
        if params.data.workers:
            check_pickles(processor)
        if sources is None:
            sources = open_for(processor, params)
        batch: Any = None
        for place in reversed(list(sources)):  # the first source's batch is the example
            batch = first_batch(place, sources[place], processor, params.train.batch_size)
        inputs = batch.inputs()
        processor.warnings.pop("own-forward", None)
        why = try_step(model, inputs, params.fsdp, path_of(params.model.build or ""))
        if why:
            words = f"model.build: a step reads values that only weights give ({why}): units are planned in the order"
            processor.warnings["own-forward"] = f"{words} in which modules were registered, and the peak is not known"
            return None
        return inputs


def first_batch(place: str, splits: Splits, processor: SampleProcessor, size: int) -> Any:
    """Return the batch of a source's first rows, repeated up to so many. Raises ParamError, naming the place."""
    rows = list(islice(splits["train"], size))
    if not rows:
        raise ParamError(place, "has no row that can be used")
    rows = [rows[i % len(rows)] for i in range(size)]
    return processor.try_rows(rows) if isinstance(processor, OwnProcessor) else processor(rows)


def checked(params: ModelParams, returned: Any) -> tuple[nn.Module, Any]:
    """Return the model and the processor that a person's function returned. Raises OwnCodeError for anything else."""
    path = path_of(params.build or "")
    if not isinstance(returned, tuple) or len(returned) != 2:
        size = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        words = f"{path} returned a {type(returned).__name__}{size}; return the tuple (model, processor)"
        raise OwnCodeError(FIELD, words)
    model, processor = returned
    if not isinstance(model, nn.Module):
        raise OwnCodeError(FIELD, f"{path} returned a {type(model).__name__} for its model; return an nn.Module")
    if not callable(processor):
        words = f"{path} returned a {type(processor).__name__} for its processor; return what turns rows into a dict"
        raise OwnCodeError(FIELD, words)
    if any(is_lazy(p) for p in model.parameters()):
        raise OwnCodeError(FIELD, f"{path} returned a model with lazy parameters; give its modules all their sizes")
    if hasattr(model, "_orig_mod"):
        words = f"{path} returned a model from torch.compile; return it as it is, and set fsdp.compile_units"
        raise OwnCodeError(FIELD, words)
    wrapped = [type(module).__name__ for module in model.modules() if isinstance(module, WRAPPERS)]
    if wrapped:
        raise OwnCodeError(FIELD, f"{path} returned a model inside {wrapped[0]}; return it as it is, a run wraps it")
    if not list(model.parameters()):
        raise OwnCodeError(FIELD, f"{path} returned a model without a parameter; nothing would train")
    return model, processor


def build_on_meta(params: ModelParams) -> tuple[nn.Module, Any, str]:
    """Return the model on the meta device, its processor, and why it had to be built with its weights, or ""."""
    assert params.build is not None
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # Of weights that are loaded into a model without any: ranks get rank 0's.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            model, processor = checked(params, call_own(FIELD, params.build))
        why = outside_of_meta(model, processor)
    except OwnCodeError as error:
        why = f"it cannot be called under torch.device('meta') ({in_a_line(error.message)})"
    if not why:
        return model, processor, ""
    with own_random(0):  # a plan leaves the caller's random states alone
        model, processor = checked(params, call_own(FIELD, params.build))
    return without_weights(model), processor, why


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device."""

    def on_meta(_: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to("meta")
        return new_parameter(moved, like=tensor) if isinstance(tensor, nn.Parameter) else moved

    with own_errors(FIELD, f"a copy of the {type(model).__name__}, for its plan, raised"):
        return copy_with(model, on_meta)


def outside_of_meta(model: nn.Module, processor: Any) -> str:
    """Return what a model that was built under the meta device has in the wrong place, or ""."""
    for names, tensor in named_tensors(model):
        if not tensor.is_meta:
            return f"{names[0]} has values although it was built under torch.device('meta')"
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and any(t.is_meta for t in tensors_in(value)):
                where = f"{name}.{key}" if name else key
                return f"{where} is a tensor that is neither a parameter nor a buffer; use register_buffer"
    if any(t.is_meta for t in tensors_in(processor)):
        return "its processor holds tensors; make them outside of build, or as lists"
    return ""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds: in its attributes, items, bound arguments and closures, but no module."""
    known: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if id(value) in known or isinstance(value, (nn.Module, type, types.ModuleType, str, bytes, int, float)):
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        elif isinstance(value, types.MethodType):
            todo += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            todo += [value.func, value.args, value.keywords]
        else:
            todo.append(getattr(value, "__dict__", {}))
        if isinstance(value, types.FunctionType):
            todo += [value.__defaults__, value.__kwdefaults__]
            todo += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not yet assigned
        return False


def try_step(model: nn.Module, inputs: dict[str, Any], fsdp: FSDPParams, path: str) -> str:
    """Run forward and backward on fake tensors. Return why they need values, or "".

    Raises OwnCodeError if they fail, or if the forward returns no loss that depends on a trainable parameter.
    """
    mode = fake_mode()
    with own_errors(FIELD, f"a copy of {path}'s model, for its plan, raised"):
        fake = fake_model(model, mode).train()
    cast_to_weights(fake, fsdp)
    loss: Any = None
    try:
        with own_errors(FIELD, f"a step of {path}'s model, on a first batch, raised"):
            try:
                with mode, RealValues(), torch.enable_grad():
                    loss = loss_of(fake(**copy_inputs(inputs, mode)))
                    if is_scalar_loss(loss) and loss.requires_grad:
                        loss.backward()
            except Exception as error:
                if needs_values(error):
                    return in_a_line(f"{type(error).__name__}: {error}")
                raise
    except OwnCodeError as error:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in inputs.items())
        raise OwnCodeError(FIELD, f"{error.message}; the processor made {shapes}", error.traceback) from None
    try:
        check_loss(model, loss)
    except ParamError as error:
        raise OwnCodeError(FIELD, error.message) from None
    if not loss.requires_grad:
        raise OwnCodeError(FIELD, f"the loss of {path}'s model depends on no trainable parameter")
    return ""


def needs_values(error: Exception) -> bool:
    """Return True if a step failed because fake tensors have no values; it may be sound."""
    text = str(error).lower()
    return isinstance(error, READS_VALUES) or any(words in text for words in NEEDS_STORAGE)


def in_a_line(text: str) -> str:
    """Return a message that torch may have written a page of."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} ..."


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
