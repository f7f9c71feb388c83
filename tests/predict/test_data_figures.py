"""What the sizes of a run's records say of its batches: when they are told, and in which words."""

from dataclasses import replace

import pytest

from mmfsdp.predict.data_figures import BatchFigures, DataFigures, RecordFigures
from mmfsdp.predict.memory import Memory

RECORDS = (RecordFigures("rows.json:7", 1200, ((640, 480), (100, 4000))), RecordFigures("rows.json:2", 80, ((30, 20),)))
LARGEST = BatchFigures("data", 2, 1200, 64, RECORDS, step=1500, rank=1)
FIGURES = DataFigures(
    records=1000,
    of=5000,
    covers_run=False,
    largest=LARGEST,
    possible=replace(LARGEST, source="data.more.0", step=0),
    possible_peak=Memory(parameters=2_000_000, module_buffers=0),
    median_tokens=2400,
    padding=0.0,
    waiting=0.0,
)


def codes(**changes) -> list[str]:
    return [finding.code for finding in replace(FIGURES, **changes).findings()]


def test_a_batch_and_a_record_say_what_and_where_they_are():
    assert str(LARGEST) == "step 1,500, rank 1: 2 rows of 1,200 tokens"
    assert str(FIGURES.possible) == "2 rows of 1,200 tokens of data.more.0"
    assert list(map(str, RECORDS)) == [
        "rows.json:7 (1,200 tokens, 2 pictures up to 100 x 4000)",
        "rows.json:2 (80 tokens, 30 x 20)",
    ]
    assert str(RecordFigures("a", 5)) == "a (5 tokens)"


def test_the_table_says_how_many_records_were_looked_at_and_what_the_largest_batches_are():
    text = " ".join(" ".join(FIGURES.lines()).split())
    assert text.startswith("data: 1,000 of 5,000 records by their texts and picture headers; others may be larger")
    assert "largest batch: step 1,500, rank 1: 2 rows of 1,200 tokens; longest: rows.json:7 (1,200 tokens, 2 p" in text
    assert "another order may have: 2 rows of 1,200 tokens of data.more.0, peak 1.9 MiB" in text
    assert "0% of all positions are padding; a rank waits on average 0% of a step" in text
    for of in (None, 1000):
        assert replace(FIGURES, of=of, covers_run=True).lines()[0] == (
            "data: 1,000 records by their texts and picture headers"
        )


@pytest.mark.parametrize("median, told", [(1199, True), (1200, True), (1201, False), (2400, False)])
def test_a_batch_of_twice_the_median_is_told(median, told):
    assert codes(median_tokens=median) == ["outsize-records"] * told
    [*findings] = replace(FIGURES, median_tokens=800, covers_run=True).findings()
    assert findings[0].message.startswith(
        "the largest batch of the run (step 1,500, rank 1: 2 rows of 1,200 tokens) has 3 times the tokens of the median"
    )


@pytest.mark.parametrize("share", ["padding", "waiting"])
def test_much_padding_or_waiting_is_told_with_what_helps_where_records_have_an_index(share):
    assert codes(**{share: 0.25}) == []
    assert codes(**{share: 0.26}) == ["uneven-batches"]
    assert codes(**{share: 0.26}, of=None) == []
    [finding] = replace(FIGURES, **{share: 0.3}).findings()
    assert "30%" in finding.message and "data.by_length" in finding.message and "data.even_ranks" in finding.message


def test_a_look_at_few_records_does_not_speak_for_the_run():
    assert FIGURES.words == "the largest batch of the first 1,000 records"
    assert replace(FIGURES, covers_run=True).words == "the largest batch of the run"


def test_sizes_differ_with_padding_or_a_batch_that_is_larger_than_the_median_one():
    assert not FIGURES.sizes_differ
    assert replace(FIGURES, padding=0.01).sizes_differ and replace(FIGURES, median_tokens=2399).sizes_differ
