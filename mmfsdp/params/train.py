"""TrainParams: how long, how fast, on what."""

from __future__ import annotations

from dataclasses import dataclass

from .check import at_least, coerce, need
from .enums import Device, Schedule


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """The training loop."""

    steps: int = 100
    """Optimizer steps; a count. Default 100."""

    batch_size: int = 8
    """Samples per rank and micro-step; a count. Default 8."""

    accumulation: int = 1
    """Micro-steps whose gradients are added up before one optimizer step; a count. Default 1."""

    lr: float = 1e-4
    """Peak learning rate of AdamW, per step. Default 1e-4."""

    warmup_steps: int = 10
    """Steps over which the learning rate rises from 0; a count. Default 10."""

    schedule: Schedule = Schedule.COSINE
    """Learning rate after the warm-up: constant, linear (to 0), cosine (to 0). Default cosine."""

    weight_decay: float = 0.01
    """AdamW's decoupled decay of matrices; norms, biases, gates and embeddings have none. Default 0.01."""

    max_grad_norm: float | None = 1.0
    """The global gradient norm is clipped to this; unset never clips. Default 1.0."""

    save_every: int | None = None
    """Steps between checkpoints; a count. The last step is always saved. Default unset: only the last."""

    keep_last: int | None = None
    """Newest checkpoints to keep; a count. Default unset: all."""

    async_save: bool = False
    """Checkpoints are copied to CPU memory, and written from there while training goes on; the run ends only when the
    last is complete. Default false."""

    save_frozen: bool = False
    """Checkpoints hold the frozen weights, too, rather than only their checksums. Default false."""

    max_skipped: int = 10
    """Steps in a row whose loss or gradient is not finite (they change no weights) after which the run stops, with the
    last batch kept in its folder; a count. Default 10."""

    eval_every: int | None = None
    """Steps between two measurements of the loss on held-out samples (the validation loss); a count. The last step's is
    always measured, and none while profile records. Default unset: never."""

    eval_samples: int = 200
    """Held-out samples of each source that eval_every measures, dealt to the ranks and kept in memory; and new pictures
    that are captioned after training, per split; a count. Default 200."""

    profile: int = 0
    """Steps that torch's profiler records, after two: a trace of each rank that opens in Perfetto, and in the report
    how long training waits for communication; a count. Default 0: none."""

    seed: int = 0
    """Seeds new weights, data order and augmentation. Default 0."""

    device: Device = Device.AUTO
    """What ranks compute on: auto (CUDA where every rank has a GPU), cpu, cuda. Default auto."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "steps", "batch_size", "accumulation", "save_every", "keep_last", "eval_samples")
        at_least(self, 1, "max_skipped", "eval_every")
        at_least(self, 0, "warmup_steps", "weight_decay", "seed", "profile")
        need(self.lr > 0, "lr", f"{self.lr} must be above 0")
        need(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "max_grad_norm",
            f"{self.max_grad_norm} must be above 0; remove it to never clip",
        )
        need(
            self.warmup_steps <= self.steps,
            "warmup_steps",
            f"{self.warmup_steps} is more than steps, {self.steps}; lower it or train longer",
        )


_TABLES = ("latents", "embs", "embed", "embedding", "embeddings", "token", "query", "queries")
"""Endings of parameters that are vectors learned as such, not matrices that vectors go through."""


def decays(name: str, *, ndim: int, owner: str) -> bool:
    """True if `weight_decay` is for this parameter: a matrix, and neither norm, bias, gate nor embedding.

    name: dotted, in the unwrapped model; owner: class name of the module that holds it.
    """
    path, _, leaf = name.rpartition(".")
    embeds = "Embedding" in owner or path.endswith("new_tokens") or leaf.endswith(_TABLES)
    return ndim > 1 and not embeds
