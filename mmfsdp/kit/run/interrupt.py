"""Interrupt what a person waits for: a notebook prints one line that says what goes on, not a traceback of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """An interrupt by a person, with a line that says what it ended and what goes on."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback."""
        return [f"KeyboardInterrupt: {self}"]


@contextmanager
def interruptible(words: str) -> Iterator[None]:
    """Raise Interrupted with these words for an interrupt of what is inside."""
    try:
        yield
    except Interrupted:
        raise  # of a wait inside, whose words say more
    except KeyboardInterrupt:
        raise Interrupted(words) from None
