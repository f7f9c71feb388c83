"""Name the hang of a run: ask its ranks, compare their answers, and look the collective up in the run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.plan import WrapPlan
from ..hangs.find import Hang, find_departure, find_hang
from ..hangs.name_own import order_beside
from ..hangs.order import StepOrder, step_order
from ..hangs.stacks import Frame
from ..hangs.words import NO_ORDER, hang_words
from ..params import ParamError, RunParams
from .ask_ranks import ask_ranks, kept, sockets_here
from .folder import read_json
from .record import RunRecord


@dataclass(frozen=True)
class NamedHang:
    """A hang of a run."""

    hang: Hang
    order: StepOrder

    @property
    def rank(self) -> int | None:
        """The rank that the others wait for; None where it is all of them."""
        return self.hang.rank

    def words(self, frames: Sequence[Frame]) -> str:
        """Return it in a sentence. frames: the stack of that rank, the innermost frame first."""
        return hang_words(self.hang, self.order, frames)


def name_hang_of(folder: Path, record: RunRecord) -> NamedHang | None:
    """Return who is missing in a run that hangs; None where the ranks cannot tell, such as before they have joined."""
    records = ask_ranks(folder, record)
    order = order_of_run(folder)
    hang = find_hang(records, order.fit)
    return None if hang is None else NamedHang(hang, order)


def name_departure_of(folder: Path, record: RunRecord) -> NamedHang | None:
    """Return which rank was in another collective, of a run whose ranks have failed; None if they cannot tell."""
    order = order_of_run(folder)
    hang = find_departure(kept(folder, record), order.fit)
    return None if hang is None else NamedHang(hang, order)


def order_of_run(folder: Path) -> StepOrder:
    """Return the collectives of a step of a run, by its plan.json; none where it has no plan."""
    sockets = sockets_here()
    own = order_beside(sockets) if sockets else None
    if own is not None:  # of a loop of one's own
        return own
    values = read_json(folder / "plan.json") or {}
    try:
        plan = WrapPlan.from_dict(values["plan"])
        params = RunParams.from_yaml(folder / "params.yaml")
        return step_order(plan, params.train, sources=len(params.data.sources()))
    except (KeyError, ValueError, TypeError, OSError, ParamError):
        return NO_ORDER
