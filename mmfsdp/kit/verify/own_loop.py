"""verify: check a training loop of one's own, with plain `fully_shard`, on two ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.collectives import gather_json
from ...core.micro_batch import loss_of
from ...core.step_batch import MappingBatch
from ...own.calls import own_errors
from ...params import ParamError
from ..data.own_random import seed_all
from .forward_checks import (
    check_batch_norms,
    check_forward_modes,
    check_random,
    check_registered,
    check_same_code,
    check_written,
    kept_state,
)
from .label_checks import check_copies, check_labels, check_mean, check_padding, check_shift
from .lines import NOTE, WRONG, Line, Report, from_plain, merge, to_plain
from .loop_checks import LOOP_CHECKS, check_seeds, watch_loop
from .outcome import RANKS, as_result, lines_from_ranks, persons_code
from .packed import check_packed
from .step_checks import CHECKS
from .token_batch import micro_batches_of
from .trial import Loop, Trial

TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others in a collective."""
SEED = 1000
"""Seed of rank 0, where verify starts the ranks."""
FORWARD_CHECKS = (check_registered, check_same_code, check_written, check_random, check_batch_norms)
"""Checks of a forward, in their order. Every rank calls each."""
TOKEN_CHECKS = (check_labels, check_padding, check_copies, check_mean, check_shift, check_packed)
"""Checks of a batch of tokens, in their order, for one rank."""
COMPARE_THE_WHOLE = ("mean", "shift", "packed", "buffers", "trained", "derivatives", "gradients", "norm", "evaluation",
                     "frozen", "no picture")  # fmt: skip
"""Checks that name the kind of a fault only if no check before them has found it."""
FOLLOWS = {"written": "same code", "padding": "written", "loss": "written", "seeds": "random"}
"""The check whose fault makes another wrong, too, by the name of the other."""


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
        batches: A batch of each rank, as your loader gives them: two, or as many as ranks of the process group. The
            batch of a step that accumulates is a list of micro-batches.
        loss: Returns the loss of a batch. Default: that of `model(**batch)`, as models of transformers return it; of
            several micro-batches their mean, weighted by label tokens.
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
    lines = merged([check(trial) for check in FORWARD_CHECKS])
    # Different layers issue different collectives: a step on ranks would never end.
    if trial.runs_other_modules:
        words = "not checked: ranks that run different layers would wait for each other"
        return [*lines, Line(NOTE, "steps", words)]
    lines += merged(token_lines(trial))
    watched = None
    if loop.alone is None:
        watched = watch_loop(trial)
        lines += merged([check(trial, watched) for check in LOOP_CHECKS])
    else:
        lines += merged([check_forward_modes(trial)])
    try:
        trial.run()
    except ParamError as error:  # of train_step, in the first step of a run: on every rank
        if not any(line.level == WRONG for line in lines):
            raise
        return without_consequences([*lines, Line(NOTE, "steps", f"a run would stop here: {error}")])
    if watched is not None:
        lines += merged([check_seeds(trial, watched)])
    lines += merged([check(trial) for check in CHECKS])
    return without_consequences(lines)


def token_lines(trial: Trial) -> list[Line | None]:
    """Return the lines of the checks of labels and loss. Rank 0 does the work, but where a forward needs all ranks."""
    lines: list[Line | None] = []
    # Other ranks wait in gather_json meanwhile.
    if trial.forward_has_collectives or trial.rank == 0:
        with kept_state(trial.plain):
            lines = [check(trial) for check in TOKEN_CHECKS]
    of_first = gather_json(to_plain([line for line in lines if line is not None]))[0]
    return list(from_plain(of_first))


def merged(lines: Sequence[Line | None]) -> list[Line]:
    """Return the lines of all ranks as one list. Every rank must call it, with the lines of the same checks."""
    return merge([from_plain(values) for values in gather_json(to_plain([line for line in lines if line]))])


def without_consequences(lines: Sequence[Line]) -> list[Line]:
    """Return the lines, with a note in place of a fault that follows from one that is named above it."""
    kept: list[Line] = []
    for line in lines:
        causes = [above.code for above in kept if above.level == WRONG]
        # One fault makes several figures differ. A person should read its cause, not its traces.
        follows = FOLLOWS.get(line.code) in causes or (line.code in COMPARE_THE_WHOLE and causes)
        if line.level == WRONG and follows:
            line = Line(NOTE, line.code, f"wrong, too; correct first what is wrong above ({', '.join(causes)})")
        kept.append(line)
    return kept


def _as_rank(values: tuple[Any, ...]) -> dict[str, Any]:
    seed_all(SEED + dist.get_rank())  # as processes that nobody has seeded: forks would have one state
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
        # An error in one process often means that the step needs a wrapped model: say which one it had.
        is_wrapped = any(any_model is each for each in wrapped_models)
        where = "" if is_wrapped else ", with the model as it is before `wrap`,"
        with persons_code("step", f"the function{where} raised"):
            return step(any_model, any_optimizer, batch)

    def loss_of_batch(plain: nn.Module, batch: Any) -> Tensor:
        if loss is not None:
            with persons_code("loss", "the function raised"):
                return loss(plain, batch)
        micro_batches = micro_batches_of(batch)
        if not all(isinstance(each, Mapping) for each in micro_batches):
            raise ParamError(
                "loss", f"is needed, since a batch is a {type(batch).__name__} and not a dict of arguments"
            )
        losses, tokens = [], []
        for inputs in micro_batches:
            result = loss_of(plain(**inputs))
            if not isinstance(result, Tensor):
                words = "is needed, since model(**batch) returns no loss; give a function (model, batch)"
                raise ParamError("loss", words)
            losses.append(result)
            tokens.append(MappingBatch(inputs).label_tokens if len(micro_batches) > 1 else 1)
        return torch.stack([mean * count for mean, count in zip(losses, tokens, strict=True)]).sum() / sum(tokens)

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
