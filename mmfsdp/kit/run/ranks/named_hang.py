"""Name the hang of a run: ask its ranks, compare their answers, and look the collective up in the run's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....core.plan import WrapPlan
from ....params import ParamError, RunParams
from ...hangs.compare import ENDED, Hang, find_departure, find_ended, find_hang
from ...hangs.entered import RankRecord
from ...hangs.order import StepOrder, step_order
from ...hangs.own_loop import PLAN, order_in
from ...hangs.stacks import Frame, main_stack
from ...hangs.words import NO_ORDER, hang_words
from ..files.folder import Row, last_bytes, last_row, log_paths
from ..files.plan_file import read_plan
from ..files.reasons import COLLECTIVES, LOST_PEER
from ..files.run_record import RunRecord, RunState, because, rank_statuses
from ..files.snapshot import Snapshot
from .ask_ranks import KEPT_PLAN, ask_here, ask_ranks, kept, sockets_here
from .silent_ranks import library_error


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


def kind_of_hang(hang: Hang) -> str:
    """Return the kind of a hang, as reasons.py knows it."""
    return ENDED if hang.process == ENDED else hang.kind


def name_hang_of(folder: Path, record: RunRecord) -> NamedHang | None:
    """Return who is missing in a run that hangs; None where the ranks cannot tell, such as before they have joined."""
    records = with_ended(rank_statuses(folder, record), ask_ranks(folder, record))
    order = order_of_run(folder)
    hang = find_hang(records, order.fit)
    return None if hang is None else NamedHang(hang, order)


def with_ended(reports: Sequence[Row], records: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """Return the records with a mark at ranks that have reported their end while others have not."""
    marked = dict(records)
    for rank, status in enumerate(reports):
        if status.get("state") == "done":
            marked[rank] = RankRecord(rank, process=ENDED)
    return marked


def with_cause(look: Snapshot, state: RunState) -> RunState:
    """Return the state of a failed run with the rank that the others failed of, where the ranks' lists tell it.

    That is one that was in another collective than the others, or one that came to its end before them.
    """
    hang: Hang | None = None
    record = look.record
    if record is None or state.why.kind not in (COLLECTIVES, LOST_PEER):
        return state
    order = order_of_run(look.folder)
    if state.why.kind == COLLECTIVES:
        hang = _departure(look.folder, record, order)
    else:
        hang = find_ended(with_ended(look.reports, kept(look.folder, record)))
    if hang is None or hang.rank is None:
        return state
    stack = main_stack(look.log(hang.rank))
    cause, kind = hang_words(hang, order, stack), kind_of_hang(hang)
    return because(state.status, cause, kind=kind, rank=hang.rank, others=(state.why,), traceback=state.traceback)


def _departure(folder: Path, record: RunRecord, order: StepOrder) -> Hang | None:
    """Return which rank was in another collective, of a run whose ranks have failed; None if they cannot tell."""
    records, logs = kept(folder, record), dict(log_paths(folder))
    if sockets := sockets_here():  # of a local run: ranks that did not fail are still there, and answer
        for rank, answer in ask_here(folder, sockets).items():
            if rank in records and not records[rank].entries:
                records[rank] = answer
    crashed = [rank for rank in records if rank in logs and library_error(last_bytes(logs[rank], size=64_000))]
    return find_departure(records, order.fit, crashed)


def order_of_run(folder: Path) -> StepOrder:
    """Return the collectives of the step that a run is in, by its plan.json; none where it has no plan."""
    sockets = sockets_here()
    own = order_in(sockets / PLAN) if sockets else None
    own = own or order_in(folder / "logs" / KEPT_PLAN)
    if own is not None:  # of a loop of one's own
        return own
    try:
        values = read_plan(folder, done=last_row(folder).get("step", 0))
        plan = WrapPlan.from_dict(values["plan"])
        params = RunParams.from_yaml(folder / "params.yaml")
        return step_order(plan, params.train, sources=len(params.data.sources()))
    except (KeyError, ValueError, TypeError, OSError, ParamError):
        return NO_ORDER
