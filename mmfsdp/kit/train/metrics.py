"""Metrics: scores of what the model says to held-out samples, by a person's own functions (`train.metrics`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.collectives import gather_json
from ...own.calls import OwnCodeError, call_own
from ...params import ParamError, RunParams
from ...params.own import OwnCode, path_of
from ..data.open_sources import Splits
from ..data.own_processor import FIELD as BUILD
from ..data.own_processor import row_of
from ..data.own_random import own_random
from ..data.processor import SampleProcessor
from ..data.sources.reader import as_sample
from .callbacks import AtEvaluation, Training
from .evaluate import why_no_captions
from .held_out_texts import Share, in_order, texts_of_rank, why_not_together

METRICS = "train.metrics"
NAME = re.compile(r"[A-Za-z_][\w.@-]{0,39}")
"""Names that a score may have, since it becomes a key of files and the title of a curve."""


@dataclass
class Scores(AtEvaluation):
    """Generates from the held-out samples on all ranks, and scores the texts on rank 0."""

    training: Training
    shares: list[Share]
    """Samples of each source for this rank."""
    latest: dict[str, float] | None = None

    def evaluate(self, row: dict[str, Any]) -> dict[str, float]:
        """Add the scores to the row, and return them."""
        self.latest = row["scores"] = self.scores(row["step"])
        return self.latest

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Add the last scores to the result."""
        if self.latest is not None:
            result["scores"] = self.latest

    def scores(self, step: int) -> dict[str, float]:
        """Return the scores. Every rank must call it, and calls `generate` as often as the others do.

        Leaves the model in training mode, and the random states as they were.
        """
        training, samples = self.training, []
        predictions: list[str] = []
        for share in self.shares:
            predictions += in_order(gather_json(texts_of_rank(training, share, step)))
            samples += share.samples
        metrics = training.setup.params.train.metrics
        training.beat(f"step {step} metric {', '.join(map(path_of, metrics))}")
        scores: dict[str, float] = {}
        if dist.get_rank() == 0:
            with own_random(training.setup.params.train.seed):
                scores = score(metrics, predictions, samples)
        return gather_json(scores)[0]


def training_scores(training: Training) -> Scores | None:
    """Return the scores of a training, if `train.metrics` names some. Every rank must call it.

    Raises ParamError if none of the first held-out samples can be used.
    """
    params = training.setup.params
    if not params.train.metrics:
        return None
    shares = []
    for name, data in params.data.sources().items():
        processor = replace(training.processor, max_length=data.max_length)
        usable = []
        for sample in islice(training.sources[name]["heldout"], params.train.eval_samples):
            if not processor.refusal(sample):
                usable.append(sample)
        if not usable:
            raise ParamError(METRICS, f"no held-out sample of {name} can be used; unset it")
        shares.append(Share.deal(processor, usable, params.train.batch_size))
    return Scores(training, shares)


def score(metrics: Sequence[OwnCode], predictions: Sequence[str], samples: Sequence[Any]) -> dict[str, float]:
    """Return the scores of all metrics. Raises OwnCodeError for one that fails, or returns no finite numbers."""
    scores: dict[str, float] = {}
    for metric in metrics:
        values = call_own(METRICS, metric, list(predictions), list(map(row_of, samples)))
        for name, value in checked_scores(metric, values).items():
            if name in scores:
                raise OwnCodeError(METRICS, f"{path_of(metric)} returned {name!r}, which another metric has; rename it")
            scores[name] = value
    return scores


def checked_scores(metric: OwnCode, values: Any) -> dict[str, float]:
    """Return what a metric returned as plain floats. Raises OwnCodeError if it is no dict of finite numbers by name."""
    path = path_of(metric)
    if not isinstance(values, Mapping) or not values:
        shown = type(values).__name__ if values is None or not isinstance(values, Mapping) else "empty dict"
        raise OwnCodeError(METRICS, f"{path} returned {shown}; return a dict of floats by name")
    scores = {}
    for name, value in values.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in ("loss", "heldout_loss"):
            words = f"{path} returned a score called {name!r}; use letters, digits and _.@-, and not the name of a loss"
            raise OwnCodeError(METRICS, words)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise OwnCodeError(METRICS, f"{path} returned {name} = {value!r}; return a finite number")
        scores[name] = float(value)
    return scores


def try_metrics(
    params: RunParams, model: nn.Module, processor: SampleProcessor | None, sources: Mapping[str, Splits]
) -> None:
    """Try the metrics on one held-out sample, with its own text as the prediction, before any rank starts.

    Raises OwnCodeError for a metric that fails, ParamError for a model that cannot answer, and for a `keep_best` that
    no metric returns.
    """
    train = params.train
    if not train.metrics:
        return
    if processor is not None:
        check_generates(params, model, processor)
    for name in sources:
        sample = next(iter(sources[name]["heldout"]), None)
        if sample is not None:
            break
    else:
        raise ParamError("train.eval_every", "no source has a held-out sample; unset train.metrics")
    read = as_sample(sample, params.data)
    with own_random(train.seed):
        scores = score(train.metrics, [read.text if read else ""], [sample])
    if train.best_name and train.best_name not in ("heldout_loss", *scores):
        words = f"{train.keep_best!r} is no score; choose heldout_loss, {', '.join(scores)}, or one with a minus"
        raise ParamError("train.keep_best", words)


def check_generates(params: RunParams, model: nn.Module, processor: SampleProcessor) -> None:
    """Raise ParamError if the metrics' texts cannot be generated with the model on its ranks."""
    reason = why_no_captions(model, processor)
    if reason:
        raise ParamError(METRICS, f"{reason.replace('captions need', 'they need')}; unset it")
    reason = why_not_together(params, model)
    if reason:
        raise ParamError(BUILD, reason)
