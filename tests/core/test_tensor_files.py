"""Parts of tensors from safetensors files: the right ones, each file opened once, changed files refused."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.core.checksums import tensor_checksum
from mmfsdp.core.tensor_files import (
    CHUNK_BYTES,
    OPEN_FILES,
    SAMPLE_BYTES,
    SAMPLES,
    InFile,
    TensorFiles,
    fingerprint,
    identity,
    samples,
)
from tests.counted_files import CountedFiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def stored(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> str:
    save_file(tensors, path, metadata=metadata or None)
    return str(path)


def place_of(path: str, key: str, dtype: torch.dtype) -> InFile:
    return InFile(path, key, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_a_tensor_are_read_as_safetensors_reads_them(tmp_path, dtype):
    tensors = {"b": (torch.randn(7, 5) * 9).to(dtype), "a": torch.tensor(3).to(dtype), "c": torch.empty(0, 4).to(dtype)}
    path, files = stored(tmp_path / "some.safetensors", tensors), TensorFiles()
    whole = load_file(path)
    for key, tensor in tensors.items():
        assert torch.equal(files.read(place_of(path, key, dtype)), whole[key]) and whole[key].equal(tensor)
    part = torch.empty(2, 3, dtype=dtype)
    checksum = files.read_into(part, place_of(path, "b", dtype), 11, checksum=True)
    assert torch.equal(part.view(-1), whole["b"].view(-1)[11:17]) and checksum == tensor_checksum(part)
    # The plain model has it in bf16, and its wrapper in fp32: the values and the checksum are those of bf16.
    part = torch.empty(6, dtype=torch.float32)
    checksum = files.read_into(part, place_of(path, "b", torch.bfloat16), 11, checksum=True)
    cast = whole["b"].view(-1)[11:17].to(torch.bfloat16)
    assert torch.equal(part, cast.float()) and checksum == tensor_checksum(cast)


def test_a_tensor_larger_than_a_call_to_the_system_is_read_in_pieces(tmp_path):
    tensor = torch.arange(2 * CHUNK_BYTES // 4 + 3, dtype=torch.int32)
    path = stored(tmp_path / "large.safetensors", {"a": tensor})
    for dtype in (torch.int32, torch.int64):
        received = torch.empty(len(tensor) - 1, dtype=dtype)
        checksum = TensorFiles().read_into(received, place_of(path, "a", torch.int32), 1, checksum=True)
        assert torch.equal(received, tensor[1:].to(dtype)) and checksum == tensor_checksum(tensor[1:])


def test_each_file_is_opened_once_and_few_are_open_at_a_time(tmp_path):
    paths = [stored(tmp_path / str(n), {"a": torch.ones(2), "b": torch.zeros(3)}) for n in range(2 * OPEN_FILES)]
    with CountedFiles().counting() as counts:
        files = TensorFiles()
        for path in paths:
            for key in "ab":
                files.read(place_of(path, key, torch.float32))
        assert set(counts.opened.values()) == {1} and len(counts.opened) == len(paths)
        assert counts.most_open == OPEN_FILES
        files.read(place_of(paths[-1], "a", torch.float32))
        assert counts.opened[paths[-1]] == 1, "the last ones are open still"
        headers = sum(os.path.getsize(path) - 20 for path in paths)
        assert counts.bytes == headers + 20 * len(paths) + 8, "each header is read once"
        del files
        assert not counts.open_now


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = stored(tmp_path / "some.safetensors", {"a": torch.ones(2), "b": torch.zeros(3)})
    place, files = place_of(path, "b", torch.float32), TensorFiles()
    files.read(place)
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(OSError, match="some.safetensors' ends too early"):
        files.read(place)
    files.close()
    with pytest.raises(OSError, match="some.safetensors has changed since"):
        files.read(place)
    (tmp_path / "some.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        files.read(place)


def test_the_identity_of_a_file_is_the_same_by_each_name_and_no_copy_has_it(tmp_path):
    path, link = tmp_path / "some.safetensors", tmp_path / "link"
    stored(path, {"a": torch.ones(2)})
    link.symlink_to(path)
    before = identity(str(path))
    assert identity(str(link)) == before
    copy = shutil.copy2(path, tmp_path / "copy")
    assert identity(str(copy)) != before and identity(str(copy))[1:3] == before[1:3]


def test_a_fingerprint_is_of_the_tensors_and_not_of_the_file(tmp_path):
    tensors = {"b": torch.randn(7, 5), "a": torch.ones(())}
    one = fingerprint(stored(tmp_path / "one", tensors))
    assert fingerprint(stored(tmp_path / "other", dict(reversed(tensors.items())), format="pt")) == one
    for changed in (
        {"b": tensors["b"], "c": tensors["a"]},
        {"b": tensors["b"].view(5, 7), "a": tensors["a"]},
        {"b": tensors["b"].view(torch.int32), "a": tensors["a"]},
    ):
        assert fingerprint(stored(tmp_path / "changed", changed)) != one


def test_a_fingerprint_covers_small_tensors_and_the_whole_length_of_large_ones(tmp_path):
    """Two trainings may agree in the first rows of a tensor, such as those of words that no text has."""
    small, large = torch.zeros(SAMPLES * SAMPLE_BYTES // 4), torch.zeros(100, 1000)
    one = fingerprint(stored(tmp_path / "one", {"small": small, "large": large}))
    for element in (0, 1, len(small) // 2, len(small) - 1):
        trained = small.clone()
        trained[element] = 1
        assert fingerprint(stored(tmp_path / "other", {"small": trained, "large": large})) != one
    for first in (0, 30, 50, 90, 99):  # what is trained: a tenth of the rows, at least
        trained = large.clone()
        trained[first : first + 10] = 1
        assert fingerprint(stored(tmp_path / "other", {"small": small, "large": trained})) != one


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 10_000_001])
def test_samples_go_from_the_first_byte_to_the_last(nbytes):
    places = list(samples(nbytes))
    assert places[0][0] == 0 and sum(places[-1]) == nbytes
    assert sum(size for _, size in places) == min(nbytes, SAMPLES * SAMPLE_BYTES)
    assert all(start + size <= following for (start, size), (following, _) in zip(places, places[1:], strict=False))
    gaps = [following - start for (start, _), (following, _) in zip(places, places[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
