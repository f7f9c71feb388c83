"""TrainParams: how long, how fast, on what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from .base import ParamError, Params
from .enums import Device, Schedule, StartAdapters, TrackerKind
from .model import freeze_patterns
from .optimizers import LearningRateSchedule, Optimizer, OptimizerKind
from .own import OwnCodes, path_of

HELD_OUT_LOSS = "heldout_loss"
"""Name of the held-out loss among the scores."""


class TrainParams(Params):
    """The training loop."""

    steps: int = Field(100, ge=1)
    """Optimizer steps; a count. Default 100."""

    batch_size: int = Field(8, ge=1)
    """Samples per rank and micro-step; a count. Default 8."""

    accumulation: int = Field(1, ge=1)
    """Micro-steps whose gradients are added up before one optimizer step; a count. Default 1."""

    optimizer: Optimizer = OptimizerKind.ADAMW
    """The optimizer: adamw; muon (for matrices, with adamw for the rest); or your own, by the import path of a class or
    function that is called with groups of parameters and lr, and returns a torch.optim.Optimizer: {call:
    torch.optim:SGD, momentum: 0.9}. Default adamw."""

    lr: float = Field(1e-4, gt=0)
    """Peak learning rate of the optimizer, per step. Default 1e-4."""

    lr_for: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Peak learning rates of parts of the model, by patterns of parameter names as in model.freeze; the last pattern
    that matches decides, and what none matches has lr. {'vision_encoder.*': 2e-6}. In a model of transformers vision,
    projector, language and lora stand for its parts. Default none."""

    warmup_steps: int = Field(10, ge=0)
    """Steps over which the learning rate rises from 0; a count. Default 10."""

    freeze_from: dict[Annotated[int, Field(ge=1)], tuple[str, ...]] = {}
    """Freezes other parameters from some steps on: {500: ['vision_encoder.*']} replaces model.freeze by these patterns
    once 500 steps are done. The run saves, plans and wraps the model again, and goes on as after a resume: parameters
    that train now begin with new optimizer states, and what no longer trains stays as it was trained. Default none."""

    schedule: LearningRateSchedule = Schedule.COSINE
    """Learning rate after the warm-up: constant, linear (to 0), cosine (to 0); or your own, by the import path of a
    function factor(done, steps) that returns the factor of lr after `done` of `steps` steps. Default cosine."""

    weight_decay: float = Field(0.01, ge=0)
    """The optimizer's decay of matrices; norms, biases, gates and embeddings have none. Default 0.01."""

    max_grad_norm: float | None = Field(1.0, gt=0)
    """The global gradient norm is clipped to this; unset never clips. Default 1.0."""

    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; a count. The last step is always saved. Default unset: only the last."""

    keep_last: int | None = Field(None, ge=1)
    """Newest checkpoints to keep; a count. Default unset: all."""

    async_save: bool = False
    """Checkpoints are copied to CPU memory, and written from there while training goes on; the run ends only when the
    last is complete. Default false."""

    max_skipped: int = Field(10, ge=1)
    """Steps in a row whose loss or gradient is not finite (they change no weights) after which the run stops; a
    count. Default 10."""

    eval_every: int | None = Field(None, ge=1)
    """Steps between two measurements of the loss on held-out samples (the validation loss); a count. The last step's is
    always measured, and none while profile records. Default unset: never."""

    eval_samples: int = Field(200, ge=1)
    """Held-out samples of each source that eval_every measures, dealt to the ranks and kept in memory; and new pictures
    that are captioned after training, per split; a count. Default 200."""

    eval_pictures: int = Field(6, ge=0, le=24)
    """Held-out pictures that the model captions after the first step and at each evaluation (eval_every), to watch it
    learn; a count, 0: none. They are the same ones each time, of the first source. Default 6."""

    metrics: OwnCodes = ()
    """Your own scores of what the model says to the eval_samples, at eval_every: import paths of functions
    score(predictions, samples) that return a dict of floats by name. mmfsdp.kit.train.vqa_accuracy:score is one.
    Default none."""

    keep_best: str | None = None
    """Score whose best checkpoint is kept beside keep_last and marked: the name of one of `metrics`' scores, with a
    minus if lower is better; -heldout_loss for the held-out loss. Default unset: none."""

    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of a moving average of what trains, kept by each rank for its shards: 0.999 averages over about 1,000
    steps. All evaluations use the average; it is exported with --ema. Default unset: none."""

    patience: int | None = Field(None, ge=1)
    """Evaluations in a row without a better score of keep_best after which the run ends (early stop); a count. Default
    unset: never."""

    min_delta: float = Field(0.0, ge=0)
    """Change of the score of keep_best that patience takes for better; in its units. Default 0."""

    start_from: str | None = None
    """Folder of a run, or of one of its checkpoints, with whose weights training begins: a new stage. What is frozen,
    the optimizer, the data and the number of ranks may differ. `mmfsdp launch --from RUN` sets it, and takes the other
    parameters of that run. Default unset: the weights of the model."""

    start_adapters: StartAdapters = StartAdapters.KEEP
    """Treatment of the LoRA adapters of start_from: keep, merge (into their matrices). Default keep."""

    profile: int = Field(0, ge=0)
    """Steps that torch's profiler records, after two: a trace of each rank that opens in Perfetto, and in the report
    how long training waits for communication; a count. Default 0: none."""

    callbacks: OwnCodes = ()
    """Import paths of your own callbacks, [my_log:Log] or [{call: my_log:Log, size: 3}]: classes, called with these
    arguments on every rank, whose methods on_train_begin, on_step_end(row), on_evaluate(scores), on_save(step) and
    on_train_end(result) are called if they are there. Default none."""

    trackers: tuple[TrackerKind, ...] = ()
    """Programs that a process beside the run hands its metrics to: tensorboard, wandb (offline unless WANDB_MODE says
    otherwise). Default none."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seeds new weights, data order and augmentation. Default 0."""

    device: Device = Device.AUTO
    """Device of the ranks: auto (CUDA where every rank has a GPU), cpu, cuda. Default auto."""

    @property
    def best_name(self) -> str:
        """Return the name of the score in keep_best, without its sign; empty if there is none."""
        return (self.keep_best or "").removeprefix("-")

    @property
    def best_sign(self) -> int:
        """Return 1 if a higher score of keep_best is better, and -1 if a lower one is."""
        return -1 if (self.keep_best or "").startswith("-") else 1

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.metrics and self.eval_every is None:
            raise ParamError("metrics", f"{list(map(path_of, self.metrics))} needs eval_every; set it")
        if self.patience is not None and self.keep_best is None:
            raise ParamError("patience", f"{self.patience} needs the score that it watches; set keep_best")
        if self.min_delta and self.patience is None:
            raise ParamError("min_delta", f"{self.min_delta:g} has no effect without patience; set it, or remove this")
        if self.keep_best is None:
            return self
        if self.eval_every is None:
            raise ParamError("keep_best", f"{self.keep_best!r} needs eval_every; set it")
        if self.keep_best == HELD_OUT_LOSS:
            raise ParamError("keep_best", f"a lower loss is better; write -{HELD_OUT_LOSS}")
        if not self.best_name or (not self.metrics and self.best_name != HELD_OUT_LOSS):
            raise ParamError("keep_best", f"{self.keep_best!r} is no score without metrics; choose -{HELD_OUT_LOSS}")
        return self

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.start_adapters is StartAdapters.MERGE and self.start_from is None:
            raise ParamError("start_adapters", "merge has no effect without start_from; set it, or remove this")
        return self

    @field_validator("freeze_from")
    @classmethod
    def _sort_phases(cls, phases: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
        """Put the steps into their order, and spell out the recipes, as `model.freeze` does."""
        return {step: freeze_patterns(phases[step]) for step in sorted(phases)}

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        for step in self.freeze_from:
            if step >= self.steps:
                message = f"the run ends after step {self.steps}; give a number below train.steps, or train longer"
                raise ParamError(f"freeze_from.{step}", message)
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps > self.steps:
            message = f"{self.warmup_steps} is more than steps, {self.steps}; lower it or train longer"
            raise ParamError("warmup_steps", message)
        return self
