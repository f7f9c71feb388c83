"""After training: load the checkpoint into one process and caption pictures that no training ever showed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from . import checkpoint, runs
from .build import build_model
from .data.batch import Batch, Sample
from .data.processor import Processor
from .data.sources import open_source
from .freeze import freeze
from .models import MediaModel
from .params import DataSource, RunParams

BATCH = 50
SHOWN = 12
"""Pictures kept in the run folder with their captions, per split."""


def load_run(folder: Path) -> tuple[RunParams, MediaModel, Processor]:
    """The model of a run with its newest complete checkpoint, in this process, ready to caption.

    Raises ParamError where the run has no checkpoint.
    """
    params = RunParams.from_yaml(folder / "params.yaml")
    newest = checkpoint.latest(folder / "checkpoints")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(params.train.seed)  # backbones without weights are random, and the run's
    model, processor = build_model(params.model)
    assert processor is not None, "no run starts without a tokenizer"
    freeze(model, params.model.freeze)
    checkpoint.check_frozen(checkpoint.frozen_checksums(model), checkpoint.load(model, newest))
    return params, model.eval(), processor


def caption_held_out(folder: Path, *, since: float | None = None, alive: Callable[[], object] = bool) -> dict[str, Any]:
    """Caption new pictures, write result.json and the first pictures beside it. Returns the result.

    `since` (unix seconds) is when the whole job began, if earlier than the launch; `seconds` counts from there to the
    end of the training, and what captioning takes, whenever it is done. `alive` is called before each batch.

    Keys: caption_step: that of the checkpoint, the last one's unless the run was broken off; heldout_exact_match,
    unseen_combination_exact_match (generated pictures only), text_only_exact_match: shares of samples whose whole text
    is right; captions: picture file, truth, caption and split of the first few.
    """
    start = time.time()
    params, model, processor = load_run(folder)
    result: dict[str, Any] = runs.read_json(folder / "result.json") or {}
    rows: list[dict[str, str]] = []
    splits = {"heldout": "heldout_exact_match", "unseen": "unseen_combination_exact_match"}
    for split, samples in new_samples(params, processor, params.train.eval_samples):
        said = captions(model, processor, samples, alive=alive)
        result[splits[split]] = exact_match(said, samples)
        rows += keep_pictures(folder, split, samples, said)
        if split == "heldout":
            result["text_only_exact_match"] = exact_match(
                captions(model, processor, samples, blank=True, alive=alive), samples
            )
    result["captions"] = rows
    result["caption_step"] = checkpoint.marker_of(checkpoint.latest(folder / "checkpoints"))["step"]
    record, status = runs.RunRecord.read(folder), runs.read_json(folder / "status.json") or {}
    if began := since or (record and record.created):
        result["seconds"] = status.get("finished", start) - began + time.time() - start
    runs.write_json(folder / "result.json", result)
    return result


def new_samples(params: RunParams, processor: Processor, most: int) -> Iterator[tuple[str, list[Sample]]]:
    """(split, its first samples that can be captioned) of what no training shows: heldout, and of generated pictures
    unseen, too."""
    for split in ("heldout", "unseen") if params.data.source is DataSource.SHAPES else ("heldout",):
        source = open_source(params.data, split=split, image_size=processor.image_size, seed=params.train.seed)
        yield split, list(islice(filter(processor.takes, source), most))


def train_and_caption(folder: Path) -> None:
    """Train, then caption new pictures on rank 0: what every rank of a sweep's member calls."""
    from .train import run

    run(folder)
    if os.environ["RANK"] == "0":
        beat = runs.Beat(folder, 0)
        caption_held_out(folder, alive=lambda: beat("trained, captions"))


def exact_match(said: Sequence[str], samples: Sequence[Sample]) -> float:
    """Share of texts that are the truth, word for word."""
    return sum(a == b.text for a, b in zip(said, samples, strict=True)) / len(samples)


def keep_pictures(folder: Path, split: str, samples: Sequence[Sample], said: Sequence[str]) -> list[dict[str, str]]:
    """Write the first pictures into the run folder; one row each with file, truth, caption and split."""
    (folder / "captions").mkdir(exist_ok=True)
    rows = []
    for i, (sample, caption) in enumerate(islice(zip(samples, said, strict=True), SHOWN)):
        name = f"captions/{split}_{i:02d}.png"
        sample.images[0].save(folder / name)
        rows.append({"image": name, "truth": sample.text, "caption": caption, "split": split})
    return rows


@torch.inference_mode()
def captions(
    model: MediaModel,
    processor: Processor,
    samples: Sequence[Sample],
    *,
    blank: bool = False,
    alive: Callable[[], object] = bool,
) -> list[str]:
    """What the model says to each sample's prompt. With `blank`, it sees empty pictures."""
    said: list[str] = []
    for start in range(0, len(samples), BATCH):
        alive()
        said += processor.decode(_asked(model, processor, samples[start : start + BATCH], blank)[1])
    return said


@dataclass(frozen=True)
class Answer:
    """What the model says to one prompt, token by token."""

    text: str
    tokens: tuple[tuple[str, float, str], ...]
    """(piece, its probability, the likeliest pieces with theirs) of each new token, the end among them."""
    ids: torch.Tensor
    """(1, L): prompt and answer."""
    media: dict[str, torch.Tensor]


@torch.inference_mode()
def answer(model: MediaModel, processor: Processor, sample: Sample, *, blank: bool = False) -> Answer:
    """What the model says to a sample's prompt, and how sure it is. With `blank`, it sees empty pictures."""
    batch, new = _asked(model, processor, [sample], blank)
    ids = torch.cat([batch.input_ids, new], dim=1)
    logits = model(ids, media=batch.media).logits[0, batch.input_ids.shape[1] - 1 : -1]
    tokens = []
    for token, row in zip(new[0].tolist(), logits.float().softmax(-1), strict=True):
        likely = [f"{_piece(processor, i)} {p:.0%}" for p, i in zip(*(x.tolist() for x in row.topk(3)), strict=True)]
        tokens.append((_piece(processor, token), float(row[token]), ", ".join(likely)))
    return Answer(processor.decode(new)[0], tuple(tokens), ids, batch.media)


def _piece(processor: Processor, token: int) -> str:
    return "(end)" if token == processor.end_id else processor.tokenizer.decode([token])


def _asked(
    model: MediaModel, processor: Processor, samples: Sequence[Sample], blank: bool
) -> tuple[Batch, torch.Tensor]:
    """The batch of prompts, and the new tokens (B, up to 24) that the model adds to them."""
    batch = processor.prompts(samples).to(next(model.parameters()).device)
    if blank:
        batch = replace(batch, media={key: torch.zeros_like(x) for key, x in batch.media.items()})
    ids = model.generate(**batch.inputs(), max_new_tokens=24)
    return batch, ids[:, batch.input_ids.shape[1] :]
