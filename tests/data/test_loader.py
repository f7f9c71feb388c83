"""Streams of batches: every record once per epoch, to one rank and one worker, restartable anywhere."""

import colorsys
import random
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from material import CLIP_MEAN, CLIP_STD, make_tokenizer, picture_bytes, write_metadata

from mmfsdp.kit.data import Batch, Batches, Processor, batches, open_source
from mmfsdp.kit.data.loader import SkippedRecords, sum_skipped
from mmfsdp.params import DataParams, MoreParams

NAMES = [f"n{i}" for i in range(48)]
SHAPE_WORDS = "one two three small large red green blue yellow circle square triangle"


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(make_tokenizer(" ".join(NAMES)), 8, CLIP_MEAN, CLIP_STD)


def picture(i: int) -> bytes:
    return picture_bytes(tuple(int(255 * c) for c in colorsys.hsv_to_rgb(i / len(NAMES), 1, 1)))


@pytest.fixture
def folder(tmp_path) -> DataParams:
    """48 pictures, of which two cannot be read and at least one is held out."""
    for i, name in enumerate(NAMES):
        (tmp_path / f"{name}.png").write_bytes(b"damaged" if i in (7, 30) else picture(i))
    write_metadata(tmp_path, [{"file_name": f"{name}.png", "text": name} for name in NAMES])
    return DataParams(source="folder", path=str(tmp_path))


@pytest.fixture
def shards(shard):
    """Writes the same pictures into n shards of unequal size; the parameters to read them."""

    def write(n: int) -> DataParams:
        cuts = [0, *sorted(random.Random(n).sample(range(1, 48), n - 1)), 48]
        for s, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            members = {}
            for i in range(a, b):
                members[f"{NAMES[i]}.png"] = b"damaged" if i in (7, 30) else picture(i)
                members[f"{NAMES[i]}.txt"] = NAMES[i].encode()
            path = shard(f"s{s:02d}.tar", members)
        return DataParams(source="webdataset", path=str(path.parent / f"s{{00..{n - 1:02d}}}.tar"))

    return write


def usable(params: DataParams) -> list[str]:
    return [sample.text for sample in open_source(params, image_size=8)]


def said(processor: Processor, batch: Batch) -> list[str]:
    return processor.decode(batch.input_ids)


def skipped(stream: Batches) -> SkippedRecords:
    (only,) = stream.skipped.values()
    return only


def same(a: Batch, b: Batch) -> bool:
    tensors = [(a.input_ids, b.input_ids), (a.labels, b.labels), (a.media["vision"], b.media["vision"])]
    return all(torch.equal(x, y) for x, y in tensors)


def take(n: int, params: DataParams, processor: Processor, **options) -> list[Batch]:
    return list(islice(batches(params, processor, **{"batch_size": 3, **options}), n))


@pytest.fixture(params=["folder", "one shard", "five shards", "eight shards"])
def real(request, folder, shards) -> DataParams:
    count = {"one": 1, "five": 5, "eight": 8}.get(request.param.split()[0])
    return shards(count) if count else folder


def test_every_record_comes_once_per_epoch_in_a_new_order(real, processor):
    names = usable(real)
    stream = batches(real, processor, batch_size=1)
    heard = [said(processor, batch) for batch in islice(stream, 2 * (len(names) + 2))]  # two corrupt ones per epoch
    first, second = (list(chain(*part)) for part in (heard[: len(names) + 2], heard[len(names) + 2 :]))
    assert [n for n in first if n] != [n for n in second if n]
    assert sorted(n for n in first if n) == sorted(n for n in second if n) == sorted(names)
    assert len(skipped(stream).reasons) == 2


def test_ranks_share_the_single_process_batch_exactly(folder, shards, processor):
    shapes = Processor(make_tokenizer(SHAPE_WORDS), 16, CLIP_MEAN, CLIP_STD)
    for params, own in ((folder, processor), (shards(3), processor), (DataParams(), shapes)):
        params = params.change(augment=True)
        whole = take(12, params, own, batch_size=6)
        parts = [take(12, params, own, batch_size=3, rank=rank, world_size=2) for rank in (0, 1)]
        for batch, left, right in zip(whole, *parts, strict=True):
            assert said(own, batch) == said(own, left) + said(own, right)
            pictures = [part.media["vision"] for part in (left, right)]
            assert torch.equal(batch.media["vision"], torch.cat(pictures))


@pytest.mark.parametrize("start", [1, 7, 40])
def test_a_restart_goes_on_exactly(real, processor, start):
    params = real.change(augment=True)
    for rank in (0, 1):
        options = {"rank": rank, "world_size": 2, "seed": 5}
        straight = take(start + 3, params, processor, **options)
        resumed = take(3, params, processor, start=start, **options)
        assert all(same(a, b) for a, b in zip(straight[start:], resumed, strict=True))


@pytest.mark.real
def test_worker_processes_change_nothing_and_report_what_they_skip(shards, processor):
    params = shards(2).change(augment=True, workers=2)
    spawned = batches(params, processor, batch_size=4, start=3)
    alone = batches(params.change(workers=0), processor, batch_size=4)
    expected = list(islice(alone, 20))
    assert all(same(a, b) for a, b in zip(expected[3:], islice(spawned, 17), strict=True))
    assert skipped(spawned).reasons == skipped(alone).reasons and len(skipped(alone).reasons) == 2


def test_seeds_give_other_orders(real, processor):
    first, again, other = (take(6, real, processor, seed=seed) for seed in (0, 0, 1))
    assert all(map(same, first, again)) and not all(map(same, first, other))


def test_the_global_random_state_is_left_alone(folder, processor):
    before = torch.get_rng_state()
    take(2, folder, processor)
    assert torch.equal(before, torch.get_rng_state())


def test_shards_that_vanish_are_an_error_not_a_hang(shards, processor):
    params = shards(2)
    stream = batches(params, processor, batch_size=4)
    for i in range(2):
        Path(params.path.replace("{00..01}", f"{i:02d}")).write_bytes(b"")
    with pytest.raises(ValueError, match="yield nothing any more"):
        list(stream)


def test_what_the_data_lacked_is_told_once_and_summed_over_ranks(folder, processor, capsys):
    write_metadata(Path(folder.path), [{"file_name": "n0.png", "text": "n1 " * 100}, "{'no': JSON"])
    params = folder.change(max_length=9)
    streams = [batches(params, processor, batch_size=20, rank=rank, world_size=2) for rank in (0, 1)]
    lengths = set()
    for stream in streams:
        for _ in range(4):
            lengths.add(next(stream).input_ids.shape[1])
    told = [line.split("'")[1] for line in capsys.readouterr().out.splitlines()]
    assert set(told) == {"n7.png (metadata.jsonl:8)", "n30.png (metadata.jsonl:31)", "metadata.jsonl:50"}
    assert len(told) <= 6
    (summed,) = sum_skipped([{name: asdict(skipped) for name, skipped in s.skipped.items()} for s in streams]).values()
    assert max(lengths) == 9
    assert summed["records"] == 3 and summed["cut"] > 0 and "is not JSON" in summed["reasons"]["metadata.jsonl:50"]
    assert summed["path"] == folder.path


def test_several_sources_take_turns_each_with_its_batch_size_and_weight(folder, shards, processor):
    more = [
        MoreParams(source="webdataset", path=shards(3).path, batch_size=2, weight=0.2, max_length=5),
        MoreParams(source="folder", path=folder.path),
    ]
    params = folder.change(more=more)
    stream = batches(params, processor, batch_size=6, seed=3)
    taken = [*stream.take(1), *stream.take(2)]
    assert [batch.source for batch in taken] == ["data", "data.more.0", "data.more.1"] * 3
    assert [batch.weight for batch in taken[:3]] == [1.0, 0.2, 1.0] and set(stream.skipped) == set(params.sources())
    assert [lacks.path for lacks in stream.skipped.values()] == [folder.path, more[0].path, folder.path]
    first = taken[::3]
    assert all(map(same, first, take(3, folder, processor, batch_size=6, seed=3)))
    assert not any(map(same, first, taken[2::3])), "one source named twice is read in two orders"
    resumed = batches(params, processor, batch_size=6, seed=3, start=1).take(2)
    assert all(map(same, taken[3:], resumed))
    halves = params.change(more=[more[0].change(batch_size=1), more[1]])
    parts = [batches(halves, processor, batch_size=3, seed=3, rank=rank, world_size=2).take(2) for rank in (0, 1)]
    for batch, left, right in zip(taken, *parts, strict=False):
        assert said(processor, batch) == said(processor, left) + said(processor, right)


def test_a_source_of_which_nothing_is_usable_for_an_epoch_is_an_error_naming_it(folder, processor):
    """Texts that leave nothing to learn are only found by the processor."""
    rows = [{"file_name": f"{name}.png", "text": "<image>"} for name in NAMES]
    (Path(folder.path) / "metadata.jsonl").unlink()
    write_metadata(Path(folder.path), rows)
    params = DataParams(more=[MoreParams(source="folder", path=folder.path, batch_size=4)])
    stream = batches(params, Processor(make_tokenizer(SHAPE_WORDS), 16, CLIP_MEAN, CLIP_STD), batch_size=2)
    with pytest.raises(ValueError, match="data.more.0.path: the last 4. records were all unusable: n.* has no text"):
        stream.take(48)
