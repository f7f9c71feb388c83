"""A person's own processor, as the loader calls it: bad rows, blank batches, random numbers, prompts."""

import random

import numpy as np
import pytest
import torch

from mmfsdp.core.micro_batch import label_tokens
from mmfsdp.kit.data.corrupt import CorruptRecord
from mmfsdp.kit.data.own_processor import OwnProcessor
from mmfsdp.kit.data.sources.stream import GivenRow
from mmfsdp.own.calls import OwnCodeError


class Numbers:
    """Rows are numbers; negative ones are bad."""

    def __call__(self, rows, max_length=0):
        if any(row < 0 for row in rows):
            raise ValueError("a negative number")
        noise = torch.rand(1) + random.random() + np.random.rand()
        return {"x": {"rows": torch.tensor(rows)}, "noise": noise, "length": max_length, "names": ["a"]}

    def prompts(self, rows):
        return {"input_ids": torch.tensor([[1, row] for row in rows])}

    def decode(self, ids):
        return [" ".join(map(str, row)) for row in ids.tolist()]


def processor() -> OwnProcessor:
    made = OwnProcessor.of(Numbers(), path="numbers:build")
    made.try_rows([GivenRow(7, "row 7")])
    return made


def batch_of(*rows: int, seed: int = 0, made: OwnProcessor | None = None):
    made = made or processor()
    return made.collate([made.encode(GivenRow(row, f"row {row}"), seed=seed) for row in rows])


def test_a_bad_row_is_named_and_the_next_good_one_takes_its_place():
    batch = batch_of(1, -2, 3, -4)
    assert batch.inputs()["x"]["rows"].tolist() == [1, 3, 3, 1]
    reason = "the processor does not take: ValueError: a negative number"
    assert batch.skipped == {"row -2": reason, "row -4": reason}
    assert (batch.size, batch.label_tokens, batch.blank) == (4, 4, False)
    made = processor()
    assert made.filled([1, 2], 5) == [1, 2, 1, 2, 1] and made.filled([], 5) == []


def test_a_batch_without_a_good_row_takes_part_and_is_not_learned():
    class Counting(torch.nn.Module):
        def count_label_tokens(self, batch):
            return len(batch["x"]["rows"])

    for batch in (batch_of(-1, -2), batch_of()):
        assert batch.inputs()["x"]["rows"].tolist() == [7]
        assert batch.blank and batch.label_tokens == label_tokens(Counting(), batch) == 0
    assert label_tokens(Counting(), batch_of(1, 2)) == 2


def test_a_batch_draws_the_same_random_numbers_again_and_leaves_those_of_the_training():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, again, other = batch_of(1, seed=5), batch_of(1, seed=5), batch_of(1, seed=6)
    assert torch.equal(first.inputs()["noise"], again.inputs()["noise"])
    assert not torch.equal(first.inputs()["noise"], other.inputs()["noise"])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_batch_moves_as_a_whole_and_passes_on_what_is_no_tensor():
    moved = batch_of(1, 2).to("cpu")
    assert moved.inputs()["names"] == ["a"] and moved.inputs()["length"] == 64 and moved.size == 2


def test_prompts_come_without_what_generate_repeats():
    made = processor()
    batch = made.prompts([GivenRow(5, "row 5")])
    assert made.decode(batch.new_tokens(torch.tensor([[1, 5, 8, 9]]))) == ["8 9"]
    assert made.decode(batch.new_tokens(torch.tensor([[8, 9, 8, 9]]))) == ["8 9 8 9"], "it returned new tokens only"
    assert made.takes(GivenRow(5, "row 5")) and not made.takes(GivenRow(-5, "row -5"))


def test_a_processor_that_fails_on_the_first_rows_is_an_error_with_its_lines():
    with pytest.raises(
        OwnCodeError, match="on the first row of the data, raised ValueError: a negative number"
    ) as caught:
        processor().try_rows([GivenRow(-1, "row -1"), GivenRow(-2, "row -2")])
    assert "in __call__" in caught.value.traceback


def test_a_corrupt_record_keeps_its_own_reason():
    made = OwnProcessor.of(lambda rows: (_ for _ in ()).throw(CorruptRecord("row", "has no text")), path="a:b")
    assert made.refusal(GivenRow(1, "row 1")) == "has no text"
