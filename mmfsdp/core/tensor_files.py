"""Read parts of tensors from safetensors files, straight into the memory that they are wanted in.

Each file is opened once and its header parsed once. A mapped file, which safetensors' own reader returns slices of,
counts its pages as memory of this process, and each slice of it is copied once more.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import FileIO
from math import prod
from typing import NamedTuple
from weakref import finalize

import torch

OPEN_FILES = 16
"""Files that are open at a time: units come in about the order of the files, so few are in use together."""
CHUNK_BYTES = 4 * 2**20
"""Bytes of one call to the system. As many are held for a moment where values are cast or sent to a GPU."""
SAMPLES = 16
SAMPLE_BYTES = 256
"""So many places of a tensor, spread evenly from its first byte to its last, tell two trainings apart."""


class InFile(NamedTuple):
    """The place of a tensor in a safetensors file."""

    path: str
    key: str
    """The name of the tensor in the file."""
    dtype: str
    """The dtype that the plain model has it in, by its name, such as float32."""


class Stored(NamedTuple):
    """The place, dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """The place of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


def file_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a file may raise while it is read."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


def check_file(path: str) -> None:
    """Raise safetensors' or the system's error if a file is not complete."""
    from safetensors import safe_open

    with safe_open(path, "pt"):  # which compares the size of the file with its header
        pass


def identity(file: FileIO | str) -> list[int]:
    """Return the number, size and times of a file, equal for two processes only if they see one and the same file.

    A file system that ranks share says the same to each. A copy has times of its own: nobody can set the last one.
    """
    known = os.stat(file) if isinstance(file, str) else os.fstat(file.fileno())
    return [known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns]


class TensorFiles:
    """Safetensors files that are read from. At most OPEN_FILES of them are open at a time."""

    def __init__(self, identities: Mapping[str, list[int]] | None = None) -> None:
        """Begin with no file open.

        identities: of files that somebody has looked at. Opening one raises OSError if it is another one by now.
        """
        self._identities = dict(identities or {})
        self._headers: dict[str, dict[str, Stored]] = {}
        self._files: dict[str, FileIO] = {}  # the one that was used last at the end
        finalize(self, _close, self._files)

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        _close(self._files)

    def header(self, path: str) -> dict[str, Stored]:
        """Return what a file holds, by key."""
        if path not in self._headers:
            self._headers[path] = read_header(self._opened(path))
        return self._headers[path]

    def read(self, place: InFile) -> torch.Tensor:
        """Return a whole tensor, on the CPU. Raises the system's error for a damaged file."""
        tensor = torch.empty(self.header(place.path)[place.key].shape, dtype=getattr(torch, place.dtype))
        self.read_into(tensor, place)
        return tensor

    def read_into(self, received: torch.Tensor, place: InFile, first: int = 0, *, checksum: bool = False) -> int:
        """Fill a tensor with elements of one in a file. Raises the system's error for a damaged file.

        Args:
            received: The tensor, contiguous, on any device and of any dtype.
            place: The place of the tensor in the file.
            first: The first element that is wanted, in the order of the file.
            checksum: Whether the CRC-32 is wanted.

        Returns:
            The CRC-32 of these elements in the dtype of the plain model, or 0.
        """
        stored, file = self.header(place.path)[place.key], self._opened(place.path)
        dtype: torch.dtype = getattr(torch, place.dtype)
        assert first + received.numel() <= prod(stored.shape), f"{place} has fewer elements"
        as_stored = received.dtype == dtype == stored.dtype and received.device.type == "cpu"
        file.seek(stored.begin + first * stored.dtype.itemsize)
        value = 0
        for chunk in received.view(-1).split(CHUNK_BYTES // stored.dtype.itemsize):
            part = chunk if as_stored else torch.empty(chunk.shape, dtype=stored.dtype)
            _fill(memory_of(part), file)
            part = part.to(dtype)
            if checksum:
                value = zlib.crc32(memory_of(part), value)
            if not as_stored:
                chunk.copy_(part)
        return value

    def _opened(self, path: str) -> FileIO:
        """Return an open file. Raises OSError if it is no longer the file that it was when it was first seen."""
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = FileIO(path)
            now = identity(file)
            # Without the last time, which a new name or other permissions change as well.
            if self._identities.setdefault(path, now)[:3] != now[:3]:
                file.close()
                raise OSError(f"{path} has changed since it was first looked at")
        self._files[path] = file
        return file


def _close(files: dict[str, FileIO]) -> None:
    for path in list(files):
        files.pop(path).close()


def read_header(file: FileIO) -> dict[str, Stored]:
    """Return what a file holds, by key."""
    # 8 bytes with the size of a JSON text, the text, and the tensors: github.com/huggingface/safetensors#format
    from safetensors.torch import _getdtype  # as torch's own reader of these files has it

    file.seek(0)
    begin = 8 + int.from_bytes(_bytes(file, 8), "little")
    entries = json.loads(_bytes(file, begin - 8))
    header = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            offset = begin + entry["data_offsets"][0]
            header[key] = Stored(_getdtype(entry["dtype"]), tuple(entry["shape"]), offset)
    return header


def fingerprint(path: str) -> str:
    """Return a digest of the tensors of a file: names, dtypes, shapes, and bytes from all over each.

    A small tensor is in it as a whole. Two trainings of a model differ in some of these bytes, though not in names and
    sizes.
    """
    digest = sha256()
    with FileIO(path) as file:
        if hasattr(os, "posix_fadvise"):  # else the system reads a lot more than it is asked for, in case
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for key, stored in sorted(read_header(file).items()):
            digest.update(f"{key} {stored.dtype} {list(stored.shape)} ".encode())
            for start, size in samples(stored.nbytes):
                file.seek(stored.begin + start)
                digest.update(_bytes(file, size))
    return digest.hexdigest()


def samples(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first byte, number of bytes) of each place of a tensor of this size that a fingerprint covers."""
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        yield 0, nbytes
        return
    for index in range(SAMPLES):
        yield index * (nbytes - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES


def _bytes(file: FileIO, size: int) -> bytes:
    """Return the next bytes of a file."""
    content = bytearray(size)
    _fill(memoryview(content), file)
    return bytes(content)


def _fill(memory: memoryview, file: FileIO) -> None:
    """Fill memory with the next bytes of a file."""
    done = 0
    while done < len(memory):
        size = file.readinto(memory[done:])
        if not size:
            raise OSError(f"{file.name!r} ends too early")
        done += size


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU. They go with the tensor."""
    # Not by numpy: it has no bfloat16, and a storage that it has seen cannot be resized, as FSDP1 does.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
