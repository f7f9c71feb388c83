"""The command `mmfsdp course DIR`: the notebooks and slides of the course, copied into a folder."""

from __future__ import annotations

import fnmatch
import posixpath
import re
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ...params import ParamError
from .class_copy import TUTOR_NOTE, class_files
from .colab import address_of, for_colab

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("notebooks", "slides")
NOT_COPIED = ("__pycache__", ".ipynb_checkpoints", ".virtual_documents", "runs", "build", "*.pyc")
"""Names that are not copied: notebooks that ran and a deck that was built have left them."""
NOTE_FILES = ("AGENTS.md", "CLAUDE.md")
"""Names under which AI assistants look for what they should know of a folder."""
SHOWN = 5
LINK = re.compile(r"(?<!!)\[(?P<words>[^\[\]]+)\]\((?P<target>\.\./[^)\s#]+)(?:#[^)\s]*)?\)")
"""A link of a page to another folder."""


def add_course(add: Callable[..., ArgumentParser]) -> None:
    """Add `mmfsdp course`."""
    command = add(
        course, "copy the notebooks and slides of the course", usage="DIR [--student] [--colab URL] [--replace]"
    )
    command.add_argument("folder", metavar="DIR", help="the folder to copy into; existing files are kept")
    command.add_argument("--student", action="store_true", help="for students: without answers and slides")
    command.add_argument(
        "--colab", metavar="URL", help="with --student: where the copy will lie on GitHub, for badges and a first cell"
    )
    command.add_argument("--replace", action="store_true", help="overwrite files that differ from the course's")


def course(values: Namespace) -> int:
    """Copy the course into a folder; with --student without answers. Returns 0."""
    target = Path(values.folder)
    if target.exists() and not target.is_dir():
        raise ParamError("DIR", f"{values.folder!r} is a file; name a folder, or one that does not exist yet")
    with course_source() as source:
        files = files_for(values, source, target)
    written, kept = write_files(with_links_inside(files), target, replace=values.replace)
    print(f"{target}: {written} of {len(files)} files written")
    if kept:
        names = ", ".join(kept[:SHOWN]) + (f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else "")
        print(f"kept, although they differ from the course: {names}; --replace overwrites them")
    print(f"open it with: jupyter lab {target / 'notebooks' / 'contents.ipynb'}")
    return 0


def files_for(values: Namespace, source: Path, target: Path) -> dict[str, bytes]:
    """Return the files that the command's options ask for, by their path in the copy. Raises ParamError."""
    # With --student and --replace the notebooks would lose their solutions.
    if source.resolve() == target.resolve():
        raise ParamError("DIR", f"{values.folder!r} is the course itself; name another folder")
    if values.colab and not values.student:
        raise ParamError("--colab", "is for a copy without answers; add --student")
    if values.student:
        address = address_of(values.colab) if values.colab else None
        check_has_no_answers(target)
        files = student_files(source)
        return files if address is None else for_colab(files, address)
    return teacher_files(source)


@contextmanager
def course_source() -> Iterator[Path]:
    """Yield the folder with the notebooks and slides: unpacked if the package came as a wheel, else beside it."""
    packed = PACKAGE / "course_files.zip"
    if packed.is_file():
        with tempfile.TemporaryDirectory() as folder:
            shutil.unpack_archive(packed, folder)
            yield Path(folder)
        return
    if (PACKAGE.parent / "notebooks" / "contents.ipynb").is_file():
        yield PACKAGE.parent
        return
    words = (
        f"this installation has no notebooks: they are not in {PACKAGE}, and not beside it; install mmfsdp from its "
    )
    raise ParamError("course", f"{words}repository or from a wheel that pip has built of it")


def teacher_files(source: Path) -> dict[str, bytes]:
    """Return all files of the course, by their path in the copy."""
    files = {}
    for part in PARTS:
        for path in sorted((source / part).rglob("*")):
            name = path.relative_to(source)
            left_out = any(fnmatch.fnmatch(word, pattern) for word in name.parts for pattern in NOT_COPIED)
            if path.is_file() and not left_out:
                files[name.as_posix()] = path.read_bytes()
    return files


def student_files(source: Path) -> dict[str, bytes]:
    """Return the files of the class's copy: notebooks without answers, and a note for AI assistants."""
    files = {f"notebooks/{name}": content for name, content in class_files(source / "notebooks").items()}
    for name in NOTE_FILES:
        files[name] = TUTOR_NOTE.encode()
    return files


def with_links_inside(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with links to each other alone: code and tests of the repository are not in a copy.

    Of a link that leads out of the copy, the words stay.
    """
    folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}

    def prune(name: str, text: str) -> str:
        def inside(link: re.Match[str]) -> str:
            # Links are relative to the page that has them.
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link["target"]))
            return link[0] if target in files or target in folders else link["words"]

        return LINK.sub(inside, text)

    changed = dict(files)
    for name, content in files.items():
        if name.endswith(".md"):
            changed[name] = prune(name, content.decode("utf-8")).encode()
    return changed


def check_has_no_answers(target: Path) -> None:
    """Raise ParamError if a folder holds a copy with answers: files that exist there would be kept."""
    for path in sorted((target / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        if '"solution-' in path.read_text(encoding="utf-8"):  # the tag of a cell
            raise ParamError("DIR", f"{path} has solutions; name another folder for the copy of the class")


def write_files(files: Mapping[str, bytes], target: Path, *, replace: bool) -> tuple[int, list[str]]:
    """Write files into a folder. Return how many were written, and the names of those that are there and were kept.

    replace: overwrite those that differ. Raises OSError where a file cannot be written.
    """
    written, kept = 0, []
    for name, content in files.items():
        path = target / name
        if path.exists() and (path.is_dir() or path.read_bytes() == content):
            continue
        if path.exists() and not replace:
            kept.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written += 1
    return written, kept
