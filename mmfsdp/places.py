"""Folders of a person's own, for what can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$MMFSDP_CACHE, or ours in the user's cache folder. Raises PermissionError as `temporary_folder`."""
    found = os.environ.get("MMFSDP_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mmfsdp"
    path = Path(os.path.expanduser(found))
    return path if path.parts[0] != "~" else temporary_folder() / "cache"  # no home


def temporary_folder() -> Path:
    """One in the system's folder for temporary files that nobody else can write.

    Raises PermissionError where another person has made it, or opened it.
    """
    folder = Path(tempfile.gettempdir()) / f"mmfsdp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is somebody else's or open to others; remove it")
    return folder
