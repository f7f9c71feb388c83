"""The course on Colab: a first cell in each notebook of the class's copy that installs, and a page of badges."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...params import ParamError

FOLDER_ON_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/tree/([\w.-]+)/([\w./-]*[\w-])/?")
FIRST_CELL = """# On Colab: install mmfsdp into this runtime, and copy the course. Elsewhere this does nothing.
import sys

if "google.colab" in sys.modules:
    !test -d /content/mmfsdp || git clone -q --depth 1 -b BRANCH https://github.com/REPOSITORY /content/mmfsdp
    %run /content/mmfsdp/install.py --here
    !test -d /content/course || mmfsdp course /content/course --student
    %cd /content/course/notebooks"""
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


class Address(NamedTuple):
    """A folder on GitHub for the class's copy: OWNER/NAME of its repository, its branch, its path."""

    repository: str
    branch: str
    folder: str


def address_of(url: str) -> Address:
    """Return the address of a folder on GitHub. Raises ParamError for a URL of another form."""
    match = FOLDER_ON_GITHUB.fullmatch(url)
    if match is None:
        form = "https://github.com/OWNER/mmfsdp/tree/main/colab"
        raise ParamError(
            "--colab", f"{url!r} is no folder on GitHub; give the address that a browser shows for it, such as {form}"
        )
    return Address(*match.groups())


def for_colab(files: Mapping[str, bytes], address: Address) -> dict[str, bytes]:
    """Return the files of the class's copy with a first cell in each notebook, and README.md with a badge for each.

    Colab opens one notebook without the files beside it: the cell fetches the repository, which must hold mmfsdp, too.
    """
    code = FIRST_CELL.replace("BRANCH", address.branch).replace("REPOSITORY", address.repository)
    changed = dict(files)
    rows = ["# The course on Colab\n\nOpen a lesson, and run its first cell, which installs: a few minutes.\n"]
    for name in sorted(files):
        if not name.endswith(".ipynb"):
            continue
        book = json.loads(files[name])
        title = "".join(book["cells"][0]["source"]).partition("\n")[0].lstrip("# ")
        source = code.splitlines(keepends=True)
        cell: dict[str, Any] = {"cell_type": "code", "id": "colab", "metadata": {}, "source": source}
        book["cells"].insert(1, cell | {"execution_count": None, "outputs": []})
        changed[name] = (json.dumps(book, indent=1, ensure_ascii=False) + "\n").encode()
        place = f"{address.repository}/blob/{address.branch}/{address.folder}/{name}"
        rows.append(f"- [![{title}]({BADGE})](https://colab.research.google.com/github/{place}) {title}")
    changed["README.md"] = ("\n".join(rows) + "\n").encode()
    return changed
