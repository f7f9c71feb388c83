"""Whose files a traceback shows. The folder of a clone may have any name, that of the package included."""

from pathlib import Path

import mmfsdp

FOLDER = f"{Path(mmfsdp.__file__).parent}/"


def shows_package(text: str) -> bool:
    """Return True if a text names a file of the package."""
    return FOLDER in text
