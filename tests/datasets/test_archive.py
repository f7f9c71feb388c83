"""Every byte of a tar archive is read as a member, or named as a loss."""

import gzip
import io
import random
import tarfile

import pytest

from mmfsdp.data.archive import Loss, Member, read_archive

FILES = 40
RECORD = 3 * 512
"""A header and two blocks of content."""


def archive(first: int = 0, count: int = FILES) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for i in range(first, first + count):
            header = tarfile.TarInfo(f"{i:03d}.txt")
            header.size = 700
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


def test_one_flipped_bit_loses_one_member_at_most_and_says_so(read):
    rng, whole = random.Random(0), archive()
    positions = [rng.randrange(len(whole)) for _ in range(100)] + [RECORD * i + rng.randrange(512) for i in range(40)]
    lost = 0
    for position in positions:
        content = bytearray(whole)
        content[position] ^= 1 << rng.randrange(8)
        names, losses = read(bytes(content))
        is_in_end_mark = position >= FILES * RECORD  # where a damaged header of a joined archive may lie
        assert len(names) == FILES if is_in_end_mark else FILES - len(losses), position
        for loss in losses:
            assert loss.offset <= position < loss.offset + loss.size
        lost += FILES - len(names)
    assert lost >= 40


def test_no_cut_archive_passes_as_whole(read):
    whole = archive()
    for length in [0, 1, 512, 600, RECORD, RECORD + 100, FILES * RECORD - 1, FILES * RECORD]:
        names, losses = read(whole[:length])
        assert len(names) in (length // RECORD, -(-length // RECORD)) and losses[-1].size is None
    packed = gzip.compress(whole)
    for length in range(len(packed)):
        assert read(packed[:length])[1], length


def test_links_are_named_as_lost(read):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        header = tarfile.TarInfo("b.png")
        header.type, header.linkname = tarfile.SYMTYPE, "a.png"
        tar.addfile(header)
        tar.addfile(tarfile.TarInfo("folder/c.txt"))
    names, (loss,) = read(packed.getvalue())
    assert names == ["folder/c.txt"] and str(loss).startswith("'b.png' is a link or device, not a file")
