"""Recognize by its first bytes a file that is not what its name says, and say what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

START_BYTES = 512
"""Bytes of a file that `what_it_is` looks at."""

HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
AUDIO_VIDEO = (b"ID3", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"\x00\x00\x01\xba")
"""First bytes of MP3, FLAC, Ogg, Matroska (also WebM) and MPEG."""
AGAIN = "so its download went wrong; download it again"


def what_it_is(start: bytes) -> str:
    """Return what a file is by its first bytes, with what to do ("is a PDF; ..."); "" where they say nothing.

    Only of kinds that people have in place of pictures, shards and JSON by mistake, and that are not read here.
    """
    for matches, words in _KINDS:
        if matches(start):
            return words
    return ""


def what_is_file(path: Path) -> str:
    """Return what a file is by its first bytes, as `what_it_is`. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return what_it_is(file.read(START_BYTES))


def _begins(*prefixes: bytes) -> Callable[[bytes], bool]:
    return lambda start: start.startswith(prefixes)


def _is_markup(*tags: bytes) -> Callable[[bytes], bool]:
    """Return a test for text that begins with a tag, in small or capital letters, after white space."""
    return lambda start: start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(tags)


def _is_heic(start: bytes) -> bool:
    return start[4:8] == b"ftyp" and start[8:12] in HEIC_BRANDS and b"avif" not in start[:64]


def is_picture(start: bytes) -> bool:
    """Return whether a file is a picture by its first bytes, of a format that is read or of HEIC."""
    if start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")):
        return True
    if start.startswith(b"BM"):  # of BMP, whose header has zeros in these four bytes
        return start[6:10] == bytes(4)
    if start.startswith(b"RIFF"):
        return start[8:12] == b"WEBP"
    return _is_heic(start) or (start[4:8] == b"ftyp" and b"avif" in start[:64])


def is_film(start: bytes) -> bool:
    """Return whether a file is a video or a sound by its first bytes."""
    if start[4:8] == b"ftyp":  # MP4 and its relatives; AVIF is a picture
        return b"avif" not in start[:64]
    return start.startswith(AUDIO_VIDEO) or (start.startswith(b"RIFF") and start[8:12] in (b"AVI ", b"WAVE"))


_KINDS: list[tuple[Callable[[bytes], bool], str]] = [
    (lambda start: not start, f"is empty, {AGAIN}"),
    (
        _begins(b"version https://git-lfs"),
        "is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository",
    ),
    (_is_markup(b"<!doctype html", b"<html", b"<head", b"<body"), f"is a web page (HTML), {AGAIN}"),
    (lambda start: _is_markup(b"<svg", b"<?xml")(start) and b"<svg" in start, "is SVG; convert it to PNG"),
    (_is_markup(b"<?xml", b"<error"), f"is XML, as servers send it with an error, {AGAIN}"),
    (_is_heic, "is HEIC, which is not read; convert it to JPEG (heif-convert, ImageMagick, or sips on a Mac)"),
    (is_film, "is a video or sound; only pictures are read, such as single frames"),
    (_begins(b"%PDF"), "is a PDF; convert its pages to PNG or JPEG"),
    (_begins(b"\x28\xb5\x2f\xfd"), "is compressed by zstd, which is not read; unpack it with zstd -d"),
    (_begins(b"PK\x03\x04"), "is a zip archive; unpack it"),
    (_begins(b"PAR1"), "is a Parquet file; set data.source to parquet to read its rows"),
]
"""A test of a file's first bytes, and the words for it, in the order in which they are tried."""
