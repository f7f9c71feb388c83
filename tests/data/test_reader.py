"""A person's own reader, `data.reader`: what its rows become, how they are dealt and held out, and its mistakes."""

import pickle
import textwrap

import pytest
import torch

from mmfsdp.kit.data import CorruptRecord, open_sources
from mmfsdp.kit.data.sources.stream import DataSlice, GivenRow
from mmfsdp.own.calls import OwnCodeError
from mmfsdp.params import DataParams, ParamError
from tests.tracebacks import shows_package

MODULE = """
import io
import random
import numpy as np
import torch
from pathlib import Path
from PIL import Image
from mmfsdp.kit.data import Sample

class Rows:
    def __init__(self, size=60, shape="pil"):
        self.size, self.shape, self.file = size, shape, open(__file__)  # which no process can send to another

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        picture = Image.new("RGB", (8, 8), (index, 0, 0))
        if self.shape == "sample":
            return Sample.of("<image>", f"text {index}", (picture,))
        if self.shape == "bytes":
            file = io.BytesIO()
            picture.save(file, "PNG")
            picture = file.getvalue()
        if self.shape == "path":
            picture.save(f"{index}.png")
            picture = Path(f"{index}.png")
        row = {"image": picture, "text": f"text {index}", "index": index}
        if self.shape == "bad":
            row = {1: {}, 2: (1, 2), 3: row | {"image": b"no picture"}, 4: {"image": picture}}.get(index, row)
            return row[{1: "missing"}.get(index)] if index == 1 else row
        return row

def rows(size=60):
    for index in range(size):
        yield Rows(size)[index]

class Stream:
    def __iter__(self):
        return rows(60)

def splits(train="train", heldout="heldout"):
    return {train: Rows(6), heldout: Rows(3)}

def breaks():
    yield from rows(10)
    raise ValueError("the tenth")

def nothing():
    return []

class Augmented(Rows):
    def __getitem__(self, index):
        drawn = random.randrange(1000), np.random.randint(1000), int(torch.randint(1000, ()))
        return super().__getitem__(index) | {"text": f"{index}: {drawn}"}

def number():
    return 3

def every_row_bad():
    class Bad:
        def __len__(self):
            return 5
        def __getitem__(self, index):
            raise RuntimeError("no disk")
    return Bad()

def numbers():
    return [1, 2, 3]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rows.py").write_text(textwrap.dedent(MODULE))


def open_both(reader, **changes):
    """Both splits, as another process gets them."""
    splits = open_sources(DataParams(reader=reader, **changes), image_size=8)["data"]
    return pickle.loads(pickle.dumps(splits))


def texts(source, steps=3, *, ranks=1, start=0, worker=0, workers=1):
    """Return what each rank gets, all batches of a step together."""
    whole = [[] for _ in range(steps)]
    for rank in range(ranks):
        data_slice = DataSlice(4 // ranks, rank, ranks, start, worker, workers)
        for step, batch in zip(range(steps), source.batches(data_slice), strict=False):
            whole[step] += [item.text for item in batch]
    return whole


@pytest.mark.parametrize("shape", ["pil", "bytes", "path", "sample"])
def test_a_picture_comes_in_any_form(shape):
    sample = next(iter(open_both({"call": "my_rows:Rows", "shape": shape})["train"]))
    assert sample.text == "text 0"
    assert (sample.images[0].mode, sample.images[0].size, sample.images[0].getpixel((0, 0))) == (
        "RGB",
        (8, 8),
        (0, 0, 0),
    )
    assert sample.label == "row 0"


def test_rows_are_dealt_as_those_of_files_are():
    source = open_both("my_rows:Rows")["train"]
    whole = texts(source, 30)
    assert texts(source, 30, ranks=2) == whole, "the stream depends on the number of ranks"
    assert texts(source, 5, start=7) == whole[7:12], "a resumed stream is another one"
    assert texts(source, 15, worker=1, workers=2) == whole[1::2]
    first_epoch = sum(whole, [])[: source.length]
    assert len(set(first_epoch)) == source.length
    assert first_epoch != sorted(first_epoch, key=lambda text: int(text.split()[1])), "nothing is shuffled"


def test_random_numbers_of_a_reader_depend_on_the_place_in_the_stream_alone():
    splits = open_both("my_rows:Augmented")
    source = splits["train"]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    whole = texts(source, 30)
    assert torch.equal(torch.rand(2), expected), "the training's own random numbers are left alone"
    torch.manual_seed(4)
    assert texts(source, 30, ranks=2) == whole
    assert texts(source, 5, start=7) == whole[7:12], "a resumed stream has others"
    assert texts(source, 15, worker=1, workers=2) == whole[1::2]
    drawn = sum(whole, [])
    assert len(set(drawn)) == len(drawn) > source.length, "each epoch draws anew"
    heldout = splits["heldout"]
    assert [item.text for item in heldout] == [item.text for item in heldout]


def test_a_share_of_the_rows_is_held_out_always_the_same():
    splits = open_both("my_rows:Rows", heldout_fraction=0.2)
    train = {sample.text for sample in splits["train"]}
    heldout = {sample.text for sample in splits["heldout"]}
    assert len(train) + len(heldout) == 60
    assert 4 <= len(heldout) <= 20
    assert not train & heldout
    again = open_both({"call": "my_rows:Rows", "size": 50}, heldout_fraction=0.2)
    assert {sample.text for sample in again["heldout"]} <= heldout, "more rows move others"


@pytest.mark.parametrize("heldout", ["heldout", "validation", "test"])
def test_a_dict_of_splits_is_taken_as_it_is(heldout):
    splits = open_both({"call": "my_rows:splits", "heldout": heldout})
    assert (splits["train"].length, splits["heldout"].length) == (6, 3)


def test_bad_rows_are_named_and_replaced():
    splits = open_both({"call": "my_rows:Rows", "shape": "bad"})
    corrupt = {item.label: item.reason for item in splits["train"].loaded() if isinstance(item, CorruptRecord)}
    assert list(corrupt) == ["row 1", "row 2", "row 3", "row 4"]
    assert corrupt["row 1"].startswith("raised KeyError: 'missing' (my_rows.py, line ")
    assert corrupt["row 2"] == "is a tuple; a row is a dict, or a Sample"
    assert corrupt["row 3"].startswith("is not a usable picture")
    assert "caption" in corrupt["row 4"] or "text" in corrupt["row 4"]
    assert splits["train"].skipped.keys() <= corrupt.keys()


def test_keys_that_nobody_reads_are_told_once():
    assert open_both("my_rows:Rows")["train"].notes == ["rows have the keys index, which are not read"]


@pytest.mark.parametrize("reader", ["my_rows:rows", "my_rows:Stream"])
def test_an_iterable_is_taken_in_its_order_with_a_warning(reader):
    splits = open_both(reader)
    (note, _) = splits["train"].notes
    assert "not shuffled" in note
    assert "reads them from the start again" in note
    train = [sample.text for sample in splits["train"]]
    heldout = [sample.text for sample in splits["heldout"]]
    assert heldout
    assert sorted(train + heldout) == sorted(f"text {index}" for index in range(60))
    whole = texts(splits["train"], 30)
    assert sum(whole, [])[: len(train)] == train
    assert sum(whole, [])[len(train) : len(train) + 8] == train[:8], "the second pass is another one"
    assert texts(splits["train"], 30, ranks=2) == whole
    assert texts(splits["train"], 5, start=7) == whole[7:12]


def test_rows_for_a_model_of_ones_own_are_as_they_were_given():
    splits = open_sources(DataParams(reader="my_rows:numbers"), image_size=8, as_given=True)["data"]
    rows = [*splits["train"], *splits["heldout"]]
    assert all(isinstance(row, GivenRow) for row in rows)
    assert sorted(row.row for row in rows) == [1, 2, 3]
    assert {row.label for row in rows} == {"row 0", "row 1", "row 2"}


@pytest.mark.parametrize(
    ("reader", "message", "lines"),
    [
        ("my_rows:nothing", "'my_rows:nothing' gives no rows: their length is 0", ""),
        ("my_rows:number", "gives a int; it must give an object with __len__ and __getitem__", ""),
        ("my_rows:numbers", "holds 0 usable records (3 skipped; row 0 (and 2 more) is a int; a row is a dict", ""),
        ("my_rows:every_row_bad", "row 0 (and 4 more) raised RuntimeError: no disk (my_rows.py, line", "no disk"),
        ("my_rows:breaks", "gives an iterable that, after 10 rows, raised ValueError: the tenth", "the tenth"),
        (
            {"call": "my_rows:splits", "heldout": "others"},
            "gives a dict of 'train', 'others'; a dict holds the splits",
            "",
        ),
        ({"call": "my_rows:Rows", "sise": 3}, "called wrongly: got an unexpected keyword argument 'sise'", ""),
    ],
)
def test_a_reader_without_rows_is_one_error_with_its_own_lines(reader, message, lines):
    with pytest.raises(OwnCodeError) as error:
        list(open_sources(DataParams(reader=reader, heldout_fraction=1e-9), image_size=8)["data"]["train"])
    assert message in str(error.value)
    assert lines in error.value.traceback
    assert not shows_package(error.value.traceback)


def test_the_reader_of_another_source_is_named_in_its_place():
    data = DataParams().change(more=[{"reader": "my_rows:nothing"}])
    with pytest.raises(ParamError, match=r"^data\.more\.0\.reader: 'my_rows:nothing' gives no rows"):
        open_sources(data, image_size=8)
