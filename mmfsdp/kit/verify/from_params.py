"""verify_run: check the training that a configuration describes, on two ranks of this machine's CPU."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.freeze import train_mode
from ...core.guards import list_all
from ...core.inference import keep_gathered
from ...core.micro_batch import label_tokens, loss_of
from ...core.quantize import quantize_model
from ...core.step import train_step
from ...params import ParamError, RunParams
from ...params.in_words import size
from ...params.own import path_of
from ..data.open_sources import open_for
from ..data.own_random import seed_all
from ..data.processor import SampleProcessor
from ..models.build import build_model, freeze_model
from ..models.generated import needs_backbones
from ..run.own_code import use_code_of, write_code
from ..shapes.pretrain import ensure_backbones
from ..train.job import wrap
from ..train.learning_rates import spell_out_rates
from ..train.optimizer import build_optimizer
from ..train.prepare import kept_model, plan_run, prepare
from .batches import TrialBatches, batches_of_data, random_batches
from .forward_checks import REGISTER, UNREGISTERED, unregistered
from .kill_resume import check_resume
from .lines import NOTE, Line, Report
from .outcome import LOST_RANKS, as_result, lines_from_ranks, persons_code
from .own_loop import TIMEOUT_S, run_checks
from .shallow import as_rank, trial_params
from .trial import CPU, Loop, fill_zeros

NO_LIMIT = float("inf")
LOG = "ranks.log"
BYTES_PER_PARAMETER = 16
"""In fp32, on two ranks: each has a whole model, and both together one more to shard, and its shards."""


def verify_run(params: RunParams) -> Report:
    """Check the training of a configuration, with few layers and random weights, in a temporary folder.

    Raises ParamError as a launch does, for what cannot be prepared, and OwnCodeError with the person's own lines.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, processor = write_trial(params, folder)
        check_memory(kept_model(small)[0], psutil.virtual_memory().available)
        lines = lines_from_ranks(verify_folder, str(folder), timeout_s=TIMEOUT_S)
        # resume and export train with the same ranks.
        why_not = "the ranks would fail in it, too" if lines[0].code == LOST_RANKS else ""
        if processor is None:
            why_not = "there is no tokenizer on this machine"
        if why_not:
            lines += [Line(NOTE, check, f"not checked: {why_not}") for check in ("resume", "export")]
        else:
            lines += check_resume(small, folder)
    return Report(tuple(lines))


def check_memory(model: nn.Module, available: int) -> None:
    """Raise ParamError if the two ranks would need more memory than so many bytes."""
    count = sum(p.numel() for p in model.parameters())
    needed = count * BYTES_PER_PARAMETER
    if needed > available:
        words = f"{count / 1e6:,.0f} M parameters in few layers, for which two ranks need {size(needed)}; "
        words += f"{size(available)} are free here; reduce hidden_size and vocab_size of its configuration"
        raise ParamError("model", f"has {words}")


def write_trial(params: RunParams, folder: Path) -> tuple[RunParams, SampleProcessor | None]:
    """Write the parameters and the own code of a trial into a folder. Return them, and the processor of its samples."""
    small = trial_params(params, folder)
    if needs_backbones(small.model):
        ensure_backbones(small)
    model, processor = kept_model(small)
    if names := unregistered(model):  # a plan's forward would fail in them, by another error
        raise ParamError("model", f"{UNREGISTERED.format(list_all(names))}; {REGISTER}")
    if processor is not None:
        write_code(folder, prepare(small).code)
    small.to_yaml(folder / "params.yaml")
    return small, processor


def verify_folder(folder: str) -> dict[str, Any]:
    """Run the checks of a trial as one rank; what it prints goes to a file. Return the lines as JSON holds them."""
    as_rank(dist.get_rank())
    with printing_to(Path(folder) / LOG):
        use_code_of(Path(folder))
        return as_result(lambda: run_checks(ConfiguredLoop(RunParams.from_yaml(Path(folder) / "params.yaml")).loop))


@contextlib.contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Send what Python prints in this process to a file."""
    with open(path, "a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


@dataclass(frozen=True)
class ConfiguredLoop:
    """The training of a run's parameters, as a Loop: what its ranks would do, beside torch's own calls alone."""

    params: RunParams

    @cached_property
    def processor(self) -> SampleProcessor | None:
        """Return the processor of the samples."""
        return kept_model(self.params)[1]

    @cached_property
    def batches(self) -> TrialBatches:
        """Return the batches of all ranks."""
        if self.processor is None:
            return random_batches(self.whole(), self.params, dist.get_world_size())
        sources = open_for(self.processor, self.params)
        return batches_of_data(self.params, self.processor, sources, dist.get_world_size())

    @property
    def loop(self) -> Loop:
        """Return the loop."""
        batches = self.batches
        return Loop(
            build=self.plain,
            wrapped=self.wrapped,
            optimizer=self.optimizer,
            step=self.step,
            loss=self.loss,
            batches=batches.of_ranks,
            alone=self.step_alone,
            counts=lambda model, batch: (label_tokens(model, batch), batch.size),
            joined=batches.joined,
            without_picture=batches.without_picture,
            no_picture_note=batches.note,
            labels_of_prompt=batches.labels_of_prompt,
        )

    def whole(self, *, meta: bool = False) -> nn.Module:
        """Return the frozen model, with its weights drawn from the run's seed."""
        seed_all(self.params.train.seed)
        model, _ = build_model(self.params.model, meta=meta)
        freeze_model(model, self.params.model)
        fill_zeros(model)
        return model

    def plain(self) -> nn.Module:
        """Return the model of one process."""
        model = self.whole()
        quantize_model(model, self.params.fsdp)
        train_mode(model)
        return model

    def wrapped(self) -> nn.Module:
        """Return the model as ranks wrap it: rank 0 has the weights, and the others get them, as in a run."""
        model = self.whole(meta=dist.get_rank() > 0 and self.params.fsdp.sync_module_states)
        plan = plan_run(model, self.params, self.batches.of_ranks[0].inputs())
        wrapped, _ = wrap(model, plan, None, CPU, lambda _: None)
        train_mode(wrapped)
        return wrapped

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW over what trains, with the run's learning rates."""
        optimizer, _ = build_optimizer(model, self.rates)
        return optimizer

    @cached_property
    def rates(self) -> Any:
        """Return the training's parameters with the patterns of its learning rates spelled out."""
        return spell_out_rates(kept_model(self.params)[0], self.params)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        with self.own_code():
            return loss_of(model(**batch.inputs()))

    def own_code(self) -> AbstractContextManager[None]:
        """Return the context in which a model of one's own runs: what it raises becomes an OwnCodeError."""
        build = self.params.model.build
        if build is None:
            return contextlib.nullcontext()
        return persons_code("model.build", f"a step of {path_of(build)}'s model raised")

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> dict[str, float]:
        """Do a step, then an evaluation, as the ranks of a run do."""
        with self.own_code():
            metrics = train_step(model, [batch], optimizer, max_grad_norm=self.params.train.max_grad_norm)
        with torch.no_grad(), keep_gathered(model):
            self.loss(model, batch)
        return {"loss": metrics.loss, "grad_norm": metrics.grad_norm}

    def step_alone(self, model: nn.Module, optimizer: Optimizer, batches: Sequence[Any]) -> dict[str, Any]:
        """Do a step over the batches of all ranks in one process: torch's own calls, and nothing of core/step.py."""
        tokens = [label_tokens(model, batch) for batch in batches]
        loss_sum = 0.0
        for rank, batch in enumerate(batches):
            seed_all(rank)  # as each rank is seeded before its step
            weight = tokens[rank] / max(sum(tokens), 1)
            # A batch without labels adds nothing, and its mean would be 0/0.
            if weight:
                loss = self.loss(model, batch) * weight
                loss.backward()
                loss_sum += loss.item()
        trainable = [p for p in model.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(trainable, self.params.train.max_grad_norm or NO_LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss_sum, "grad_norm": norm}
