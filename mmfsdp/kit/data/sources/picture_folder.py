"""Pictures in folders: those that a metadata file names, those with a text of the same name, and class folders."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ....params import ParamError
from ..corrupt import CorruptRecord, printable, shorten
from ..media import PICTURE_SUFFIXES
from .csv_rows import TableRows
from .json_rows import JsonLines
from .row_files import FoundFiles, FoundRow, RowFile, Strings
from .splits import published_split

METADATA = ("metadata.jsonl", "metadata.csv")
"""Names of the files that name pictures and their texts, the first that is there."""
CLUTTER = ("__MACOSX", "Thumbs.db", "desktop.ini")
SHOWN = 3
NO_CAPTIONS = (
    f"is no folder with a {METADATA[0]}, nor with captions of another kind; "
    'write one of a line {"file_name": ..., "text": ...} per picture, or a caption in 1.txt beside each 1.png, or put '
    "the pictures of each class into a folder with the name of the class"
)


@dataclass
class FolderContent:
    """The files in and below a folder that matter here, by their paths below it, in order."""

    metadata: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path, without: Path | None = None) -> FolderContent:
        """Return what is in a folder but for another in it. Links to folders are not followed."""
        content = cls()
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if without is None or Path(folder, name).resolve() != without]
            for name in names:
                path = Path(os.path.relpath(folder, root), name).as_posix()
                suffix = os.path.splitext(name)[1].lower()
                if name in METADATA:
                    content.metadata.append(path)
                elif _is_clutter(path):
                    continue
                elif suffix in PICTURE_SUFFIXES:
                    content.pictures.append(path)
                elif suffix == ".txt":
                    content.texts.append(path)
        for paths in (content.metadata, content.pictures, content.texts):
            paths.sort(key=PurePosixPath)
        return content


def _is_clutter(path: str) -> bool:
    return any(part.startswith(".") or part in CLUTTER for part in path.split("/"))


class NamedPictures(RowFile):
    """Pictures with a text file of the same name (1.png and 1.txt), or in folders that are named as their classes."""

    named_by_picture = True

    def __init__(self, root: Path, pictures: Sequence[str], texts: Sequence[str]):
        """Take the paths of the pictures below a folder, and of the text of each; "" where it has none.

        Without any text, captions are the names of their folders.
        """
        super().__init__(root)
        self.pictures = root
        self.relative = PurePosixPath("pictures")
        self._names = Strings(pictures)
        self._texts = Strings(texts)
        self._by_class = not any(texts)
        self.format = "the names of class folders" if self._by_class else "text files beside the pictures"

    def scan(self) -> Iterator[FoundRow]:
        """Yield the name of each picture, without its caption, which is in a file of its own."""
        for i in range(len(self._names)):
            name, problem = self._names[i], self._problem(i)
            yield "", "", self._corrupt(name, problem) if problem else {"file_name": name}

    def read(self, i: int) -> FoundRow:
        """Return the picture of that number with its caption."""
        name = self._names[i]
        if self._by_class:
            return "", "", {"file_name": name, "text": class_of(name).replace("_", " ")}
        try:
            text = (self.path / self._texts[i]).read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            return "", "", self._corrupt(name, f"has a caption that is not UTF-8 ({error})")
        return "", "", {"file_name": name, "text": text}

    def _corrupt(self, name: str, reason: str) -> CorruptRecord:
        return CorruptRecord(str(self.relative.parent / name), reason)

    def _problem(self, i: int) -> str:
        if self._by_class and not class_of(self._names[i]):
            return "lies in no folder that names its class"
        if not self._by_class and not self._texts[i]:
            return f"has no caption; write it into {shorten(_stem(self._names[i]))}.txt"
        return ""


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def class_of(picture: str) -> str:
    """Return the class of a picture: the name of the nearest folder that is no split; "" if there is none."""
    for folder in reversed(PurePosixPath(picture).parent.parts):
        if not published_split(PurePosixPath(folder)):
            return folder
    return ""


def open_folder(root: Path, path: str, without: Path | None = None) -> FoundFiles:
    """Return the files of rows of a folder of pictures: its metadata files, or else all pictures with captions.

    path: the folder as the person wrote it; without: a folder in it that is left out. Raises ParamError for a folder
    without captions.
    """
    content = FolderContent.of(root, without)
    if content.metadata:
        files, notes = _metadata_files(root, content.metadata)
        return FoundFiles(root, files, notes, content.pictures)
    text_of = {_stem(text): text for text in content.texts}
    texts = [text_of.get(_stem(picture), "") for picture in content.pictures]
    notes = []
    if any(texts):
        unread = sorted(set(content.texts).difference(texts))
        if unread:
            notes.append(f"{_some(unread)} without a picture of the same name, which are not read")
    else:
        classes = {class_of(picture) for picture in content.pictures} - {""}
        if len(classes) < 2:
            raise ParamError("path", f"{path!r} {NO_CAPTIONS}")
        notes.append(f"captions are the names of the folders of its {len(classes)} classes: {_some(sorted(classes))}")
    return FoundFiles(root, [NamedPictures(root, content.pictures, texts)], notes)


def _metadata_files(root: Path, metadata: Sequence[str]) -> tuple[list[RowFile], list[str]]:
    """Return the metadata file of each folder, and a note of those that are not read."""
    files: dict[str, RowFile] = {}
    unread = []
    for path in sorted(metadata, key=lambda path: METADATA.index(os.path.basename(path))):
        folder = os.path.dirname(path)
        if folder in files:
            unread.append(path)
            continue
        kind = JsonLines(root / path) if path.endswith(METADATA[0]) else TableRows(root / path, delimiter=",")
        kind.relative = PurePosixPath(path)
        files[folder] = kind
    notes = [f"{_some(unread)} beside {METADATA[0]}, which is read instead"] if unread else []
    return sorted(files.values(), key=lambda file: file.path), notes


def unread_pictures_note(pictures: Sequence[str], named: Collection[int]) -> list[str]:
    """Return a note of the pictures that no row names; none if there are none.

    named: hashes of the paths of those that a row names.
    """
    unread = [picture for picture in pictures if hash(picture) not in named]
    return [f"no row names {len(unread)} of its pictures: {_some(unread)}"] if unread else []


def _some(paths: Iterable[str]) -> str:
    """Return the first three paths in words, and how many more there are."""
    listed = [printable(shorten(path)) for path in paths]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
