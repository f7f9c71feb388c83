"""Parquet files: pictures inside and beside them, damage, memory, and the order in which row groups are read."""

import importlib.util
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from material import both, picture_bytes

from mmfsdp.kit.data import open_splits
from mmfsdp.kit.data.sources import parquet as parquet_file
from mmfsdp.kit.data.sources.stream import Blocks, DataSlice, epoch_order
from mmfsdp.params import DataParams, ParamError

PICTURE = picture_bytes()


def write(path, rows: list[dict], **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def captioned(count: int, **fields) -> list[dict]:
    return [{"image": {"bytes": PICTURE, "path": f"{i}.png"}, "text": f"number {i}", **fields} for i in range(count)]


def opened(path, **changes):
    return open_splits(DataParams(source="parquet", path=str(path), **changes), image_size=8)


def test_of_a_thousand_rows_two_bad_ones_are_named_and_the_rest_is_trained_on(tmp_path):
    rows = captioned(1000)
    rows[17]["image"] = {"bytes": b"no picture", "path": "17.png"}
    rows[940]["text"] = None
    write(tmp_path / "rows.parquet", rows, row_group_size=100)
    train, heldout, skipped = both(tmp_path / "rows.parquet", "parquet")
    assert len(train + heldout) == 998 and len(heldout) > 1
    assert sorted(skipped) == ["rows.parquet:17", "rows.parquet:940"]
    assert "is not a usable picture" in skipped["rows.parquet:17"]
    assert "has no caption" in skipped["rows.parquet:940"]
    assert {s.text for s in train + heldout} == {f"number {i}" for i in range(1000)} - {"number 17", "number 940"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"texts": [{"user": "what?", "assistant": "a pet", "source": "me"}]}, "a pet"),
        ({"conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a dog"}]}, "a dog"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "a cow"}]},
                ]
            },
            "a cow",
        ),
        ({"question": "what?", "answers": ["a cat", "a pet"]}, "a cat"),
    ],
)
def test_nested_columns_are_rows_of_any_shape(fields, text, tmp_path):
    rows = [{"images": [{"bytes": PICTURE, "path": None}], "id": i, **fields} for i in range(5)]
    write(tmp_path / "rows.parquet", rows)
    train, heldout, skipped = both(tmp_path / "rows.parquet", "parquet")
    assert not skipped and len(train + heldout) == 5
    for sample in train + heldout:
        assert sample.text == text and sample.images[0].size == (12, 10)
        assert sample.label == f"rows.parquet:{sample.where.split()[-1]} ({sample.where})"


@pytest.mark.parametrize("column", ["image", "Figure_path"])
def test_pictures_may_lie_beside_and_are_held_out_together(column, tmp_path):
    rows = []
    for i in range(40):
        (tmp_path / f"{i}.png").write_bytes(PICTURE)
        rows += [{column: f"{i}.png", "text": f"{i} {j}", "license": "by"} for j in range(3)]
    write(tmp_path / "rows.parquet", rows, row_group_size=7)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    splits = opened(tmp_path / "rows.parquet", heldout_fraction=0.3)
    heldout = [sample.text for sample in splits["heldout"]]
    as_json = both(tmp_path / "rows.json", "json", heldout_fraction=0.3)[1]
    assert heldout == [sample.text for sample in as_json] and len(heldout) % 3 == 0
    assert "rows have the keys license, which are not read" in " ".join(splits["train"].notes)


def test_one_name_for_all_pictures_says_nothing_of_them(tmp_path):
    rows = [{"image": {"bytes": PICTURE, "path": "image.png"}, "text": f"{i}"} for i in range(100)]
    train, heldout, skipped = both(write(tmp_path / "a.parquet", rows), "parquet", heldout_fraction=0.3)
    assert not skipped and 10 < len(heldout) < 60


def test_published_splits_and_heldout_files(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train", "validation", "test"):
        rows = [row | {"text": name} for row in captioned(3)]
        write(tmp_path / "data" / f"{name}-00000-of-00001.parquet", rows)
    for path, changes, expected in [
        (tmp_path, {}, "validation"),
        (tmp_path / "data", {"heldout": "test"}, "test"),
        (tmp_path / "data" / "train*", {"heldout": str(tmp_path / "data" / "test*")}, "test"),
    ]:
        train, heldout, skipped = both(path, "parquet", **changes)
        assert {s.text for s in train} == {"train"} and {s.text for s in heldout} == {expected} and not skipped


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty, so its download went wrong"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
        (b"[1, 2]" * 9, "it is damaged, or is something else"),
        (b"PAR1" + b"\0" * 40, "it is damaged, or is something else"),
    ],
)
def test_files_that_are_something_else_are_named(content, words, tmp_path):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ParamError, match=f"data.path: .*a.parquet' is no Parquet file: {words}"):
        both(tmp_path / "a.parquet", "parquet")
    with pytest.raises(ParamError, match="names no .parquet file here"):
        both(tmp_path / "none", "parquet")


def test_damage_in_a_row_group_loses_its_rows_alone(tmp_path):
    path = write(tmp_path / "a.parquet", captioned(30), row_group_size=10, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + column.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)
    train, heldout, skipped = both(path, "parquet")
    assert sorted(skipped) == [f"a.parquet:{i}" for i in range(10, 20)]
    assert all("cannot be read" in reason for reason in skipped.values())
    assert len(train + heldout) == 20


def test_a_file_that_changes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "kept_groups", parquet_file.GroupCache(0))
    path = write(tmp_path / "a.parquet", captioned(30), row_group_size=10)
    train = opened(path)["train"]
    write(path, captioned(40), row_group_size=10)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        train.load(train.length - 1)  # of another row group than was read last


def test_a_worker_gets_the_same_rows(tmp_path):
    source = opened(write(tmp_path / "a.parquet", captioned(30), row_group_size=4))["train"]
    copy = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 10_000
    assert [s.text for s in copy] == [s.text for s in source]


def test_an_epoch_reads_each_row_group_once_and_each_row_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", captioned(400), row_group_size=20)
    size = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    monkeypatch.setattr("mmfsdp.kit.data.sources.records.CACHE_BYTES", 10 * size)
    cache = parquet_file.GroupCache(10 * size)
    monkeypatch.setattr(parquet_file, "kept_groups", cache)
    source = opened(path)["train"]
    cache.misses = 0
    stream = source.batches(DataSlice(batch_size=1))
    epochs = [[next(stream)[0].text for _ in range(source.length)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(s.text for s in source) and epochs[0] != epochs[1]
    assert cache.misses <= 60, "20 in each epoch, and the pass after them"
    groups = [int(text.split()[1]) // 20 for text in epochs[0]]
    assert len(set(groups[:40])) > 2, "rows of several row groups are mixed"
    in_ranks = [source.batches(DataSlice(batch_size=1, rank=rank, world_size=2, start=3)) for rank in range(2)]
    assert [next(in_ranks[i % 2])[0].text for i in range(20)] == epochs[0][6:26], "whatever the number of ranks"


def test_where_all_blocks_fit_the_order_is_that_of_other_sources():
    order = epoch_order(1000, 3, 1, False)
    block_of = np.arange(1000) // 50
    few = Blocks(block_of, np.full(20, 100), at_a_time=2001)
    assert np.array_equal(few.rearranged(order, 3, 1), order)
    many = Blocks(block_of, np.full(20, 100), at_a_time=400).rearranged(order, 3, 1)
    assert sorted(many) == list(range(1000)) and not np.array_equal(many, order)
    assert all(len(set(block_of[many[i : i + 200]])) == 4 for i in range(0, 1000, 200))


def test_large_row_groups_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "CACHE_BYTES", 100)
    notes = " ".join(opened(write(tmp_path / "a.parquet", captioned(30)))["train"].notes)
    assert "a row group of a.parquet has" in notes and "row_group_size=100" in notes


@pytest.mark.parametrize("source", ["parquet", "hub"])
def test_without_the_extra_one_error_says_what_to_install(source, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", captioned(3))
    find = importlib.util.find_spec

    def find_spec(name, *args):
        return None if name in ("pyarrow", "datasets") else find(name, *args)

    monkeypatch.setattr(f"mmfsdp.kit.data.sources.{source}.find_spec", find_spec)
    with pytest.raises(ParamError, match=rf'data.source: .*not installed; run: pip install "mmfsdp\[{source}\]"'):
        both(tmp_path / "a.parquet", source)
