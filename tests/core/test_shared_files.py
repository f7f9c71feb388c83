"""What ranks read together: batches of pieces, each no larger than the largest tensor, and room for what they read."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mmfsdp.core import shared_files, weights
from mmfsdp.core.shared_files import ALIGNMENT, Kept, batches

SIZES = {
    "many small ones": [3, 1, 2, 3, 3, 1],
    "one large": [1, 100, 2],
    "one": [5],
    "empty ones": [0, 4, 0],
    "none": [0],
}


def kept(number: int, size: int, dtype: torch.dtype) -> Kept:
    return Kept(str(number), torch.arange(size).to(dtype), first=7, after=0)


@pytest.mark.parametrize("limit", [4, 24, 10_000])
@pytest.mark.parametrize("case", SIZES)
def test_batches_have_each_element_once_in_order_and_are_no_larger_than_they_may_be(case, limit):
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    tensors = [kept(number, size, dtypes[number % 3]) for number, size in enumerate(SIZES[case])]
    with mock.patch.object(shared_files, "BATCH_BYTES", limit):
        pieces = list(batches(tensors))
    allowed = max(ALIGNMENT, min(limit, max(each.elements.nbytes for each in tensors)))
    read: dict[str, list[torch.Tensor]] = {}
    for batch in pieces:
        end = 0
        for piece in batch:
            assert piece.begin == shared_files.aligned(end) and piece.elements.numel()
            end = piece.begin + piece.elements.nbytes
            assert piece.start == sum(map(len, read.get(piece.kept.name, [])))
            read.setdefault(piece.kept.name, []).append(piece.elements)
        assert end <= allowed
    for each in tensors:
        parts = read.get(each.name, [each.elements[:0]])
        assert torch.equal(torch.cat(parts), each.elements)


def test_many_small_tensors_go_in_one_batch_beside_a_large_one():
    tensors = [kept(number, size, torch.float32) for number, size in enumerate([1000, *[4] * 200])]
    assert len(list(batches(tensors))) == 2


def test_a_tensor_that_is_filled_in_part_has_a_mapping_of_its_own_and_any_shape_and_dtype():
    mesh, cpu = SimpleNamespace(), torch.device("cpu")
    for shape, dtype in (
        ((1024, 300), torch.bfloat16),
        ((3,), torch.int64),
        ((), torch.float32),
        ((0, 4), torch.uint8),
    ):
        like = torch.empty(shape, dtype=dtype, device="meta")
        for around in (None, mesh):
            room = weights.room_for(like, cpu, around)
            assert (room.shape, room.dtype, room.is_contiguous()) == (like.shape, dtype, True)
            room.fill_(1)
            assert room.sum() == room.numel()
