"""Read weights on every rank, where all ranks see rank 0's files: each rank reads the rows that it keeps.

If rank 0 reads alone, all others wait for what one process can read, and receive whole tensors of which they keep a
part. Here each row is read by one rank. If several ranks keep the same rows (all rows under DDP, FSDP1 and REPLICATE;
those of a shard in a hybrid mesh), each reads a part of them, and an all-gather hands it to the others, of many tensors
at once. So 512 ranks read the bytes of one model from the file system, in parallel, and never hold different weights.

Torch's `HuggingFaceStorageReader` also reads shards on each rank. It is not used here: it knows tensors only by the
names of the model, fills a model that is sharded already, and lets each rank read all of a replicated tensor.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..params import ParamError
from .checksums import checksum_share
from .collectives import Progress, answering_ranks, from_rank_0, gather_json, group_device, rank
from .tensor_files import InFile, TensorFiles, check_file, file_errors, fingerprint, identity

BATCH_BYTES = 64 * 2**20
"""Bytes that one all-gather hands out, and so many are held beside the tensors; no more than the largest of them."""
ALIGNMENT = 16
"""Bytes of which a multiple lies before each tensor in a batch: the size of an element divides it."""


def share_files(places: Mapping[str, InFile]) -> SharedFiles:
    """Return what all ranks can read: rank 0's tensors in files, or nothing. Every rank must call it.

    Every rank looks at the files for itself, and a collective tells all of them what each has found. If some rank
    sees none of the files, as on a node without them, rank 0 has to read for all, and warns.

    Args:
        places: The place of each tensor that rank 0 has in a file, by name; other ranks' are not looked at.

    Raises:
        ParamError: On every rank, if a rank has some of the files but not all, or a damaged or a different one.
    """
    if answering_ranks() == 1:
        return SharedFiles({})
    paths = sorted({place.path for place in places.values()}) if rank() == 0 else []
    here, problem = look_at(paths, {})
    files = TensorFiles(here)
    if rank() == 0 and not problem:
        # In the order in which the tensors lie in their files, which all ranks then read them in.
        begins = {name: (place.path, files.header(place.path)[place.key].begin) for name, place in places.items()}
        places = {name: places[name] for name in sorted(places, key=begins.__getitem__)}
    known: dict[str, Any] = from_rank_0({"files": here, "places": places})
    if not known["places"]:
        return SharedFiles({})
    paths = sorted({path for path, _, _ in known["places"].values()})
    if rank() != 0:
        here, problem = look_at(paths, known["files"])
        files = TensorFiles(here)
    missing = [path for path in paths if path not in here]
    if not problem and missing and (here or rank() == 0):
        problem = f"{missing[0]} is missing"
    copies = [path for path in here if here[path] != known["files"].get(path)]
    findings = gather_json([socket.gethostname(), not here, problem, copies])
    stop_at_problem([(host, problem) for host, _, problem, _ in findings])
    all_copies: set[str] = set()
    for *_, of_rank in findings:
        all_copies.update(of_rank)
    compare_copies(sorted(all_copies), copies)
    without = [f"rank {number} ({host})" for number, (host, lacks, *_) in enumerate(findings) if lacks]
    if without and rank() == 0:
        words = f"{len(without)} of {len(findings)} ranks, such as {without[0]}, do not see {paths[0]}"
        warnings.warn(f"rank 0 reads all weights and sends them, which takes longer: {words}", stacklevel=3)
    if without:
        return SharedFiles({})
    return SharedFiles({name: InFile(*place) for name, place in known["places"].items()}, files)


def look_at(paths: Sequence[str], checked: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], str]:
    """Return the identity of each file that this rank sees, by path, and what is wrong with one of them, if any.

    checked: the identities of files that another rank has found to be complete.
    """
    identities = {}
    for path in paths:
        try:
            if os.path.exists(path):
                identities[path] = identity(path)
                if identities[path] != checked.get(path):
                    check_file(path)
        except file_errors() as error:
            return identities, f"{path} is not complete or not readable ({error})"
    return identities, ""


def compare_copies(paths: Sequence[str], copies: Sequence[str]) -> None:
    """Raise ParamError on every rank if a copy that a rank sees is another file than rank 0's. Every rank must call it.

    Args:
        paths: The files of which some rank does not see the one that rank 0 sees; the same for every rank.
        copies: Those that this rank does not see as rank 0 does.
    """
    if not paths:
        return
    fingerprints, problem = {}, ""
    try:
        for path in paths if rank() == 0 else copies:
            fingerprints[path] = fingerprint(path)
    except file_errors() as error:
        problem = f"{path} is not readable ({error})"
    wanted = from_rank_0(fingerprints)
    different = [path for path, value in fingerprints.items() if value != wanted.get(path)]
    if different and not problem:
        problem = f"{different[0]} is another file than rank 0's"
    stop_at_problem(gather_json([socket.gethostname(), problem]))


def stop_at_problem(findings: Sequence[Sequence[str]]) -> None:
    """Raise ParamError if a rank has found a problem. findings: host and problem of each rank."""
    for number, (host, problem) in enumerate(findings):
        if problem:
            words = f"on rank {number} ({host}) {problem}; give each node a whole copy of the same files, or none"
            raise ParamError("weights", words)


class Wanted(NamedTuple):
    """A tensor that every rank fills, or the rows of it that this rank will keep."""

    name: str
    received: torch.Tensor
    """The tensor, contiguous, on the device of the process group; of any dtype."""
    mesh: DeviceMesh | None
    """The mesh over which the tensor is sharded next, by its last axis: rows of other shards stay undefined. None for a
    tensor that every rank keeps whole."""
    checksum: bool
    """True if its CRC-32 is wanted."""


class Kept(NamedTuple):
    """The elements of a tensor that this rank keeps: some of its rows."""

    name: str
    elements: torch.Tensor
    """Those, in one dimension."""
    first: int
    """The number of elements before them."""
    after: int
    """The number of elements behind them."""


class Piece(NamedTuple):
    """Some elements of a batch, which are one after another in one tensor."""

    kept: Kept
    start: int
    """The first of them, of those that are kept."""
    elements: torch.Tensor
    begin: int
    """Their first byte in the batch."""


class SharedFiles:
    """The tensors that all ranks see in files. Every rank calls its methods, in the same order."""

    def __init__(self, places: Mapping[str, InFile], files: TensorFiles | None = None) -> None:
        """Take the places in the order of the files, and the files as this rank has found them."""
        self.places = places
        self._order = {name: number for number, name in enumerate(places)}
        self._files = files or TensorFiles()
        self._shares: dict[str, int] = {}
        """This rank's share of each CRC-32 that is wanted. The names are the same for every rank."""
        self._problem = ""

    def has(self, name: str) -> bool:
        """Return True if the ranks read this tensor themselves."""
        return name in self.places

    def fill(self, tensors: Sequence[Wanted], progress: Progress) -> None:
        """Fill tensors that are in files, or the rows of them that this rank will keep.

        progress: called with the name of each before it is read.
        """
        alone: list[Kept] = []
        with_others: dict[Any, list[Kept]] = {}
        for tensor in sorted(tensors, key=lambda each: self._order[each.name]):
            if tensor.checksum:
                self._shares[tensor.name] = 0
            kept = kept_elements(tensor)
            if tensor.mesh is None:
                with_others.setdefault(None, []).append(kept)
            elif tensor.mesh.ndim > 1 and tensor.mesh.size(0) > 1:
                with_others.setdefault(tensor.mesh.get_group(0), []).append(kept)
            else:
                alone.append(kept)
        for kept in alone:
            progress(kept.name)
            self._read(kept, 0, kept.elements)
        for group, all_kept in with_others.items():
            for batch in batches(all_kept):
                for piece in batch:
                    progress(piece.kept.name)
                self._read_batch(batch, group)

    def _read_batch(self, batch: Sequence[Piece], group: Any) -> None:
        """Fill pieces that all ranks of a group keep: each reads a part of the batch, and hands it to the others."""
        ranks, index = dist.get_world_size(group), dist.get_rank(group)
        last = batch[-1]
        size = aligned(ceil((last.begin + last.elements.nbytes) / ranks))
        begin, end = size * index, size * (index + 1)
        part = torch.empty(size, dtype=torch.uint8, device=last.elements.device)
        for piece in batch:
            itemsize = piece.elements.itemsize
            first, stop = max(piece.begin, begin), min(piece.begin + piece.elements.nbytes, end)
            if first < stop:
                received = part[first - begin : stop - begin].view(piece.elements.dtype)
                self._read(piece.kept, piece.start + (first - piece.begin) // itemsize, received)
        whole = part.new_empty(size * ranks)
        dist.all_gather(list(whole.split(size)), part, group=group)
        for piece in batch:
            of_piece = whole[piece.begin : piece.begin + piece.elements.nbytes]
            piece.elements.copy_(of_piece.view(piece.elements.dtype))

    def _read(self, kept: Kept, start: int, received: torch.Tensor) -> None:
        """Read elements of a tensor. Keep a failure for `finish`: else the other ranks would wait in a collective.

        start: the first of them, of those that are kept.
        """
        if not received.numel():
            return
        place, checksum = self.places[kept.name], kept.name in self._shares
        try:
            value = self._files.read_into(received, place, kept.first + start, checksum=checksum)
        except file_errors() as error:
            self._problem = self._problem or f"{place.path} could not be read ({error})"
            return
        if checksum:
            after = kept.after + kept.elements.numel() - start - received.numel()
            itemsize = getattr(torch, place.dtype).itemsize
            self._shares[kept.name] ^= checksum_share(value, after * itemsize)

    def finish(self) -> dict[str, int]:
        """Return each CRC-32 that was wanted of the tensors. Raises ParamError on every rank if one could not read."""
        if not self.places:
            return {}
        self._files.close()
        figures = [int(bool(self._problem)), *self._shares.values()]
        here = torch.tensor(figures, dtype=torch.int64, device=group_device())
        of_ranks = here.new_empty(dist.get_world_size(), len(here))
        dist.all_gather(list(of_ranks), here)
        if of_ranks[:, 0].any():
            for number, (host, problem) in enumerate(gather_json([socket.gethostname(), self._problem])):
                if problem:
                    raise ParamError("weights", f"on rank {number} ({host}) {problem}; start again")
        for shares in of_ranks[1:]:
            of_ranks[0] ^= shares
        return dict(zip(self._shares, of_ranks[0, 1:].tolist(), strict=True))


def kept_elements(tensor: Wanted) -> Kept:
    """Return the elements of a tensor that this rank keeps."""
    flat, row = tensor.received.view(-1), 1
    rows = slice(0, flat.numel())
    if tensor.mesh is not None and tensor.received.dim():
        row = tensor.received[:1].numel()
        rows = rows_of(len(tensor.received), tensor.mesh.size(-1), tensor.mesh.get_local_rank(tensor.mesh.ndim - 1))
    first, stop = rows.start * row, rows.stop * row
    return Kept(tensor.name, flat[first:stop], first, flat.numel() - stop)


def batches(all_kept: Sequence[Kept]) -> Iterator[list[Piece]]:
    """Yield pieces of tensors, as many as fit into one batch. A tensor that is left over is cut."""
    size = max(ALIGNMENT, min(BATCH_BYTES, max(kept.elements.nbytes for kept in all_kept)))
    batch: list[Piece] = []
    begin = 0
    for kept in all_kept:
        start, count = 0, kept.elements.numel()
        while start < count:
            fitting = min((size - begin) // kept.elements.itemsize, count - start)
            if fitting <= 0:
                yield batch
                batch, begin = [], 0
                continue
            elements = kept.elements[start : start + fitting]
            batch.append(Piece(kept, start, elements, begin))
            start += fitting
            begin += aligned(elements.nbytes)
    if batch:
        yield batch


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def rows_of(rows: int, ranks: int, index: int) -> slice:
    """Return the rows of one of several ranks, as torch.chunk and FSDP2 share them out."""
    size = ceil(rows / ranks)
    start = min(size * index, rows)
    return slice(start, min(start + size, rows))
