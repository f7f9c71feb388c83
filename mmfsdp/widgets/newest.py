"""Work that is asked for faster than it can be done: in a thread, and only ever the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
PAUSE = 0.03
"""Seconds in which further wishes are waited for: a person who types changes several things at once."""


class Newest(Generic[T]):
    """Calls `work` with the newest of what was asked for. Its thread lives only as long as there is something to do."""

    def __init__(self, work: Callable[[T], None]):
        self._work = work
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._wanted: list[T] = []
        self._thread: threading.Thread | None = None

    def ask(self, what: T) -> None:
        """Have this done, rather than what was asked before and has not begun."""
        with self._lock:
            self._wanted = [what]
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._run, daemon=True, name="plan")
                self._thread.start()

    def wait(self) -> None:
        """Until all is done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def closed(self) -> bool:
        """Nothing more will begin."""
        return self._closing.is_set()

    def close(self) -> None:
        """Begin nothing more."""
        self._closing.set()

    def _run(self) -> None:
        while True:
            self._closing.wait(PAUSE)
            with self._lock:
                if not self._wanted or self.closed:
                    self._thread = None
                    return
                (what,), self._wanted = self._wanted, []
            self._work(what)
