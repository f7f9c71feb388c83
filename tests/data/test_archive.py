"""Every byte of a tar archive is read as a member, or named as a loss."""

import bz2
import gzip
import io
import lzma
import random
import subprocess
import tarfile

import pytest

from mmfsdp.kit.data.sources.archive import Loss, Member, read_archive

FILES = 40
RECORD = 3 * 512
"""A header and two blocks of content."""


def archive(first: int = 0, count: int = FILES, *, mtime: float = 0) -> bytes:
    """An archive of text files. A time with a fraction gives each file a header and a block before its own."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for i in range(first, first + count):
            header = tarfile.TarInfo(f"{i:03d}.txt")
            header.size, header.mtime = 700, mtime
            tar.addfile(header, io.BytesIO(bytes([65 + i % 26]) * 700))
    return packed.getvalue()


@pytest.fixture
def read(tmp_path):
    """Returns the names of members and the losses of an archive of these bytes."""

    def run(content: bytes) -> tuple[list[str], list[Loss]]:
        path = tmp_path / "a.tar"
        path.write_bytes(content)
        found = list(read_archive(path))
        return [m.name for m in found if isinstance(m, Member)], [m for m in found if isinstance(m, Loss)]

    return run


def test_joined_archives_and_zeros_in_the_middle_are_read_whole(read):
    names = [f"{i:03d}.txt" for i in range(FILES)]
    whole = archive()
    for content in (
        whole,
        archive(0, 20) + archive(20, 20),
        whole[: 10 * RECORD] + bytes(5120) + whole[10 * RECORD :],
        gzip.compress(whole),
    ):
        assert read(content) == (names, [])


@pytest.mark.parametrize("mtime, record", [(0, RECORD), (1.5, RECORD + 1024)])
def test_one_flipped_bit_loses_one_member_at_most_and_says_so(read, mtime, record):
    rng, whole = random.Random(0), archive(mtime=mtime)
    headers = [record * i + rng.randrange(record - 1024) for i in range(40)]
    positions = [rng.randrange(len(whole)) for _ in range(100)] + headers
    lost = 0
    for position in positions:
        content = bytearray(whole)
        content[position] ^= 1 << rng.randrange(8)
        names, losses = read(bytes(content))
        # A loss without a lost file is of a header before its own, or of the end mark, where an archive may follow.
        assert FILES - len(losses) <= len(names) <= FILES and len(losses) <= 1, position
        for loss in losses:
            assert loss.offset <= position < loss.offset + loss.size
        lost += FILES - len(names)
    assert lost >= len(headers) // 3


def test_no_cut_archive_passes_as_whole(read):
    whole = archive()
    for length in [0, 1, 512, 600, RECORD, RECORD + 100, FILES * RECORD - 1, FILES * RECORD]:
        names, losses = read(whole[:length])
        assert len(names) in (length // RECORD, -(-length // RECORD)) and losses[-1].size is None
    packed = gzip.compress(whole)
    for length in range(len(packed)):
        assert read(packed[:length])[1], length
    for second in (whole[:300], b"not an archive"):
        for joined in (whole + second, bz2.compress(whole) + second, lzma.compress(whole) + second):
            names, losses = read(joined)
            assert len(names) == FILES and losses


def test_links_are_named_as_lost(read):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        header = tarfile.TarInfo("b.png")
        header.type, header.linkname = tarfile.SYMTYPE, "a.png"
        tar.addfile(header)
        tar.addfile(tarfile.TarInfo("folder/c.txt"))
    names, (loss,) = read(packed.getvalue())
    assert names == ["folder/c.txt"] and str(loss).startswith("'b.png' is a link or device, not a file")


@pytest.mark.real
def test_a_sparse_file_is_read_with_its_zeros(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        file.seek(100_000)
        file.write(b"end")
    subprocess.run(["tar", "--create", "--sparse", "--file", "a.tar", "a.txt"], cwd=tmp_path, check=True)
    (member,) = read_archive(tmp_path / "a.tar")
    assert member.content == bytes(100_000) + b"end"
