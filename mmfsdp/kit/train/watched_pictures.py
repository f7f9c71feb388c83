"""Watched pictures: a few held-out pictures that the model captions at each evaluation (`train.eval_pictures`).

A person sees by them what a loss does not show: "? ?", then "two red", then "two small red hearts".
"""

from __future__ import annotations

import io
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch.distributed as dist
from PIL import Image

from ...core.collectives import gather_json
from ...own.calls import OwnCodeError, own_errors
from ..data.sources.reader import as_sample
from ..run.files.folder import RowsWriter
from ..run.files.watched_file import MAX_CAPTION, captions_writer, drop_captions, write_pictures
from .callbacks import AtEvaluation, Training
from .evaluate import about_pictures, why_no_captions
from .held_out_texts import Share, in_order, texts_of_rank, why_not_together

SIDE = 112
"""Pixels of the longer side of a picture in the run folder."""


class WatchedPictures(AtEvaluation):
    """Captions the same held-out pictures after the first step and at each evaluation, on all ranks.

    Rank 0 writes them. What they take is counted apart: neither their bytes nor their seconds are a step's.
    """

    def __init__(self, training: Training, share: Share, writer: RowsWriter | None):
        """writer: of the captions, on rank 0."""
        self.training = training
        self._share, self._writer = share, writer
        self._failed = ""

    def due(self, step: int) -> bool:
        """Return True for a step after which is evaluated, and for the first one, to show how it begins."""
        return step == 1 or super().due(step)

    def evaluate(self, row: dict[str, Any]) -> dict[str, float]:
        """Write the captions. There is no score."""
        counted = self.training.collectives
        if self._failed:
            return {}
        assert counted is not None, "the meter of wire bytes is made first"
        start = time.perf_counter()
        counted.reset()
        said = gather_json(self._said(row["step"]))
        figures = {"seconds": time.perf_counter() - start, "wire_bytes": counted.wire_bytes}
        self._failed = next((each for each in said if isinstance(each, str)), "")
        if self._failed:
            _say(f"{self._failed}; mend it, or set train.eval_pictures to 0")
        elif self._writer is not None:
            captions = [text[:MAX_CAPTION] for text in in_order(said)]
            self._writer.write({"step": row["step"], "captions": captions, **figures})
        return {}

    def _said(self, step: int) -> list[str] | str:
        """Return what the model says to this rank's pictures; for an own model that raises, what it raised."""
        if self.training.setup.params.model.build is None:
            return texts_of_rank(self.training, self._share, step)
        try:
            with own_errors("model.build", "generate of the model raised"):
                return texts_of_rank(self.training, self._share, step)
        except OwnCodeError as error:  # training does not need this code
            return str(error)


def training_pictures(training: Training) -> WatchedPictures | None:
    """Return the watched pictures of a training; None where it evaluates nothing, or cannot say anything.

    Every rank must call it.
    """
    setup, is_first = training.setup, dist.get_rank() == 0
    params, step = setup.params, training.state.step
    if is_first:
        drop_captions(setup.folder, after=step)  # also of a run that watches no pictures any more
    if params.train.eval_every is None or not params.train.eval_pictures:
        return None
    reason = why_no_captions(setup.model, training.processor) or why_not_together(params, setup.model)
    if reason:
        _say(reason)
        return None
    name, data = next(iter(params.data.sources().items()))
    processor = replace(training.processor, max_length=data.max_length)
    items = islice(training.sources[name]["heldout"], params.train.eval_samples)
    samples = about_pictures(items, params, processor, params.train.eval_pictures, {})
    if not samples:
        _say(f"none of the first {params.train.eval_samples} held-out samples of {name} asks about a picture")
        return None
    writer = None
    if is_first:
        asked = [sample for item in samples if (sample := as_sample(item, params.data))]
        write_pictures(setup.folder, [_small(sample.images[0]) for sample in asked], [s.text for s in asked])
        writer = captions_writer(setup.folder, after=step)
    return WatchedPictures(training, Share.deal(processor, samples, params.train.batch_size), writer)


def _say(reason: str) -> None:
    """Print, once and on rank 0, why no pictures are captioned while training goes on."""
    if dist.get_rank() == 0:
        print(f"no pictures are captioned at evaluations: {reason}")


def _small(picture: Image.Image) -> bytes:
    """Return a small copy of a picture as a PNG file."""
    small, file = picture.convert("RGB"), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "PNG")
    return file.getvalue()
