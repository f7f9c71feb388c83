"""Evaluate on samples that no training shows: their loss on all ranks while it goes on, and captions after it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from PIL import Image
from torch import nn

from ... import checkpoint
from ...checkpoint.steps import has_average
from ...core.collectives import compute_device, gather_json, sum_over_ranks
from ...core.freeze import train_mode
from ...core.inference import keep_gathered
from ...core.micro_batch import label_tokens, loss_of
from ...core.quantize import quantize_model
from ...core.step import count_labels, token_sum
from ...params import Device, ParamError, RunParams
from ...params.in_words import size
from ...params.phases import phase_of_step
from ..data.batch import Batch, Sample
from ..data.corrupt import CorruptRecord, first_reasons
from ..data.loader import SkippedRecords, add_skipped
from ..data.open_sources import Splits, open_for
from ..data.own_processor import accepted
from ..data.own_random import seed_all
from ..data.processor import IMAGE, SampleProcessor
from ..data.sources.reader import as_sample
from ..models.build import build_model, freeze_model
from ..run.files.folder import make_inner_folder, open_own, read_json, write_json
from ..run.files.run_record import RunRecord
from ..run.launchers.registry import check_no_replay
from ..run.ranks.hang import Heartbeat
from ..run.trust import own_code_of
from .callbacks import AtEvaluation, Training
from .features import FeatureCache

CAPTION_BATCH = 50
"""Prompts that are answered in one batch."""
MAX_NEW_TOKENS = 24
MAX_WEIGHTS_SHARE = 0.9
"""Share of a GPU's free memory that the weights may have when captions are made; the rest is for activations."""
PICTURES_KEPT = 12
"""Pictures kept in the run folder with their captions, per split."""


@dataclass
class HeldOut(AtEvaluation):
    """The first held-out samples of each source, dealt to the ranks."""

    batches: list[Batch]
    """Batches of this rank. All ranks have as many: those beyond its samples are blank, without label tokens."""

    @classmethod
    def open(
        cls,
        params: RunParams,
        processor: SampleProcessor,
        skipped: Mapping[str, SkippedRecords],
        sources: Mapping[str, Splits] | None = None,
    ) -> HeldOut | None:
        """Read the samples, if `train.eval_every` is set. Every rank must call it.

        Those that cannot be used are added to `skipped`, by the source's name. `sources` are what `open_sources` gives,
        if they are open. Raises ParamError if a source cannot be opened, or none of its held-out samples can be used.
        """
        settings, rank, world_size = params.train, dist.get_rank(), dist.get_world_size()
        if settings.eval_every is None:
            return None
        if sources is None:
            sources = open_for(processor, params)
        sizes = params.data.batch_sizes(settings.batch_size)
        batches = []
        for i, (name, data) in enumerate(params.data.sources().items()):
            source = sources[name]["heldout"]
            own_processor = replace(processor, max_length=data.max_length)
            samples = []
            unusable: dict[str, str] = {}
            for sample in islice(source, rank, settings.eval_samples, world_size):
                try:
                    samples.append(own_processor.encode(sample))
                except CorruptRecord as error:
                    unusable[sample.label] = error.reason
            tokens = 0
            for start in range(0, max(gather_json(len(samples))), sizes[i]):
                batch = own_processor.collate(samples[start : start + sizes[i]])
                batches.append(replace(batch, weight=data.weight, source=name))
                tokens += batch.label_tokens
                unusable |= batch.skipped
            unusable = source.skipped | unusable  # those that no model can read, then those that this one cannot
            skipped[name].add(unusable)
            if not any(gather_json(tokens)):
                reasons = f" ({first_reasons(unusable)})" if unusable else ""
                message = f"no held-out sample of {name} can be used{reasons}; raise {name}.max_length, or unset this"
                raise ParamError("train.eval_every", message)
        return cls(batches)

    def evaluate(self, row: dict[str, Any]) -> dict[str, float]:
        """Add the held-out loss to the row, and return it."""
        self.training.beat(f"step {row['step']} held-out samples")
        row["heldout_loss"] = self.loss(self.training.setup.model)
        return {"heldout_loss": row["heldout_loss"]}

    def loss(self, model: nn.Module) -> float:
        """Return heldout_loss, in the units of `train_step`'s. Every rank must call it.

        Leaves the model in training mode, and sharded as between two steps.
        """
        device = compute_device(model)
        rank_tokens = [label_tokens(model, batch) for batch in self.batches]
        sources, weights, tokens, _ = count_labels(self.batches, rank_tokens, device)
        sums = torch.zeros_like(weights)
        model.eval()
        with torch.no_grad(), keep_gathered(model):
            for batch, count in zip(self.batches, rank_tokens, strict=True):
                mean = loss_of(model(**batch.to(device).inputs())).float()
                sums[sources.index(batch.source)] += token_sum(mean, count)
        train_mode(model)
        return float((sum_over_ranks(sums) / tokens) @ weights)


def training_held_out(training: Training) -> HeldOut | None:
    """Return the held-out samples of a training, if `train.eval_every` is set. Every rank must call it."""
    held_out = HeldOut.open(training.setup.params, training.processor, training.loader.skipped, training.sources)
    if held_out is not None:
        held_out.training = training
        if isinstance(training.features, FeatureCache):  # encoded once
            held_out.batches = training.features.fill(training.setup.model, held_out.batches)
    return held_out


def train_and_caption(folder: Path) -> None:
    """Train, then caption new pictures on rank 0: what every rank of a sweep's member calls."""
    from . import run

    run(folder)
    if os.environ["RANK"] == "0":
        beat = Heartbeat(folder, 0)
        caption_held_out(folder, beat=lambda what: beat(f"captions: {what}"))


def caption_held_out(folder: Path, *, best: bool = False, beat: Callable[[str], object] = str) -> dict[str, Any]:
    """Caption new pictures, write result.json and the first pictures in the folder. Returns the result.

    `best`: with the checkpoint that `train.keep_best` kept. With the moving average of the weights where the checkpoint
    has one, as in all evaluations. `beat` is called with what comes next, such as a tensor or a batch.

    Keys: seconds: from the launch to the end of the training, and of captioning; caption_step: of the checkpoint,
    the last one unless the run was broken off; caption_device: where captions were made; heldout_exact_match,
    unseen_combination_exact_match (generated pictures only), text_only_exact_match: shares of samples whose whole text
    is right; captions: picture file, truth, caption and split of the first few; no_captions: why there are none.
    """
    start = time.time()
    params, model, processor = load_run(folder, best=best, ema=None, beat=beat)
    result: dict[str, Any] = read_json(folder / "result.json") or {}
    unusable: dict[str, str] = {}
    reason = why_no_captions(model, processor)
    if reason:
        result |= {"captions": [], "no_captions": reason}
    else:
        result |= answers_to_new(folder, params, model, processor, unusable, beat)
    del model
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # a notebook's kernel lives on, and the next run needs the memory
    if "skipped" in result:
        add_skipped(result["skipped"]["data"], unusable)
    result["caption_step"] = checkpoint.marker_of(chosen_checkpoint(folder, best=best))["step"]
    record = RunRecord.read(folder)
    if record:
        trained = (read_json(folder / "status.json") or {}).get("finished", start)
        result["seconds"] = trained - record.created + time.time() - start
    write_json(folder / "result.json", result)
    return result


def answers_to_new(
    folder: Path,
    params: RunParams,
    model: Any,
    processor: SampleProcessor,
    unusable: dict[str, str],
    beat: Callable[[str], object],
) -> dict[str, Any]:
    """Caption new pictures. Returns the keys of `caption_held_out` about them; adds to `unusable`, label to reason."""
    result: dict[str, Any] = {}
    rows: list[dict[str, str]] = []
    keys = {"heldout": "heldout_exact_match", "unseen": "unseen_combination_exact_match"}
    beat("the data")
    with own_code_of(folder, params), on_run_device(model, params) as result["caption_device"]:
        for split, items in new_samples(params, processor, params.train.eval_samples, unusable):
            texts = captions(model, processor, items, beat=beat)
            samples = [sample for item in items if (sample := as_sample(item, params.data))]
            result[keys[split]] = exact_match(texts, samples)
            rows += keep_pictures(folder, split, samples, texts)
            if split == "heldout" and samples == items:  # not for rows of an own reader, whose pictures nobody knows
                blind = captions(model, processor, [without_pictures(sample) for sample in samples], beat=beat)
                result["text_only_exact_match"] = exact_match(blind, samples)
    return result | {"captions": rows}


def why_no_captions(model: nn.Module, processor: SampleProcessor) -> str:
    """Return why a model cannot be asked for texts, or "". Only an own model may be so."""
    lacks = [] if callable(getattr(model, "generate", None)) else ["a model with generate"]
    if not processor.can_prompt:
        lacks.append("a processor with prompts and decode")
    return f"captions need {' and '.join(lacks)}, which model.build does not return" if lacks else ""


@contextmanager
def on_run_device(model: nn.Module, params: RunParams) -> Iterator[str]:
    """Move a model to where its run trains, to compute as the run does; gives the name of that: cpu; or cuda:0, bf16.

    On the CPU it stays in the format that it is in.
    """
    device, precision = caption_device(model, params), params.fsdp.mixed_precision
    if device.type == "cpu" or precision is None:
        model.to(device)
        yield str(device)
        return
    with computing_in(model, device, precision.to_torch()):
        yield f"{device}, {precision}"


@contextmanager
def computing_in(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Move a model to a device, its floating-point parameters to a dtype, and compute in that.

    Buffers keep their dtype: in 16 bits the frequencies of rotary positions would lose digits.
    """
    for p in model.parameters():
        p.data = p.data.to(device, dtype if p.is_floating_point() else p.dtype)
    model.to(device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        yield


def caption_device(model: nn.Module, params: RunParams) -> torch.device:
    """Return this process's GPU; the CPU for a run on the CPU, without a GPU, and for a model that does not fit."""
    cpu = torch.device("cpu")
    if params.train.device is Device.CPU or not torch.cuda.is_available():
        return cpu
    precision, needed = params.fsdp.mixed_precision, 0
    for tensor in (*model.parameters(), *model.buffers()):
        is_cast = precision is not None and tensor.is_floating_point()
        needed += tensor.numel() * (precision.to_torch() if precision and is_cast else tensor.dtype).itemsize
    gc.collect()  # a training in this process has left its model in cycles of references
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if needed > MAX_WEIGHTS_SHARE * free:
        sizes = f"{size(needed)} for its weights, and {size(free)} are free"
        print(f"captions are made on the CPU: on the GPU the model needs {sizes}")
        return cpu
    return torch.device("cuda", torch.cuda.current_device())


def load_run(
    folder: Path,
    *,
    quantized: bool = True,
    best: bool = False,
    ema: bool | None = False,
    beat: Callable[[str], object] = str,
) -> tuple[RunParams, Any, SampleProcessor]:
    """Load the model of a run with its newest complete checkpoint into this process, ready to caption.

    Args:
        folder: The run's folder.
        quantized: Keep frozen matrices in codes if the run had them so; otherwise all are as they were before.
        best: Take the checkpoint that `train.keep_best` kept, with the moving average of its weights if it has one,
            since that has the score.
        ema: Take the moving average of the weights. None: take it if the checkpoint has one.
        beat: Called with what comes next, such as a tensor's name.

    Returns:
        The run's parameters in the phase of the checkpoint (`train.freeze_from`), the model and its processor.

    Raises:
        ParamError: If the run has no such checkpoint or average, or other frozen weights than it was trained with.
    """
    beat("the model")
    check_no_replay(folder, "captioned or exported")
    of_run = RunParams.from_yaml(folder / "params.yaml")  # first: it says if the folder is no run
    chosen = chosen_checkpoint(folder, best=best)
    params = phase_of_step(of_run, checkpoint.marker_of(chosen)["step"]).params
    transformers.utils.logging.disable_progress_bar()
    seed_all(params.train.seed)  # backbones without weights are random, and the run's
    with own_code_of(folder, params):
        model, processor = build_model(params.model)
        freeze_model(model, params.model)
    assert processor is not None, "no run starts without a tokenizer"
    if quantized:
        quantize_model(model, params.fsdp, beat)
    # Before loading: the marker's checksums are of the frozen weights as built. A checkpoint may hold trained values
    # of parameters that were frozen later.
    checksums = checkpoint.frozen_checksums(model, beat)
    beat("the checkpoint")
    checkpoint.check_frozen(checksums, checkpoint.load(model, chosen))
    if ema or ((best or ema is None) and has_average(chosen)):
        checkpoint.load_average(model, chosen)
    return params, model.eval(), processor


def chosen_checkpoint(folder: Path, *, best: bool = False) -> Path:
    """Return a run's newest complete checkpoint, or its best one. Raises ParamError if there is none."""
    checkpoints = folder / "checkpoints"
    return checkpoint.best(checkpoints) if best else checkpoint.latest(checkpoints)


def new_samples(
    params: RunParams, processor: SampleProcessor, count: int, skipped: dict[str, str] | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each split that no training shows with its first samples, if any: heldout and, generated, unseen.

    Args:
        params: The parameters of the run, which name its data.
        processor: The processor of its samples. An own one gets the rows of an own reader as they are.
        count: The most samples of a split.
        skipped: Gets the samples that cannot be used, label to reason.
    """
    skipped = {} if skipped is None else skipped
    own_processor = replace(processor, max_length=params.data.max_length)
    splits = open_for(processor, params)["data"]
    for split, source in splits.items():
        if split == "train":
            continue
        samples = about_pictures(source, params, own_processor, count, skipped)
        skipped |= source.skipped
        if samples:
            yield split, samples


def about_pictures(
    items: Iterable[Any], params: RunParams, processor: SampleProcessor, count: int, skipped: dict[str, str]
) -> list[Any]:
    """Return the first items of a source that ask about a picture, at most `count`.

    Adds to `skipped` those that the processor cannot use, label to reason.
    """
    samples: list[Any] = []
    for item in items:
        sample = as_sample(item, params.data)
        if sample is None or IMAGE not in sample.prompt:
            continue
        reason = processor.refusal(item)
        if reason:
            skipped[item.label] = reason
        else:
            samples.append(item)
        if len(samples) == count:
            break
    return samples


def exact_match(texts: Sequence[str], samples: Sequence[Sample]) -> float:
    """Return the share of texts that are a right answer, word for word."""
    right = sum(text in sample.truths for text, sample in zip(texts, samples, strict=True))
    return right / len(samples)


def keep_pictures(folder: Path, split: str, samples: Sequence[Sample], texts: Sequence[str]) -> list[dict[str, str]]:
    """Write the first pictures into the run folder; one row each with file, truth, caption and split."""
    make_inner_folder(folder / "captions")
    rows = []
    for i, (sample, text) in enumerate(zip(samples[:PICTURES_KEPT], texts, strict=False)):
        name = f"captions/{split}_{i:02d}.png"
        with open_own(folder / name, "wb") as file:
            sample.images[0].save(file, "PNG")
        rows.append({"image": name, "truth": sample.text, "caption": text, "split": split})
    return rows


@torch.inference_mode()
def captions(
    model: Any, processor: SampleProcessor, samples: Sequence[Any], *, beat: Callable[[str], object] = str
) -> list[str]:
    """Return what the model says to each sample's prompt. Batches are smaller where a GPU has too little memory.

    Raises torch.OutOfMemoryError if a single prompt needs more.
    """
    texts: list[str] = []
    at_once = CAPTION_BATCH
    while len(texts) < len(samples):
        beat(f"{len(texts)} of {len(samples)} texts")
        try:
            _, new_ids = generate(model, processor, samples[len(texts) : len(texts) + at_once])
        except torch.OutOfMemoryError:
            if at_once == 1:
                raise
            at_once = at_once // 2
        else:
            texts += processor.decode(new_ids)
    return texts


def generate(model: Any, processor: SampleProcessor, samples: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """Return the batch of the samples' prompts, and the new tokens (B, up to MAX_NEW_TOKENS) that the model adds.

    options: further ones of `generate`. The `generate` of an own model gets those that it takes, and may return
    anything that its processor decodes.
    """
    batch: Any = processor.prompts(samples).to(next(model.parameters()).device)
    options |= {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
    return batch, batch.new_tokens(model.generate(**batch.inputs(), **accepted(model.generate, **options)))


def without_pictures(sample: Sample) -> Sample:
    """Return the sample with empty pictures of the same sizes."""
    return replace(sample, images=tuple(Image.new("RGB", picture.size, "gray") for picture in sample.images))
