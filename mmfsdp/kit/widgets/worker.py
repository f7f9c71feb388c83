"""Worker: does what takes long in a thread, so that the kernel and the page stay free."""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import ipywidgets as w

from .markup import error_note

EXIT_S = 20.0
"""Most seconds that the end of Python waits for work that goes on."""


@dataclass(frozen=True, eq=False)
class _Work:
    """One call of `Worker.work`."""

    name: str
    function: Callable[[], Any]
    show: Callable[[Any], None] | None


class Worker:
    """Base of a widget that does something slow: `self.work(name, function, show=...)` returns immediately.

    A button that counts the files of a folder:

        class FileCount(Worker, w.VBox):
            def __init__(self):
                self._path, self._button, self._answer = w.Text(), w.Button(description="Count"), w.HTML()
                self.error_line = self._answer
                self._button.on_click(lambda _: self.count(Path(self._path.value)))
                super().__init__([self._path, self._button, self._answer])

            def count(self, path):
                self.work("count", lambda: len(list(path.iterdir())), show=self._show_count)

            def _show_count(self, count):
                self._answer.value = note(f"{count:,} files")

            def busy_changed(self):
                self._button.disabled = self.busy

    - A widget does one thing at a time, in the order in which it was asked.
    - The newest wins: of several calls with one name, those that wait are left out, and the answer of an older one that
      is being worked on is not shown. Other names do not matter to it. Ask `is_under_way(name)` to ignore a second
      press instead.
    - An error of `function` or `show` is shown on `error_line`, escaped, and kept in `failure`. Override `show_error`
      to show it elsewhere.
    - `busy` is True from the call until the answer, or the error, is shown. `busy_changed` is called each time.
    - After `end_work`, which closing the widget calls, nothing is begun or shown any more. A thread cannot be stopped
      from outside: a function that takes long looks at `is_wanted` from time to time, and returns when that is False.

    It is a base of what has no page as well, such as the planner of a cockpit.
    """

    error_line: w.HTML
    """The line that shows errors; set it before the first `work`, or override `show_error`."""
    failure: Exception | None
    """The error of the newest work that has ended; None if it ended well, and before there is any."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.failure = None
        # Two underscores: a widget has names of its own.
        self.__newest: dict[str, _Work] = {}  # by name: what was asked for last, until it is done
        self.__queue: deque[_Work] = deque()
        self.__current: _Work | None = None
        self.__thread: threading.Thread | None = None
        self.__is_over = False
        self.__turn = threading.Condition()  # guards what is above; never held while the widget's methods run
        _WORKERS.add(self)
        super().__init__(*args, **kwargs)

    def work(self, name: str, function: Callable[[], Any], *, show: Callable[[Any], None] | None = None) -> None:
        """Call `function` in a thread, and `show` there with what it returned.

        Args:
            name: of this kind of work; newer work of the same name takes its place.
            function: returns an answer, or is a generator that yields several; each of them is shown as it comes.
            show: called with each answer that is still wanted. None: nothing is shown but errors.
        """
        asked = _Work(name, function, show)
        with self.__turn:
            if self.__is_over:
                return
            self.__newest[name] = asked
        try:
            self.busy_changed()  # before it can begin, and so before the call that says that it has ended
        finally:
            with self.__turn:
                self.__queue.append(asked)
                if self.__thread is None:
                    self.__start()

    @property
    def busy(self) -> bool:
        """True while something is being done, or waits for its turn."""
        return bool(self.__newest)

    def is_under_way(self, name: str) -> bool:
        """Return True while work of this name is being done, or waits for its turn."""
        return name in self.__newest

    @property
    def is_wanted(self) -> bool:
        """True in a function whose answer would be shown: there is no newer work of its name, and nobody ended it."""
        return self.__current is not None and self.__newest.get(self.__current.name) is self.__current

    def drop(self, name: str) -> None:
        """Let go of work of this name: it is not begun any more, and its answer is not shown."""
        with self.__turn:
            self.__newest.pop(name, None)
        self.busy_changed()

    def end_work(self) -> None:
        """Begin and show nothing any more, from now on."""
        with self.__turn:
            self.__is_over = True
            self.__newest.clear()
            self.__queue.clear()

    def break_off(self) -> None:
        """Begin and show nothing any more, and have what is being done end at its next line of Python."""
        self.end_work()
        with self.__turn:
            if self.__thread is not None and self.__thread.ident is not None:
                thread = ctypes.c_ulong(self.__thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until everything that was asked for is done and shown. Return False after `timeout` seconds."""
        # Not Thread.join: when a person interrupts it, Python 3.11 takes the thread for ended.
        with self.__turn:
            return self.__turn.wait_for(lambda: self.__thread is None and not self.__newest, timeout)

    # What a widget may override

    def show_error(self, name: str, error: Exception) -> None:
        """Show what kept work of this name from being done. Called in the thread."""
        self.error_line.value = error_note(error)

    def busy_changed(self) -> None:
        """Show that something is being done, or is done.

        Called by `work` and `drop`, and in the thread each time that something is done.
        """

    # The thread

    def __start(self) -> None:
        self.__thread = threading.Thread(target=self.__run, daemon=True, name=type(self).__name__)
        _THREADS.add(self.__thread)
        self.__thread.start()

    def __run(self) -> None:
        """Do what was asked for; the thread lives only while there is something to do."""
        try:
            while self.__take_next():
                assert self.__current is not None
                try:
                    self.__do(self.__current)
                finally:
                    with self.__turn:
                        if self.is_wanted:
                            del self.__newest[self.__current.name]
                if not self.__is_over:
                    self.busy_changed()
        finally:
            with self.__turn:
                self.__current = self.__thread = None
                if self.__queue:  # asked for just now, or after an error in a method that shows
                    self.__start()
                self.__turn.notify_all()

    def __take_next(self) -> bool:
        """Take what has waited longest and is still wanted. Return False if there is nothing."""
        with self.__turn:
            while self.__queue:
                self.__current = self.__queue.popleft()
                if self.is_wanted:
                    return True
        return False

    def __do(self, asked: _Work) -> None:
        try:
            answer = asked.function()
            for each in answer if isinstance(answer, GeneratorType) else [answer]:
                if not self.is_wanted:
                    return
                self.failure = None
                if asked.show is not None:
                    asked.show(each)
        except Exception as error:  # nobody is above this thread: the error is shown
            if self.is_wanted:  # or nobody looks at what it is about any more
                self.failure = error
                self.show_error(asked.name, error)


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""All that are there. A thread that has nothing to do any more may still free tensors."""


@atexit.register
def _break_off_all() -> None:
    """End all work before Python ends: a thread that comes back from C++ then, as of torch, aborts the process."""
    for worker in list(_WORKERS):
        worker.break_off()
    for thread in list(_THREADS):
        if thread.is_alive():
            thread.join(EXIT_S)
