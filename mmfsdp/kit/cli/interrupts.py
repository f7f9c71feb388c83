"""Ctrl-C, noted: where it comes during an import, a library may turn it into an error of its own.

A module that a KeyboardInterrupt left half imported fails later, with an error that does not name the cause.
"""

from __future__ import annotations

import signal
from typing import Any

EXIT_CODE = 128 + signal.SIGINT

_noted: list[int] = []
"""The signals that came."""


def note(number: int, frame: Any) -> None:
    """Handle SIGINT as Python does, and note that it came."""
    _noted.append(number)
    signal.default_int_handler(number, frame)


def were_noted() -> bool:
    """Return True if this process got a SIGINT."""
    return bool(_noted)
