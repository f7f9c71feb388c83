"""Threads of one process that open and read the same data at the same moment: the widgets of a notebook do."""

import gzip
import json
import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from material import picture_bytes

from mmfsdp.kit.data import open_source
from mmfsdp.kit.data.own_random import own_random
from mmfsdp.kit.data.sources.records import read_records
from mmfsdp.params import DataParams

THREADS = 4
TIMES = 25
ROWS = 400


@pytest.fixture(autouse=True)
def threads_change_often():
    """Threads take turns after each microsecond, so that two of them are in the same function all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Call `work` with the number of each thread, all at the same moment. Raises what the first of them raised."""
    errors: list[BaseException] = []
    together = threading.Barrier(threads)

    def run(number: int) -> None:
        together.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def rows() -> list[dict[str, str]]:
    return [{"image": f"{i}.png", "text": f"dog {i} " + "x" * (i % 97)} for i in range(ROWS)]


def write_jsonl(path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))


def write_json(path) -> None:
    path.write_text(json.dumps(rows(), indent=1))


def write_csv(path) -> None:
    path.write_text("image,text\n" + "".join(f"{row['image']},{row['text']}\n" for row in rows()))


def write_gz(path) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())


def write_utf16(path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-16")


def write_parquet(path) -> None:
    pq.write_table(pa.Table.from_pylist(rows()), path, row_group_size=50)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "gz.jsonl.gz": write_gz,
    "utf16.jsonl": write_utf16,
    "rows.parquet": write_parquet,
}


@pytest.mark.parametrize("file", WRITERS)
def test_threads_that_open_one_source_a_hundred_times_all_read_each_of_its_rows(file, tmp_path):
    WRITERS[file](tmp_path / file)
    params = DataParams(source="parquet" if file.endswith("parquet") else "json", path=str(tmp_path / file))
    expected = [row["text"].strip() for row in rows()]

    def open_often(number: int) -> None:
        for time in range(TIMES):
            records, skipped = read_records(params)
            assert not skipped and len(records) == ROWS
            for i in range((number + time) % 7, ROWS, 41):
                assert records.record(i).row["text"].strip() == expected[i]

    in_threads(open_often)


def test_threads_that_share_one_source_read_its_own_rows(tmp_path):
    for file, write in WRITERS.items():
        write(tmp_path / file)
        params = DataParams(source="parquet" if file.endswith("parquet") else "json", path=str(tmp_path / file))
        records, _ = read_records(params)

        def read_all(number: int, records=records) -> None:
            for i in range(number, ROWS, 3):
                assert records.record(i).row["text"].strip() == rows()[i]["text"].strip()

        in_threads(read_all)


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_threads_that_run_own_code_leave_the_generators_of_the_process_as_they_were():
    before = states()

    def draw_often(number: int) -> None:
        for time in range(TIMES):
            with own_random(number):
                drawn = random.random(), np.random.rand(), torch.rand(()).item()
            if time == 0:
                firsts[number] = drawn
            assert drawn == firsts[number], "the numbers depend on the seed alone"

    firsts: dict[int, tuple] = {}
    in_threads(draw_often)
    assert states() == before
    assert len(set(firsts.values())) == THREADS


def test_threads_read_the_pictures_of_one_shard(shard):
    members = {}
    for i in range(40):
        members |= {f"{i}.png": picture_bytes(size=(8 + i, 8)), f"{i}.txt": f"dog {i}".encode()}
    params = DataParams(source="webdataset", path=str(shard("a.tar", members)), heldout_fraction=0.01)
    source = open_source(params, image_size=8)
    expected = [(sample.text, sample.images[0].width) for sample in source]

    def read_all(number: int) -> None:
        for _ in range(3):
            assert [(sample.text, sample.images[0].width) for sample in source] == expected

    in_threads(read_all)
    assert not source.skipped
