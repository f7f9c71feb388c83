"""Log the computation, the collectives and the waits of a rank in a step, in order: the input of the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...core.plan import ring_bytes
from ..train.meters import register_counting_kernels

Event = list[Any]
"""["compute", FLOPs, phase], ["send", kind, bytes of the whole tensor, phase, dtype] or ["wait", number of the send];
phase is forward or backward, dtype as in float32. Sends are numbered from 0, as plain data that JSON keeps."""


class StepLog:
    """The events of one step of this process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.in_flight: list[tuple[int, Work]] = []
        self._sends = 0

    @property
    def phase(self) -> str:
        """Phase of the step: backward while autograd runs one in this thread, else forward."""
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def add_compute(self, flops: int) -> None:
        """Add work to the last event, if that is work of the same phase."""
        last = self.events[-1] if self.events else None
        if last and last[0] == "compute" and last[2] == self.phase:
            last[1] += flops
        else:
            self.events.append(["compute", flops, self.phase])

    def add_send(self, kind: str, tensors: list[torch.Tensor], ranks: int) -> int:
        """Add a collective of tensors of one dtype, and return its number."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.events.append(["send", kind, nbytes, self.phase, str(tensors[0].dtype).removeprefix("torch.")])
        self._sends += 1
        return self._sends - 1

    def add_work(self, number: int, result: Any) -> None:
        """Note what a collective has returned: whoever waits for it, waits for this."""
        work = Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)
        self.in_flight.append((number, work))

    def add_wait(self, work: Any) -> None:
        """Add a wait for a collective, once."""
        for number, begun in self.in_flight:
            if begun is work:
                self.events.append(["wait", number])
                self.in_flight.remove((number, begun))
                return

    def finish(self) -> list[Event]:
        """Return the events. A collective that nobody waited for counts as waited for where it began."""
        lost = {number for number, _ in self.in_flight}
        events, number = [], 0
        for event in self.events:
            events.append(event)
            if event[0] == "send":
                if number in lost:
                    events.append(["wait", number])
                number += 1
        return events


class _CountFlops(TorchDispatchMode):
    """Adds the FLOPs of each operator to a log."""

    def __init__(self, log: StepLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._log.add_compute(count(*args, **(kwargs or {}), out_val=out))
        return out


@contextmanager
def logged() -> Iterator[StepLog]:
    """Log this process's step while entered. Only one log, or counter of collectives, is entered at a time."""
    log = StepLog()
    library = register_counting_kernels(log.add_send, log.add_work)
    wait = Work.wait

    def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
        log.add_wait(work)
        return wait(work, *args, **kwargs)

    Work.wait = noted  # type: ignore[method-assign, assignment]
    try:
        with _CountFlops(log):
            yield log
    finally:
        Work.wait = wait  # type: ignore[method-assign]
        library._destroy()


def sent(events: list[Event], ranks: int) -> dict[str, int]:
    """Return the bytes that a rank of so many sends, by kind and phase, as `kind, phase`."""
    total: Counter[str] = Counter()
    for event in events:
        if event[0] == "send":
            _, kind, nbytes, phase, _ = event
            total[f"{kind}, {phase}"] += ring_bytes(kind, nbytes, ranks)
    return dict(total)


def calls(events: list[Event]) -> int:
    """Return how many collectives there are."""
    return sum(event[0] == "send" for event in events)
