"""Records of similar length follow each other, ranks get about as many tokens, and a resumed run goes on exactly."""

import json
from itertools import islice

import numpy as np
import pytest
from material import CLIP_MEAN, CLIP_STD, make_tokenizer, picture_bytes

from mmfsdp.kit.data import Processor
from mmfsdp.kit.data.loader import batches
from mmfsdp.kit.data.open_sources import open_sources
from mmfsdp.kit.data.sources.arrange import Arrange, deal_evenly
from mmfsdp.kit.data.sources.stream import DataSlice, IndexedSource
from mmfsdp.params import DataParams, ParamError

LENGTHS = np.random.default_rng(0).integers(4, 200, size=1_003)


def padding(order: np.ndarray, size: int) -> int:
    whole = LENGTHS[order[: len(order) // size * size]].reshape(-1, size)
    return int((whole.max(axis=1, keepdims=True) - whole).sum())


def test_an_order_by_length_has_every_record_once_and_groups_with_little_padding_in_every_epoch():
    source = IndexedSource(lambda index: index, len(LENGTHS), 3)
    plain = [source.order(epoch) for epoch in range(3)]
    source.arrange, source.lengths = Arrange(by_length=16), LENGTHS
    for epoch in range(3):
        order = source.order(epoch)
        assert sorted(order) == list(range(len(LENGTHS))) and not np.array_equal(order, plain[epoch])
    stream = np.concatenate([source.order(epoch) for epoch in range(3)])
    assert padding(stream, 16) < padding(np.concatenate(plain), 16) / 10, "groups stand at multiples of their size"
    first = [LENGTHS[stream[start : start + 16]].max() for start in range(0, 800, 16)]
    assert first != sorted(first, reverse=True), "short and long groups take turns"


def test_the_longest_group_comes_first_if_asked():
    source = IndexedSource(lambda index: index, len(LENGTHS), 3, lengths=LENGTHS)
    source.arrange = Arrange(by_length=16, longest_first=True)
    assert LENGTHS.argmax() in source.order(0)[:16]
    assert sorted(source.order(0)) == list(range(len(LENGTHS)))
    source.arrange = Arrange(by_length=16)
    assert LENGTHS.argmax() not in source.order(0)[:16]


def test_ranks_are_dealt_about_as_many_tokens_and_the_same_records_a_step():
    lengths = LENGTHS[:960].reshape(10, 96)
    dealt = deal_evenly(lengths, 8)
    assert dealt.shape == (10, 8, 12)
    assert (np.sort(dealt.reshape(10, 96), axis=1) == np.arange(96)).all()
    sums = np.take_along_axis(lengths, dealt.reshape(10, 96), 1).reshape(dealt.shape).sum(-1)
    plain = lengths.reshape(10, 8, 12).sum(-1)
    spread = (sums.max(1) - sums.min(1)).mean()
    assert spread < (plain.max(1) - plain.min(1)).mean() / 4

    source = IndexedSource(lambda index: index, len(LENGTHS), 3, lengths=LENGTHS)
    source.arrange = Arrange(even_ranks=True)
    slices = [DataSlice(batch_size=12, rank=rank, world_size=8, start=9) for rank in range(8)]
    of_ranks = [list(islice(source.batches(each), 3)) for each in slices]
    source.arrange = None
    whole = islice(source.batches(DataSlice(batch_size=96, start=9)), 3)
    for step, records in enumerate(whole):  # the second one goes over into the next epoch
        assert sorted(record for batches in of_ranks for record in batches[step]) == sorted(records)
        sums = [LENGTHS[batches[step]].sum() for batches in of_ranks]
        assert max(sums) - min(sums) < spread * 2


@pytest.fixture
def rows(tmp_path):
    lines = []
    for i in range(60):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes(size=(9 + i, 8)))
        lines.append(json.dumps({"file_name": f"{i}.png", "text": "red dog " * (1 + 37 * i % 11)}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    return DataParams(source="folder", path=str(tmp_path), max_length=30, heldout_fraction=0.05, by_length=8)


def test_a_run_by_length_continues_exactly_whatever_its_ranks_and_workers_and_pads_less(rows):
    processor = Processor(make_tokenizer(eos_token="</s>"), 8, CLIP_MEAN, CLIP_STD)

    def ids(params, micro_steps, **options):
        stream = batches(params, processor, batch_size=options.pop("batch_size", 4), seed=1, **options)
        return [next(stream) for _ in range(micro_steps)]

    whole = ids(rows, 30, batch_size=8)
    later = ids(rows, 10, batch_size=8, start=20)
    assert [batch.input_ids.tolist() for batch in later] == [batch.input_ids.tolist() for batch in whole[20:]]
    of_ranks = zip(*(ids(rows, 30, rank=rank, world_size=2) for rank in range(2)), strict=True)
    for batch, (first, second) in zip(whole, of_ranks, strict=True):
        samples = [row[row != processor.pad_id].tolist() for row in batch.input_ids]
        parts = [row[row != processor.pad_id].tolist() for each in (first, second) for row in each.input_ids]
        assert samples == parts

    def padded(params) -> int:
        return sum(batch.padded for batch in ids(params, 30, batch_size=8))

    assert padded(rows) < padded(rows.change(by_length=0)) / 2
    for batch in whole:
        lengths = [(row != processor.pad_id).sum().item() for row in batch.input_ids]
        assert batch.padded == batch.input_ids.numel() - sum(lengths)


@pytest.mark.real
def test_data_workers_know_the_lengths(rows):
    processor = Processor(make_tokenizer(eos_token="</s>"), 8, CLIP_MEAN, CLIP_STD)
    found = []
    for workers in (0, 2):
        stream = batches(rows.change(workers=workers), processor, batch_size=4, seed=1)
        found.append([next(stream).input_ids.tolist() for _ in range(6)])
    assert found[0] == found[1]


def test_lengths_that_nobody_can_know_are_refused_by_name(rows, tmp_path, monkeypatch):
    with pytest.raises(ParamError, match="longest_first: has no effect without by_length"):
        rows.change(by_length=0, longest_first=True)
    with pytest.raises(ParamError, match="by_length: .* no effect unless source is"):
        DataParams(by_length=8)
    row = {"image": str(tmp_path / "0.png"), "text": "dog"}
    (tmp_path / "my_rows.py").write_text(f"def read():\n    yield from [{row!r}] * 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = DataParams(reader="my_rows:read", even_ranks=True)
    with pytest.raises(ParamError, match="data.even_ranks: .* come one after the other"):
        open_sources(own, image_size=8)
    monkeypatch.setattr(Processor, "measure", lambda *_: None)
    processor = Processor(make_tokenizer(eos_token="</s>"), 8, CLIP_MEAN, CLIP_STD)
    with pytest.raises(ParamError, match="data.by_length: needs the length of every record"):
        batches(rows, processor, batch_size=4)
