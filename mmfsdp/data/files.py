"""expand: the files that a path means."""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path

from ..params import ParamError


def expand(path: str, *kinds: str) -> list[Path]:
    """Files that a path means: braces ({000..011}), wildcards, or all of a folder that end in one of `kinds`.

    Raises ParamError.
    """
    from webdataset.shardlists import expand_urls

    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.suffix in kinds)
    else:
        try:
            urls = [found for url in expand_urls(path) for found in (sorted(glob(url)) if "*" in url else [url])]
        except (AssertionError, ValueError) as error:
            raise ParamError("path", f"{path!r} cannot be expanded: {error}") from None
        files = [Path(os.path.expanduser(url)) for url in urls]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise ParamError(
            "path",
            f"{path!r} names no {kinds[0]} file here"
            + (f": {', '.join(map(str, missing[:3]))} of {len(files)} not found" if missing else "")
            + f"; give local files, such as parts/{{000..011}}{kinds[0]}",
        )
    return files
