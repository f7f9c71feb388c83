"""Which ranks of a `%%ranks` cell do nothing, and which of them wait for others."""

import threading

from mmfsdp.kit.hangs.entered import Entry, RankRecord
from mmfsdp.kit.hangs.stacks import Frame
from mmfsdp.kit.widgets.pictures.rank_moves import IDLE_S, Moves, one_waits

TORCH = Frame("/v/site-packages/torch/distributed/distributed_c10d.py", 9, "recv")


def verdicts(looks):
    """Return what is said of each look: the CPU seconds of each process, and whether one of them can run."""
    moves = Moves()
    return [moves.are_none(second, cpu, can_run=can_run) for second, (cpu, can_run) in enumerate(looks)]


def test_ranks_move_where_one_of_them_computes():
    idle = [({1: 5.0, 2: 7.0}, False)] * (IDLE_S + 3)
    assert verdicts(idle) == [False] * IDLE_S + [True] * 3
    assert not any(verdicts([({1: 5.0, 2: second / 10}, False) for second in range(20)]))


def test_the_seconds_of_ranks_that_have_ended_are_not_taken_from_those_of_others():
    both, one = [({1: 5.0, 2: 7.0 + second}, False) for second in range(3)], []
    for second in range(2 * IDLE_S):
        one.append(({2: 10.0 + second}, False))
    assert not any(verdicts(both + one))
    assert verdicts([*both, *[({1: 5.0}, False)] * (IDLE_S + 1)])[-2:] == [False, True], "its own time begins then"


def test_a_rank_that_gets_no_core_does_not_wait_for_others():
    """On a busy machine it may have computed nothing for seconds."""
    starved = [({1: 5.0, 2: 7.0}, second % 3 == 0) for second in range(20)]
    assert not any(verdicts(starved))


def test_a_rank_waits_in_a_collective_a_receive_or_the_end_of_one(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("received = dist.irecv(x)\nreceived.wait()\ntime.sleep(9)\n")
    entered, done = Entry("0", 1, "all-reduce", 4, done=False), Entry("0", 1, "all-reduce", 4, done=True)
    waits, runs = {0: RankRecord(0, (entered,))}, {0: RankRecord(0, (done,))}
    assert one_waits(waits, {}, at_end=()) and not one_waits(runs, {}, at_end=())
    for frame, is_waiting in (
        (TORCH, True),
        (Frame(str(cell), 2, "<module>"), True),
        (Frame(str(cell), 3, "<module>"), False),
        (Frame(threading.__file__, 2, "wait"), False),
    ):
        caller = Frame(str(cell), 2, "<module>")
        assert one_waits(runs, {0: [frame, caller]}, at_end=()) is is_waiting, frame
        assert not one_waits(waits, {0: [frame, caller]}, at_end=(0,)), "it waits for the end of the others' cell"
