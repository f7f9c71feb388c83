"""verify: check a training loop of one's own, with plain `fully_shard`, on two ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.gather import gather_json
from ..core.micro_batch import loss_of
from ..params import ParamError
from ..params.own import own_errors
from .lines import Line, Report, from_plain, merge, to_plain
from .outcome import RANKS, as_result, lines_from_ranks, persons_code
from .step_checks import CHECKS
from .trial import Loop, Trial

TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others in a collective."""


def verify(
    model: nn.Module | Callable[[], nn.Module],
    *,
    wrap: Callable[[nn.Module], nn.Module | None],
    optimizer: Callable[[nn.Module], Optimizer],
    step: Callable[[nn.Module, Optimizer, Any], Any],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    without_picture: Any = None,
) -> Report:
    """Run two steps of a training loop on ranks and in one process, compare them, and print a line for each check.

    Called in the ranks of a process group (gloo, on the CPU), it uses these, and every rank must call it. Otherwise it
    starts two ranks of its own; the functions must then be in a module or a script, not in a notebook cell. In one
    process `step` gets the model as it was before `wrap`, so it must not need a wrapped one. Make the model small: few
    layers show the same faults.

    Args:
        model: The model before wrapping, with what is frozen frozen: a function that builds it, or the module itself,
            of which copies are used.
        wrap: Your `fully_shard` calls, on the model; returns the wrapped model, or None if it was wrapped in place.
        optimizer: Returns the optimizer of a model.
        step: One turn of your loop: forward, backward, clipping, `optimizer.step()`, `zero_grad()`, and an evaluation
            where you have it. A number or a dict of numbers that it returns, such as the norm, is compared, too.
        batches: A batch of each rank, as your loader gives them: two, or as many as ranks of the process group.
        loss: Returns the loss of a batch. Default: that of `model(**batch)`, as models of transformers return it.
        without_picture: A batch whose rows have no picture, to try a rank that has none. Default: not tried.

    Returns:
        The report: `.ok`, `.lines`; its text has a line for each check.

    Raises:
        ParamError: Naming an argument that cannot be used.
        OwnCodeError: With your own lines, if one of the functions raises.
    """
    loop = _loop(model, wrap, optimizer, step, batches, loss, without_picture)
    if dist.is_initialized():
        if "gloo" not in str(dist.get_backend()):
            words = f"the process group is of {dist.get_backend()}, and verify computes on the CPU"
            raise ParamError("verify", f"{words}; call it before init_process_group, or with the backend gloo")
        if len(batches) != dist.get_world_size():
            words = f"has {len(batches)}, and there are {dist.get_world_size()} ranks; give each one"
            raise ParamError("batches", words)
        report = Report(tuple(run_checks(loop)))
        if dist.get_rank() == 0:
            print(report)
        return report
    if len(batches) != RANKS:
        raise ParamError("batches", f"has {len(batches)}; give {RANKS}, one for each rank")
    values = model, wrap, optimizer, step, batches, loss, without_picture
    _check_importable(values)
    report = Report(tuple(lines_from_ranks(_as_rank, values, timeout_s=TIMEOUT_S)))
    print(report)
    return report


def run_checks(loop: Loop) -> list[Line]:
    """Run all checks on this rank; return the lines of all ranks together. Every rank must call it."""
    trial = Trial(loop)
    lines = []
    for check in CHECKS:
        line = check(trial)
        if line is not None:
            lines.append(line)
    return merge([from_plain(values) for values in gather_json(to_plain(lines))])


def _as_rank(values: tuple[Any, ...]) -> dict[str, Any]:
    return as_result(lambda: run_checks(_loop(*values)))


def _loop(
    model: Any, wrap: Any, optimizer: Any, step: Any, batches: Sequence[Any], loss: Any, without_picture: Any
) -> Loop:
    """Return the loop whose functions raise OwnCodeError, by the name of their argument."""

    wrapped_models: list[nn.Module] = []

    def build() -> nn.Module:
        if isinstance(model, nn.Module):
            return copy.deepcopy(model)
        with own_errors("model", "the function raised"):
            built = model()
        if not isinstance(built, nn.Module):
            raise ParamError("model", f"returned a {type(built).__name__}; return an nn.Module")
        return built

    def wrapped() -> nn.Module:
        plain = build()
        with own_errors("wrap", "the function raised"):
            result = wrap(plain)
        wrapped_models.append(plain if result is None else result)
        return wrapped_models[-1]

    def optimizer_of(plain: nn.Module) -> Optimizer:
        with own_errors("optimizer", "the function raised"):
            result = optimizer(plain)
        if not isinstance(result, Optimizer):
            raise ParamError("optimizer", f"returned a {type(result).__name__}; return a torch.optim.Optimizer")
        return result

    def one_step(any_model: nn.Module, any_optimizer: Optimizer, batch: Any) -> Any:
        is_wrapped = any(any_model is each for each in wrapped_models)
        where = "" if is_wrapped else ", with the model as it is before `wrap`,"
        with persons_code("step", f"the function{where} raised"):
            return step(any_model, any_optimizer, batch)

    def loss_of_batch(plain: nn.Module, batch: Any) -> Tensor:
        if loss is not None:
            with persons_code("loss", "the function raised"):
                return loss(plain, batch)
        if not isinstance(batch, Mapping):
            raise ParamError(
                "loss", f"is needed, since a batch is a {type(batch).__name__} and not a dict of arguments"
            )
        result = loss_of(plain(**batch))
        if not isinstance(result, Tensor):
            raise ParamError("loss", "is needed, since model(**batch) returns no loss; give a function (model, batch)")
        return result

    return Loop(build, wrapped, optimizer_of, one_step, loss_of_batch, batches, without_picture=without_picture)


def _check_importable(values: tuple[Any, ...]) -> None:
    """Raise ParamError for functions that a new process cannot import."""
    in_notebook = not hasattr(sys.modules["__main__"], "__file__")
    for name, value in zip(("model", "wrap", "optimizer", "step", "loss"), (*values[:4], values[5]), strict=True):
        if not callable(value) or isinstance(value, nn.Module):
            continue
        if in_notebook and getattr(value, "__module__", "") == "__main__":
            words = "is defined in a notebook cell, which other processes cannot import"
            raise ParamError(name, f"{words}; write it to a file with %%writefile my_loop.py, and import it")
        try:
            ForkingPickler.dumps(value)  # as a new process gets it
        except Exception as error:
            words = f"cannot be sent to other processes ({error})"
            raise ParamError(name, f"{words}; make it a function of a module") from None
