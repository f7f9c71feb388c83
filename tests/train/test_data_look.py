"""The largest batch of the data is known before a launch: it is the one that is largest when all batches are made."""

import json
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tiny_run import tiny_run
from transformers import AutoProcessor

from mmfsdp import build_model, freeze
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.data.loader import batches
from mmfsdp.kit.data.record_sizes import lengths_of
from mmfsdp.kit.spawn_ranks import on_ranks
from mmfsdp.kit.train import data_batch
from mmfsdp.kit.train.prepare import kept_model, opened, peak_of, prepare, preview
from mmfsdp.kit.train.record_lengths import measure_lengths
from mmfsdp.params import RunParams
from tests.bench.peaks import measure
from tests.tiny_vlms import save_vlm

GIANT = 17


def conversations(folder, number=40) -> RunParams:
    """A run over pictures of one size but one, which has more than ten times the tokens of the others."""
    save_vlm("qwen2_5_vl", folder / "model")
    processor = AutoProcessor.from_pretrained(folder / "model")
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 1_000_000}
    processor.save_pretrained(folder / "model")
    rows = []
    for i in range(number):
        Image.new("RGB", (560, 420) if i == GIANT else (56, 28 + 14 * (i % 3))).save(folder / f"{i}.png")
        turns = [{"from": "human", "value": "<image>" + "x" * (i % 5)}, {"from": "gpt", "value": "ok"}]
        rows.append({"id": i, "image": f"{i}.png", "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))
    return RunParams(
        model={"kind": "transformers", "name": str(folder / "model")},
        data={"source": "json", "path": str(folder / "rows.json"), "max_length": 400},
        train={"steps": 5, "batch_size": 2, "accumulation": 2, "seed": 5, "warmup_steps": 1, "device": "cpu"},
        launch={"folder": str(folder / "runs"), "ranks": 2},
    )


def texts(folder, number=11) -> RunParams:
    """A run over pictures of which one has a longer text than others."""
    params = tiny_run(folder, **{"data.max_length": 30, "launch.ranks": 2, "train.seed": 3, "data.augment": False})
    lines = (folder / "pictures/metadata.jsonl").read_text().splitlines()
    row = json.loads(lines[4])
    row["text"] += " a red circle" * 5
    (folder / "pictures/metadata.jsonl").write_text("\n".join([*lines[:4], json.dumps(row), *lines[5:]]))
    return params


@pytest.mark.parametrize("make, giant", [(conversations, f"rows.json:{GIANT}"), (texts, "4.png")])
def test_the_largest_batch_is_the_one_with_the_highest_peak_of_all_that_a_run_takes(make, giant, tmp_path):
    params = make(tmp_path)
    plan, cost = preview(params)
    data, train, ranks = cost.data, params.train, params.launch.ranks
    assert data.covers_run and cost.batch == "the largest batch of the run"

    _, processor = kept_model(params)
    length = params.data.max_length
    processor = replace(processor, max_length=length)
    peaks, tokens, padded = {}, 0, np.zeros((train.steps * train.accumulation, ranks))
    for rank in range(ranks):
        stream = batches(
            params.data, processor, batch_size=train.batch_size, rank=rank, world_size=ranks, seed=train.seed
        )
        for micro_step in range(train.steps * train.accumulation):
            batch = next(stream)
            step = micro_step // train.accumulation + 1
            first = micro_step % train.accumulation == 0
            peak = peak_of(params, plan, batch.inputs(), first=first)["bytes"]
            peaks[step, rank] = max(peak, peaks.get((step, rank), 0))
            tokens += batch.input_ids.numel() - batch.padded
            padded[micro_step, rank] = batch.input_ids.numel()
    assert cost.batch_peak_bytes == max(peaks.values())
    assert peaks[data.largest.step, data.largest.rank] == cost.batch_peak_bytes
    assert data.largest.longest[0].name.startswith(giant) and giant in str(cost)
    assert data.padding == pytest.approx(1 - tokens / padded.sum())
    assert data.waiting == pytest.approx(1 - padded.mean(axis=1).sum() / padded.max(axis=1).sum())
    assert data.possible_peak.bytes >= cost.batch_peak_bytes
    assert data.sizes_differ and not replace(data, padding=0.0, median_tokens=10**6).sizes_differ
    by_step = padded.reshape(train.steps, train.accumulation, ranks).sum(axis=1)
    _, as_ddp = preview(params.change(**{"fsdp.backend": "DDP"}))  # whose ranks wait once a step
    assert as_ddp.data.waiting == pytest.approx(1 - by_step.mean(axis=1).sum() / by_step.max(axis=1).sum())
    [found] = [finding for finding in plan.lint if finding.code == "outsize-records"]
    assert giant in found.message and prepare(params, activations=True).cost == cost


def peaks_of_orders(folder: Path, text: str, step: int) -> list[int]:
    """Return the most that this rank holds in a step of the run, in bytes: as it is, and in the opposite order."""
    params = RunParams.from_yaml(folder / "params.yaml")
    train, processor = params.train, replace(kept_model(params)[1], max_length=params.data.max_length)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = batches(params.data, processor, batch_size=2, rank=rank, world_size=ranks, seed=train.seed)
    of_step = list(islice(stream, (step - 1) * train.accumulation, step * train.accumulation))

    def make(order: int):
        model, _ = build_model(params.model)
        freeze(model, params.model.frozen_patterns)
        return model, of_step[::order]

    return [measure(partial(make, order), WrapPlan.from_json(text))["peak"] for order in (1, -1)]


@pytest.mark.real
def test_ranks_hold_what_is_predicted_for_the_largest_batch_where_it_stands_in_its_step(tmp_path):
    params = texts(tmp_path)
    params.to_yaml(tmp_path / "params.yaml")
    plan, cost = preview(params)
    largest = cost.data.largest
    of_ranks = on_ranks(peaks_of_orders, 2, tmp_path, plan.to_json(), largest.step, backend="one_thread_gloo")
    measured = of_ranks[largest.rank]
    assert measured[0] == max(max(peaks) for peaks in of_ranks)
    look = data_batch.look_at_data(params, kept_model(params)[1], data_batch.PlanCache())
    [batch] = [batch for batch in look.largest if batch.figures == largest]
    predicted = {first: peak_of(params, plan, batch.inputs, first=first)["bytes"] for first in (False, True)}
    assert cost.batch_peak_bytes == predicted[batch.first] == pytest.approx(measured[0], rel=0.02)
    beside_gradients = predicted[False] - predicted[True]
    assert beside_gradients == pytest.approx(abs(measured[0] - measured[1]), rel=0.02) != 0


def test_a_sample_of_the_data_says_that_it_is_one_and_all_data_are_read_if_asked(tmp_path, monkeypatch):
    params = texts(tmp_path).change(**{"train.steps": 40})
    monkeypatch.setattr(data_batch, "MAX_ENTRIES", 2)  # as of a folder that only a launch reads
    assert preview(params)[1].data is None
    whole = preview(params, most=None)[1]
    assert whole.data.covers_run and whole.data.records == whole.data.of
    part = data_batch.look_at_data(params, kept_model(params)[1], data_batch.PlanCache(), opened(params), most=5)
    [few] = part.batches
    assert few.sized.records == 5 and not few.sized.covers_run
    assert few.padded.shape == (1, 2), "five records in batches of two for two ranks"
    shown = " ".join(str(replace(whole, data=replace(whole.data, covers_run=False, records=5))).split())
    assert "5 of 10 records" in shown and "--all-data reads all" in shown


def lengths_by_rank(folder) -> list[int]:
    """Measure the lengths with the other ranks."""
    params = RunParams.from_yaml(folder / "params.yaml")
    sources = opened(params)
    measure_lengths(params, kept_model(params)[1], sources, torch.device("cpu"), lambda text: None)
    return sources["data"]["train"].lengths.tolist()


@pytest.mark.real
def test_ranks_measure_the_lengths_of_records_together(tmp_path):
    params = texts(tmp_path).change(**{"data.by_length": 4})
    params.to_yaml(tmp_path / "params.yaml")
    source = opened(params)["data"]["train"]
    alone = lengths_of(source, replace(kept_model(params)[1], max_length=params.data.max_length)).tolist()
    assert len(set(alone)) > 1 and on_ranks(lengths_by_rank, 2, tmp_path) == [alone, alone]
