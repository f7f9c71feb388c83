"""Read a tar archive member by member, and name every part of it that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .first_bytes import START_BYTES, what_it_is


def _open_strictly(opener: Callable[..., Any], path: Path, mode: str) -> Any:
    """Open a bz2 or xz file. Reading raises for what follows a stream and is none: Python drops it without a word."""
    stream = opener(path, mode)
    stream._buffer.raw._trailing_error = ()
    return stream


OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": partial(_open_strictly, bz2.open),
    b"\xfd7zXZ\x00": partial(_open_strictly, lzma.open),
}
"""Function that opens a file by its first bytes, whatever its name says."""


@dataclass(frozen=True)
class Member:
    """A file of an archive."""

    name: str
    offset: int
    """Offset of its content in the unpacked archive, in bytes."""
    size: int
    content: bytes | None
    """Only of a compressed archive or a sparse file; any other can be read from its offset when it is needed."""


@dataclass(frozen=True)
class Loss:
    """A part of an archive that cannot be read, by its offset and size in the (unpacked) archive, in bytes."""

    offset: int
    size: int | None
    """Number of bytes that are lost; None for all that follows, of unknown size."""
    reason: str

    def __str__(self) -> str:
        size = "all bytes" if self.size is None else f"{self.size} bytes"
        return f"{self.reason}: {size} from byte {self.offset} on are lost"


class _Header(tarfile.TarInfo):
    """A header of an archive, which also hears of the blocks that are none."""

    @classmethod
    def fromtarfile(cls, archive: _Archive) -> _Header:  # type: ignore[override]
        try:
            header = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
            archive.has_end_mark = True
            raise
        except tarfile.TruncatedHeaderError:  # type: ignore[attr-defined]
            archive.has_end_mark = False
            raise
        # SubsequentHeaderError: of a file with a header before its own, for a long name or fractions of a second.
        except (tarfile.InvalidHeaderError, tarfile.SubsequentHeaderError) as error:  # type: ignore[attr-defined]
            archive.skipped_blocks.append(archive.offset)
            raise tarfile.InvalidHeaderError(str(error)) from None  # type: ignore[attr-defined]
        archive.has_end_mark = False
        return header  # type: ignore[return-value]


class _Archive(tarfile.TarFile):
    """An archive that is read over damage: tarfile skips blocks that are no header without a word if told to ignore
    zeros. Zeros stand in the middle where archives were joined by `cat`."""

    tarinfo = _Header

    def __init__(self, stream: BinaryIO) -> None:
        self.skipped_blocks: list[int] = []
        """Offsets of the blocks that should be a header and are none."""
        self.has_end_mark = False
        super().__init__(fileobj=stream, mode="r", ignore_zeros=True)


def read_archive(path: Path) -> Iterator[Member | Loss]:
    """Yield the files of a tar archive in their order, and what is lost between them. Folders are left out.

    Of an archive that is not compressed only the headers are read.
    """
    position = 0
    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        known = "" if start[257:262] == b"ustar" else what_it_is(start)
        if known:
            yield Loss(0, None, f"it {known}")
            return
        opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), None)
        with opener(path, "rb") if opener else path.open("rb") as stream:
            archive = _Archive(stream)
            while (header := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all, which may be many
                yield from _skipped(archive, end=header.offset)
                position = header.offset
                if header.isfile():
                    content = None
                    if opener or header.issparse():
                        content = archive.extractfile(header).read()  # type: ignore[union-attr]
                    yield Member(header.name, header.offset_data, header.size, content)
                elif not header.isdir():
                    yield Loss(header.offset, header.size, f"{header.name!r} is a link or device, not a file")
            yield from _skipped(archive, end=stream.tell())
            if not archive.has_end_mark:
                yield Loss(archive.offset, None, "it has no end mark, so it was cut")
    # A damaged or cut compressed stream raises any of these; so does tarfile at the end of a cut archive.
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        yield Loss(position, None, f"it is damaged ({error})")


def _skipped(archive: _Archive, end: int) -> Iterator[Loss]:
    """Yield the loss of the blocks skipped so far, up to the next header."""
    if archive.skipped_blocks:
        start = archive.skipped_blocks[0]
        archive.skipped_blocks.clear()
        yield Loss(start, end - start, "the header of a file is damaged")
