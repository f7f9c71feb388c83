"""The checks of a model and its forward, in one process on each rank, before anything is wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ...core.collectives import gather_json
from ...core.guards import list_all
from ...core.micro_batch import loss_of
from ...core.step_batch import LOSS_POSITIONS, MappingBatch
from ...core.token_loss import computes_loss_in_head
from ..data.own_random import own_random, seed_all
from ..models.loss_in_head import undo_loss_in_head
from ..models.own_kind import tensors_in
from ..train.meters import Collectives
from .differences import GENERATORS, TOLERANCE, TORCH_ATTRIBUTES, digest, random_digests, random_states, restore_random
from .lines import OK, WRONG, Line
from .loop_checks import line_of_modes
from .trial import Trial
from .watched_step import ModuleModes

EQUAL = 1e-4
"""Relative difference below which the losses of two ranks are equal."""


UNREGISTERED = (
    "{}: holds parameters in a plain list, dict or attribute, so that they are not the model's: they are not sharded, "
    "trained or saved"
)
REGISTER = "use nn.ModuleList, nn.ModuleDict or nn.Parameter"


def check_registered(trial: Trial) -> Line:
    """Every module and parameter that trains is registered in the model."""
    names = unregistered(trial.plain)
    if names:
        return Line(WRONG, "registered", UNREGISTERED.format(list_all(names)), REGISTER)
    return Line(OK, "registered", "all parameters are in the model's list")


def unregistered(model: nn.Module) -> list[str]:
    """Return the names of attributes that hold parameters which the model does not list."""
    known = {id(p) for p in model.parameters()}
    unknown = []
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in TORCH_ATTRIBUTES or not isinstance(value, (list, tuple, dict, Tensor)):
                continue
            if any(p.requires_grad and id(p) not in known for p in parameters_in(value)):
                unknown.append(f"{path}.{key}".lstrip("."))
    return unknown


def parameters_in(value: Any) -> Iterator[Tensor]:
    """Yield the parameters of modules in a list or dict, and the tensors in it that need a gradient."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for each in values:
        if isinstance(each, nn.Module):
            yield from each.parameters()
    for tensor in tensors_in(value):
        if tensor.is_leaf and tensor.requires_grad:
            yield tensor


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Give a model its parameters, buffers, gradients and modes back, and the generators their states."""
    states = random_states()
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if digest(tensor) != digest(value):
                    tensor.copy_(value)
        model.zero_grad(set_to_none=True)
        for module, mode in modes:
            module.training = mode
        restore_random(states)


def check_same_code(trial: Trial) -> Line:
    """The same batch has the same loss on all ranks, and runs the same modules. Every rank must call it."""
    for number, batch in enumerate(trial.loop.batches):
        with entered_modules(trial.plain) as entered, Collectives() as counted:
            with kept_state(trial.plain), torch.no_grad(), own_random(0):
                loss = float(trial.loop.loss(trial.plain, batch))
        trial.forward_has_collectives |= bool(counted.rows())
        by_rank = gather_json([dict(entered), loss])
        of_first, first_loss = by_rank[0]
        for rank, (names, other_loss) in enumerate(by_rank):
            differing = [name for name in (*of_first, *names) if of_first.get(name) != names.get(name)]
            if differing:
                trial.runs_other_modules = True
                more = of_first.get(differing[0], 0) > names.get(differing[0], 0)
                runs, skips = (0, rank) if more else (rank, 0)
                layers = list_all(outermost(list(dict.fromkeys(differing))))
                how = "does so less often" if differing[0] in by_rank[skips][0] else "does not"
                words = f"rank {runs} runs {layers}, and rank {skips} {how}, for the same batch"
                fix = "run every layer on every rank: no branch of a forward may depend on the rank"
                return Line(WRONG, "same code", words, fix)
            if abs(other_loss - first_loss) > EQUAL * max(abs(first_loss), 1e-3):
                words = f"batch {number} has the loss {first_loss:.6g} on rank 0 and {other_loss:.6g} on rank {rank}"
                fix = "look for code in the forward that depends on the rank"
                return Line(WRONG, "same code", words, fix)
    return Line(OK, "same code", "a batch has the same loss on all ranks, by the same modules")


def outermost(names: Sequence[str]) -> list[str]:
    """Return the names of modules that are in no other module of the names."""
    return [name for name in names if not name or name.rpartition(".")[0] not in names]


@contextmanager
def entered_modules(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield how often each module's forward runs inside the `with` block, by name, in order."""
    entered: dict[str, int] = {}

    def note(name: str, *_: Any) -> None:
        entered[name] = entered.get(name, 0) + 1

    handles = [m.register_forward_pre_hook(partial(note, name)) for name, m in model.named_modules()]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


def check_written(trial: Trial) -> Line:
    """A forward and backward write to no parameter, and to buffers the same on all ranks. Every rank must call it."""
    model = trial.plain
    with kept_state(model), own_random(0):
        before = state_digests(model)
        loss = trial.loop.loss(model, trial.batch)
        if loss.requires_grad:
            loss.backward()
        after = state_digests(model)
    written = {name: after[name] for name, value in before.items() if after.get(name, value) != value}
    parameters = {name for name, _ in model.named_parameters()}
    of_parameters = sorted(name for name in written if name in parameters)
    fix = "make it a buffer (register_buffer), and sum over ranks what it is updated with (dist.all_reduce)"
    by_rank = gather_json(written)
    if of_parameters:
        words = f"forward writes to {list_all(of_parameters)}: FSDP drops what is written to a gathered parameter, and"
        return Line(WRONG, "written", f"{words} with DDP ranks differ", fix)
    names = sorted(set().union(*by_rank))
    differing = [name for name in names if len({values.get(name) for values in by_rank}) > 1]
    if differing:
        words = f"forward writes to {list_all(differing)}, on each rank by its own samples; rank 0's is saved"
        return Line(WRONG, "written", words, "sum over ranks what it is updated with (dist.all_reduce)")
    return Line(OK, "written", "a forward writes to no parameter, and to buffers the same on all ranks")


def state_digests(model: nn.Module) -> dict[str, int]:
    """Return the digests of parameters, and of buffers of floating-point numbers, but those of batch norms."""
    norms = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
    digests = {name: digest(p) for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and id(buffer) not in norms:
            digests[name] = digest(buffer)
    return digests


def check_random(trial: Trial) -> Line:
    """A forward sets no seed: after it, generators that began with different seeds have different states."""
    model = trial.plain
    ends, losses = [], []
    with ModuleModes(model) as noted:
        for seed in (1, 2):
            with kept_state(model), own_random(0):
                seed_all(seed)
                begin = random_digests()
                in_train = [name for name, module in model.named_modules() if module.training]
                losses.append(float(trial.loop.loss(model, trial.batch).detach()))
                ends.append(random_digests())
                trial.left_in_eval = [name for name in in_train if not model.get_submodule(name).training]
    trial.modes = noted
    trial.draws = [place for place, digests in enumerate(zip(begin, ends[1], strict=True)) if len(set(digests)) > 1]
    set_here = [name for name, a, b in zip(GENERATORS, *ends, strict=True) if a == b]
    fix = "set no seed in a forward; torch.random.fork_rng keeps the state, and seed by the rank and the step in it"
    if set_here:
        words = f"forward sets the state of {list_all(set_here)}: dropout masks and shuffles are the same from then on"
        return Line(WRONG, "random", words, fix)
    dropout = []
    for name, modes in noted.modes.items():
        if True in modes and not isinstance(model.get_submodule(name), _NormBase):
            dropout.append(name)
    if dropout and not trial.draws and losses[0] == losses[1]:
        words = f"dropout draws the same mask in every forward: {list_all(dropout)}"
        return Line(WRONG, "random", words, fix)
    return Line(OK, "random", "a forward sets no seed")


def check_forward_modes(trial: Trial) -> Line:
    """The forward leaves its modules in the modes that it was given: for configurations, whose loop sets them."""
    if trial.left_in_eval:
        words = f"forward sets eval mode for {list_all(outermost(trial.left_in_eval))}"
        return Line(WRONG, "mode", words, "leave modes to the loop: no forward should call eval()")
    return line_of_modes(trial.plain, [trial.modes] if trial.modes else [])


def check_batch_norms(trial: Trial) -> Line | None:
    """No batch norm trains on the samples of one rank."""
    names = []
    for name, module in trial.plain.named_modules():
        is_local = isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        if is_local and any(p.requires_grad for p in module.parameters(recurse=False)):
            names.append(name)
    if not names:
        return None
    words = f"{list_all(names)}: each rank normalizes by its own samples, and only rank 0's statistics are saved"
    fix = "freeze it, or call nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, on GPUs"
    return Line(WRONG, "batch norm", words, fix)


@torch.no_grad()
def check_head_loss(trial: Trial) -> Line | None:
    """The head's loss is that of the model's logits. Only where a head computes the loss (`model.loss_in_head`)."""
    model = trial.loop.build().eval()
    batch = trial.batch
    if not computes_loss_in_head(model) or not hasattr(batch, "inputs") and not isinstance(batch, dict):
        return None
    inputs = MappingBatch(batch).inputs() if isinstance(batch, dict) else batch.inputs()
    if inputs.get("labels") is None:
        return None
    in_head = float(loss_of(model(**inputs)))
    inputs.pop(LOSS_POSITIONS, None)
    undo_loss_in_head(model)
    of_logits = float(loss_of(model(**inputs)))
    if abs(in_head - of_logits) <= TOLERANCE * max(abs(of_logits), 1e-6):
        return Line(OK, "head loss", f"{in_head:.4g} in the head, as with whole logits")
    words = f"{in_head:.6g} in the head, and {of_logits:.6g} with whole logits"
    fix = "compute loss_positions from the labels of the same batch; else set model.loss_in_head to false"
    return Line(WRONG, "head loss", words, fix)
