"""Read weights on every rank, where all ranks see rank 0's files: each rank reads the rows that it keeps.

If rank 0 reads alone, all others wait for what one process can read, and receive whole tensors of which they keep a
part. Here each row is read by one rank. If several ranks keep the same rows (all rows under DDP, FSDP1 and REPLICATE;
those of a shard in a hybrid mesh), each reads a part of them, and an all-gather hands it to the others. So 512 ranks
read the bytes of one model from the file system, in parallel, and never hold different weights.

Torch's `HuggingFaceStorageReader` also reads shards on each rank. It is not used here: it knows tensors only by the
names of the model, fills a model that is sharded already, and lets each rank read all of a replicated tensor.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..params import ParamError
from .checksums import checksum_share, tensor_checksum
from .collectives import answering_ranks, from_rank_0, gather_json, rank

SAMPLE = 64
"""Elements of each tensor that are compared before files of two ranks count as the same."""


class InFile(NamedTuple):
    """The place of a tensor in a safetensors file."""

    path: str
    key: str
    """The name of the tensor in the file."""
    dtype: str
    """The dtype that the plain model has it in, by its name, such as float32."""


def file_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a file may raise while it is read."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


def read_tensor(place: InFile, rows: slice | None = None) -> torch.Tensor:
    """Return a tensor, or some rows of it, on the CPU. Raises safetensors' or the system's error for a damaged file."""
    from safetensors import safe_open

    with safe_open(place.path, "pt") as file:
        tensor = file.get_tensor(place.key) if rows is None else file.get_slice(place.key)[rows]
        return tensor.to(getattr(torch, place.dtype), copy=True)  # out of the file's mapped memory


def share_files(places: Mapping[str, InFile]) -> SharedFiles:
    """Return what all ranks can read: rank 0's tensors in files, or nothing. Every rank must call it.

    Every rank looks at the files for itself, and one collective tells all of them what each has found. If some rank
    sees none of the files, as on a node without them, rank 0 has to read for all, and warns.

    Args:
        places: The place of each tensor that rank 0 has in a file, by name; other ranks' are not looked at.

    Raises:
        ParamError: On every rank, if a rank has some of the files but not all, or a damaged or a different one.
    """
    if answering_ranks() == 1:
        return SharedFiles({})
    here, problem = look_at(sorted({place.path for place in places.values()})) if rank() == 0 else ({}, "")
    known: dict[str, Any] = from_rank_0({"files": here, "places": places})
    if not known["places"]:
        return SharedFiles({})
    if rank() != 0:
        here, problem = look_at(known["files"])
        for path, content in here.items():
            if not problem and content != known["files"][path]:
                problem = f"{path} is another file than rank 0's"
    missing = [path for path in known["files"] if path not in here]
    if not problem and missing and (here or rank() == 0):
        problem = f"{missing[0]} is missing"
    findings = gather_json([socket.gethostname(), not here, problem])
    for number, (host, _, problem) in enumerate(findings):
        if problem:
            words = f"on rank {number} ({host}) {problem}; give each node a whole copy of the same files, or none"
            raise ParamError("weights", words)
    without = [f"rank {number} ({host})" for number, (host, lacks, _) in enumerate(findings) if lacks]
    if without and rank() == 0:
        path = next(iter(known["files"]))
        words = f"{len(without)} of {len(findings)} ranks, such as {without[0]}, do not see {path}"
        warnings.warn(f"rank 0 reads all weights and sends them, which takes longer: {words}", stacklevel=3)
    return SharedFiles({} if without else {name: InFile(*place) for name, place in known["places"].items()})


def look_at(paths: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return the fingerprint of each file that this rank sees, by path, and what is wrong with one of them, if any."""
    fingerprints = {}
    for path in paths:
        try:
            if Path(path).exists():
                fingerprints[path] = fingerprint(path)
        except file_errors() as error:
            return fingerprints, f"{path} is not complete or not readable ({error})"
    return fingerprints, ""


def fingerprint(path: str) -> str:
    """Return a digest of the tensors of a file: names, dtypes, shapes, and the first elements of each.

    Two trainings of a model differ in these elements, though not in names and sizes. safetensors checks the size.
    """
    from safetensors import safe_open

    digest = sha256()
    with safe_open(path, "pt") as file:
        for key in sorted(file.keys()):
            stored = file.get_slice(key)
            shape = stored.get_shape()
            some = tuple(slice(0, SAMPLE if dim == len(shape) - 1 else 1) for dim in range(len(shape)))
            first = stored[some] if shape else file.get_tensor(key)
            digest.update(f"{key} {stored.get_dtype()} {shape} {tensor_checksum(first)} ".encode())
    return digest.hexdigest()


class SharedFiles:
    """The tensors that all ranks see in files. Every rank calls its methods, in the same order."""

    def __init__(self, places: Mapping[str, InFile]) -> None:
        self.places = places
        self._shares: dict[str, int] = {}
        self._problem = ""

    def has(self, name: str, like: torch.Tensor) -> bool:
        """Return True if the ranks read this tensor themselves. One without dimensions has no rows to share."""
        return name in self.places and like.dim() > 0

    def read_into(self, received: torch.Tensor, name: str, mesh: DeviceMesh | None) -> None:
        """Fill the rows of a tensor that this rank will keep.

        Args:
            received: The tensor, contiguous, on the device of the process group; of any dtype.
            name: Its name.
            mesh: The mesh over which the tensor is sharded next, by its last axis: rows of other shards stay
                undefined. None for a tensor that every rank keeps whole.
        """
        shard = slice(0, len(received))
        group, ranks, index = None, dist.get_world_size(), rank()
        if mesh is not None:
            shard = rows_of(shard, mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
            ranks, index = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim > 1 else (1, 0)
            group = mesh.get_group(0)
        kept = received[shard]
        if 0 < len(kept) < ranks:  # such as one position table: too few rows for all
            if index == 0:
                self._read(kept, name, shard, len(received))
            dist.broadcast(kept, group=group, group_src=0)
            return
        part = rows_of(shard, ranks, index)
        self._read(received[part], name, part, len(received))
        if len(kept) and ranks > 1:
            size = ceil(len(kept) / ranks)  # a collective takes parts of one size, so the last are padded
            padded = received.new_empty(size, *received.shape[1:])
            padded[: part.stop - part.start] = received[part]
            gathered = received.new_empty(ranks * size, *received.shape[1:])
            dist.all_gather(list(gathered.split(size)), padded, group=group)
            kept.copy_(gathered[: len(kept)])

    def _read(self, received: torch.Tensor, name: str, rows: slice, all_rows: int) -> None:
        """Read rows of a tensor. Keep a failure for `finish`: else the other ranks would wait in a collective."""
        if not len(received):
            return
        place = self.places[name]
        try:
            part = read_tensor(place, rows)
        except file_errors() as error:
            self._problem = self._problem or f"{place.path} could not be read ({error})"
            return
        row_bytes = prod(part.shape[1:]) * part.itemsize
        self._shares[name] = checksum_share(part, row_bytes * (all_rows - rows.stop))
        received.copy_(part)

    def finish(self) -> dict[str, int]:
        """Return the CRC-32 of each tensor that the ranks have read. Raises ParamError on every rank if one failed."""
        if not self.places:
            return {}
        checksums: dict[str, int] = {}
        for number, (host, problem, shares) in enumerate(
            gather_json([socket.gethostname(), self._problem, self._shares])
        ):
            if problem:
                raise ParamError("weights", f"on rank {number} ({host}) {problem}; start again")
            for name, share in shares.items():
                checksums[name] = checksums.get(name, 0) ^ share
        return checksums


def rows_of(rows: slice, ranks: int, index: int) -> slice:
    """Return the rows of one of several ranks, as torch.chunk and FSDP2 share them out."""
    size = ceil((rows.stop - rows.start) / ranks)
    start = min(rows.start + size * index, rows.stop)
    return slice(start, min(start + size, rows.stop))
