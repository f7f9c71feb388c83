"""Who is missing, by what ranks have entered; in which unit's collective, by the plan; what it does, by its stack."""

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mmfsdp
from mmfsdp.kit.hangs import rank_server
from mmfsdp.kit.hangs.compare import (
    CROSSED,
    DIFFERENT,
    ENDED,
    MISSING,
    NO_END,
    STOPPED,
    UNKNOWN_GROUP,
    find_departure,
    find_hang,
)
from mmfsdp.kit.hangs.entered import MAX_ENTRIES, Entry, RankRecord, kind_of, parse
from mmfsdp.kit.hangs.order import COUNTS, FIGURES, Planned, StepOrder, step_order
from mmfsdp.kit.hangs.rank_server import ask, ask_lists, ranks_in, serve, socket_folder
from mmfsdp.kit.hangs.stacks import Frame, crash, main_stack, own_frame, short_stacks, waits_for_workers
from mmfsdp.kit.hangs.words import NO_ORDER, hang_words, ranks_words
from mmfsdp.params import TrainParams
from mmfsdp.planning import make_plan
from tests.mutated import cases
from tests.processes import in_fresh_python
from tests.tiny import tiny_batch, tiny_flamingo

GATHER, REDUCE = "all-gather", "all-reduce"
KEY = f"a run {os.getpid()}"
STEP = [(REDUCE, 16), (GATHER, 64), (GATHER, 96), (GATHER, 96), (GATHER, 96), (REDUCE, 96), (REDUCE, 24)]
"""Counts; the gathers of a, b, c; b again in backward; its reduce-scatter, as gloo lists it; figures."""
ORDER = StepOrder(
    (
        Planned(REDUCE, COUNTS, "", 16),
        Planned(GATHER, "a", "forward", 64),
        Planned(GATHER, "b", "forward", 96),
        Planned(GATHER, "c", "forward", 96),
        Planned(GATHER, "b", "backward", 96),
        Planned("reduce-scatter", "b", "backward", 96),
        Planned(REDUCE, FIGURES, "", 24),
    ),
    in_order=True,
)


def record(rank: int, collectives, *, waits: int = 0, group: str = "0") -> RankRecord:
    """A rank that has entered these; the last `waits` have not ended."""
    entries = []
    for number, (kind, nbytes) in enumerate(collectives, start=1):
        entries.append(Entry(group, number, kind, nbytes, done=number <= len(collectives) - waits))
    return RankRecord(rank, tuple(entries))


def named(*records: RankRecord, order=ORDER):
    hang = find_hang({record.rank: record for record in records}, order.fit)
    return hang, hang_words(hang, order)


@pytest.mark.parametrize(
    "reached, words",
    [
        (0, "the all-reduce of token counts at the start of a step (collective 15)"),
        (1, "the all-gather of a in forward (collective 16)"),
        (2, "the all-gather of b in forward (collective 17)"),
        (3, "the all-gather of c in forward (collective 18)"),
        (4, "the all-gather of b in backward (collective 19)"),
        (5, "the reduce-scatter of b in backward (collective 20)"),
        (6, "the all-reduce of loss and gradient norm at the end of a step (collective 21)"),
    ],
)
def test_a_rank_that_entered_less_is_missing_in_the_unit_that_comes_next(reached, words):
    """Though b and c are of one size, by what came before."""
    both = 2 * STEP + STEP[:reached]
    hang, text = named(record(0, [*both, STEP[reached]], waits=1), record(1, both))
    assert hang.kind == MISSING and text == f"rank 1 never entered {words}, in which rank 0 waits"


def test_a_rank_that_has_entered_nothing_yet_is_missing_in_the_first():
    nothing = RankRecord(1, empty=True)
    assert parse(1, b"{}") == nothing and RankRecord.from_dict(json.loads(json.dumps(nothing.to_dict()))) == nothing
    _, text = named(record(0, STEP[:1], waits=1), nothing)
    assert "rank 1 never entered the all-reduce of token counts at the start of a step (collective 1)" in text


def test_a_prefetched_collective_is_not_the_one_that_is_waited_for():
    hang, text = named(record(0, STEP + STEP[:4], waits=2), record(1, STEP + STEP[:2]))
    assert "the all-gather of b in forward (collective 10)" in text


def test_a_loop_with_collectives_of_its_own_and_without_ours_has_its_units_named_too():
    loop = [STEP[1], STEP[2], STEP[3], (REDUCE, 4), STEP[4], STEP[5], ("barrier", 0)]
    _, text = named(record(0, [*loop, *loop[:2]], waits=1), record(1, [*loop, loop[0]]))
    assert "the all-gather of b in forward (collective 9)" in text
    _, text = named(record(0, [*loop, *loop[:5]], waits=1), record(1, [*loop, *loop[:4]]))
    assert "the all-gather of b in backward (collective 12)" in text


def test_a_size_that_is_not_in_the_plan_names_no_unit():
    _, text = named(record(0, [*STEP, (GATHER, 100)], waits=1), record(1, STEP))
    assert text == "rank 1 never entered the all-gather of 100 B (collective 8), in which rank 0 waits"
    unordered = StepOrder(tuple(p._replace(phase="") for p in ORDER.collectives), in_order=False)
    _, text = named(record(0, STEP[:3], waits=1), record(1, STEP[:2]), order=unordered)
    assert "the all-gather of 96 B (collective 3)" in text, "b or c"
    _, text = named(record(0, STEP[:2], waits=1), record(1, STEP[:1]), order=unordered)
    assert "the all-gather of a (collective 2)" in text


def test_of_two_collectives_under_one_number_the_one_of_earlier_steps_is_right():
    """A loop of one's own has collectives that no plan knows, here of 4 bytes; rank 0 evaluates after a step."""
    step = [*STEP[1:6], (REDUCE, 4)]
    before = step + step[:-1]
    hang, text = named(record(0, [*before, (GATHER, 64)], waits=1), record(1, [*before, (REDUCE, 4)], waits=1))
    assert hang.kind == DIFFERENT and hang.missing == (0,) and hang.waiting == (1,)
    assert text == (
        "rank 0 never entered the all-reduce of 4 B (collective 12), in which rank 1 waits; "
        "it is in the all-gather of a in forward instead"
    )


def test_in_the_first_step_the_plan_tells_what_is_right_and_without_one_the_most_ranks():
    skipped = record(0, [*STEP[:1], (GATHER, 96)], waits=1)
    right = [record(rank, STEP[:2], waits=1) for rank in (1, 2)]
    for order in (ORDER, NO_ORDER):
        hang, _ = named(skipped, *right, order=order)
        assert hang.missing == (0,) and hang.waiting == (1, 2)
    assert named(skipped, right[0])[0].missing == (0,)


def test_a_rank_that_has_gone_on_is_not_said_to_be_where_its_stack_is():
    """Collectives of one size may pair wrongly, and come to an end."""
    frames = [Frame("/home/me/train.py", 9, "main")]
    gone_on = record(1, [*STEP, (REDUCE, 4), STEP[1]], waits=1)
    hang = find_hang({0: record(0, [*STEP, STEP[0], STEP[1]], waits=1), 1: gone_on}, ORDER.fit)
    words = hang_words(hang, ORDER, frames)
    assert words.endswith("; it had entered an all-reduce of 4 B instead, and is now in main (train.py, line 9)"), words


def test_ranks_that_use_two_groups_in_different_orders_wait_for_each_other():
    def waits(group, rank):
        return RankRecord(rank, (Entry(group, 1, REDUCE, 36, done=False),), groups={"3": (0, 1), "4": (0, 1)})

    hang, text = named(waits("3", 0), waits("4", 1))
    assert hang.kind == CROSSED and hang.rank is None
    assert text == (
        "rank 0 waits in the all-reduce of 36 B (collective 1 of process group 3) for rank 1, and rank 1 waits in the "
        "all-reduce of 36 B (collective 1 of process group 4): they use these process groups in different orders, or "
        "one of them makes a call that the other does not"
    )


def test_in_a_group_whose_ranks_nobody_knows_nobody_is_said_to_be_missing_and_nobody_to_be_there():
    alone = RankRecord(0, (Entry("3", 1, REDUCE, 36, done=False),))
    hang, text = named(alone, record(1, STEP))
    assert hang.kind == UNKNOWN_GROUP and text == (
        "rank 0 waits in the all-reduce of 36 B (collective 1 of process group 3), and which other ranks belong to "
        "that group is not known"
    )
    known = RankRecord(0, alone.entries, groups={"3": (0, 1)})
    assert named(known, record(1, STEP))[1].startswith("rank 1 never entered the all-reduce of 36 B (collective 1 of ")


def test_a_rank_that_has_ended_is_the_one_that_the_others_wait_for():
    hang, text = named(record(0, STEP, waits=1), record(1, STEP, waits=1), RankRecord(2, process=ENDED))
    assert hang.rank == 2
    assert text.startswith("rank 2 came to the end before the others; ranks 0 and 1 wait for it in the all-reduce of")


def departed(*records: RankRecord, crashed=(0, 1)):
    hang = find_departure({record.rank: record for record in records}, ORDER.fit, crashed)
    return hang and hang_words(hang, ORDER)


def test_of_ranks_that_gloo_has_ended_the_one_that_left_the_order_of_earlier_steps_is_named():
    left, stayed = [*STEP, *STEP, *STEP[:1], *STEP[2:4]], [*STEP, *STEP, *STEP[:2]]
    never = "rank 1 never entered the all-gather of a in forward (collective 16), in which rank 0 waits; it is in "
    assert departed(RankRecord(0), record(1, left)) == f"{never}an all-gather of 96 B instead"
    assert departed(record(0, stayed), RankRecord(1)) == f"{never}another collective instead"
    assert departed(record(0, stayed), record(1, left)) == f"{never}an all-gather of 96 B instead"
    assert departed(RankRecord(0), RankRecord(1)) is None is departed(record(0, stayed), record(1, stayed))
    assert departed(record(0, stayed), RankRecord(1), RankRecord(2)) is None, "2 was only stopped: is it 1, or 2?"


def test_ranks_that_wait_for_each_other_lead_to_the_one_that_waits_for_nobody():
    """Two groups of two, as replicas have: 0 waits for 1, which waits for 3."""
    waits = Entry("shard", 5, GATHER, 8, done=False)
    other = Entry("replicas", 2, REDUCE, 8, done=False)
    done = Entry("shard", 4, GATHER, 8, done=True), Entry("replicas", 1, REDUCE, 8, done=True)
    groups = {"shard": (0, 1), "replicas": (1, 3)}
    records = [
        RankRecord(0, (done[0], waits), groups=groups),
        RankRecord(1, (*done, other), groups=groups),
        RankRecord(3, done[1:], groups=groups),
    ]
    hang, text = named(*records)
    assert text == (
        "rank 3 never entered the all-reduce of 8 B (collective 2 of process group replicas), in which rank 1 waits"
    )


def test_a_stopped_rank_is_named_by_its_silence_and_all_in_one_collective_by_that():
    hang, text = named(record(0, STEP, waits=1), RankRecord(1, process="stopped"))
    assert hang.kind == STOPPED and hang.rank == 1
    assert text.startswith("the process of rank 1 is stopped (SIGSTOP); rank 0 waits for it in the all-reduce of loss")
    hang, text = named(record(0, STEP, waits=1), record(1, STEP, waits=1))
    assert hang.kind == NO_END and hang.rank is None and "all ranks have entered the all-reduce of loss" in text


@pytest.mark.parametrize(
    "records",
    [
        [record(0, STEP, waits=1), RankRecord(1)],
        [record(0, STEP), record(1, STEP)],
        [RankRecord(0), RankRecord(1)],
        [record(0, [], group="1"), record(1, STEP)],
    ],
)
def test_nobody_is_named_where_the_lists_do_not_tell(records):
    assert find_hang({each.rank: each for each in records}, ORDER.fit) is None


def test_many_ranks_are_told_in_few_words():
    assert ranks_words([3]) == "rank 3" and ranks_words([0, 2]) == "ranks 0 and 2"
    assert ranks_words(range(7)) == "ranks 0 to 6" and ranks_words([*range(9), 99]) == "10 ranks"


def test_a_plan_without_an_example_tells_of_each_unit_what_it_gathers_and_reduces():
    order = step_order(make_plan(tiny_flamingo(), world_size=2), TrainParams())
    assert not order.in_order and len(order.collectives) == 20
    of_units = {}
    for planned in order.collectives:
        of_units.setdefault(planned.what, []).append((planned.kind, planned.phase, planned.nbytes))
    assert of_units["perceiver"] == [(GATHER, "", 576), ("reduce-scatter", "backward", 576)]
    assert of_units["language_model.model.layers.0"] == [(GATHER, "", 17_120)], "frozen: nothing to reduce"
    assert "(root)" not in of_units, "has no parameters"


def test_a_plan_with_an_example_has_the_collectives_of_a_step_in_their_order():
    plan = make_plan(tiny_flamingo(), world_size=2, example=tiny_batch().inputs())
    order = step_order(plan, TrainParams())
    first, *collectives, last = order.collectives
    assert order.in_order and (first, last) == (
        Planned(REDUCE, COUNTS, "", 16),
        Planned(REDUCE, FIGURES, "", 32),
    )
    reduced = [planned.what for planned in collectives if planned.kind == "reduce-scatter"]
    trainable = [unit.name for unit in plan.sharded_units if unit.reduced_bytes]
    assert sorted(reduced) == sorted(trainable), "each unit once"
    gathered = [planned.what for planned in collectives if (planned.kind, planned.phase) == (GATHER, "forward")]
    assert sorted(gathered) == sorted(unit.name for unit in plan.sharded_units if unit.unsharded_bytes)
    phases = [planned.phase for planned in collectives]
    assert phases == sorted(phases, reverse=True), "forward, then backward"


STACK = """noise
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in run

Current thread 0x00007f (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/distributed/c10d.py", line 7 in all_reduce
  File "/home/me/data.py", line 41 in collate
  File "/x/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 3 in __next__
  File "/home/me/train.py", line 9 in main
"""


def test_a_crash_is_told_with_its_line():
    fatal = "Fatal Python error: Segmentation fault\n\n"
    assert crash(STACK) == "" and crash(f"{STACK}{fatal}{STACK}") == "Segmentation fault in collate (data.py, line 41)"
    assert crash(fatal) == "Segmentation fault"


def test_the_line_of_a_persons_own_code_is_found_in_the_newest_stack_of_the_main_thread():
    assert str(own_frame(main_stack(STACK.replace("collate", "older") + STACK))) == "collate (data.py, line 41)"
    assert main_stack("no stack") == [] and own_frame([]) is None
    waits = STACK.replace("/home/me/data.py", "/x/site-packages/torch/utils/data/dataloader.py")
    waits = waits.replace("collate", "_try_get_data")
    assert waits_for_workers(main_stack(waits)) and not waits_for_workers(main_stack(STACK))
    assert own_frame(main_stack(waits)).function == "main"


def test_a_persons_own_folder_may_be_called_mmfsdp():
    ours = f'  File "{Path(mmfsdp.__file__).parent}/core/step.py", line 3 in train_step\n'
    stack = STACK.replace('  File "/home/me/data.py"', f'{ours}  File "/home/me/mmfsdp/kit/data.py"')
    assert str(own_frame(main_stack(stack))) == "collate (data.py, line 41)"
    of_libraries = STACK.replace("/home/me/data.py", "/x/site-packages/z.py").replace("/home/me/train.py", "<frozen z>")
    ours_last = f"{of_libraries}{ours}"
    assert own_frame(main_stack(ours_last)).function == "train_step", "ours, where no frame is the person's"
    caller = f'  File "{Path(mmfsdp.__file__).parent}/kit/widgets/ranks_cell/ranks_worker.py", line 9 in _rank\n'
    theirs = '  File "/home/me/mmfsdp/kit/widgets/ranks_cell/ranks_worker.py", line 9 in _rank'
    assert short_stacks(f"{caller}{theirs}") == theirs


def test_the_package_is_known_where_a_link_leads_to_its_folder(tmp_path):
    """As a home folder on a cluster often is a link."""
    (tmp_path / "link").symlink_to(Path(mmfsdp.__file__).parent.parent)
    code = (
        "import mmfsdp; from mmfsdp.own import modules; "
        "print([modules.is_of_package(each.__file__) for each in (mmfsdp, modules)], mmfsdp.__file__)"
    )
    assert in_fresh_python(code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}/link"}).split() == [
        *("[True,", "True]", f"{tmp_path}/link/mmfsdp/__init__.py")
    ]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nccl:_all_gather_base", GATHER),
        ("nccl:_reduce_scatter_base", "reduce-scatter"),
        ("gloo:all_reduce", REDUCE),
        ("nccl:all_reduce_coalesced", REDUCE),
        ("nccl:barrier", "barrier"),
    ],
)
def test_collectives_have_one_name_in_all_backends(name, kind):
    assert kind_of(name) == kind


def row(number: int, **changes):
    values = {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number, "is_p2p": False}
    values |= {"profiling_name": "nccl:_all_gather_base", "state": "completed", "retired": False}
    sizes = {
        "input_sizes": [[4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[2, 4]],
        "output_dtypes": ["BFloat16"],
    }
    return values | sizes | changes


def test_a_list_is_read_without_what_is_no_collective_or_of_an_older_group():
    rows = [row(1, state="started"), row(9), row(1, pg_id=2), row(0, is_p2p=True), {"new": 1}]
    rows.append(row(2, pg_id=2, state="started"))
    config = {"0": {"ranks": "[0, 1]"}, "": {"ranks": "oops"}}
    made = parse(3, json.dumps({"entries": rows, "pg_config": config}).encode())
    assert made.entries == (Entry("0", 1, GATHER, 16, True), Entry("0", 2, GATHER, 16, False))
    assert made.groups == {"0": (0, 1)} and RankRecord.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    other_form = json.dumps({"entries": [3, *rows], "pg_config": [config]}).encode()
    assert parse(3, other_form).entries == made.entries, "a later torch may list more"
    for damaged in (b"[]", b"oops"):
        with pytest.raises(ValueError):
            parse(0, damaged)
    with pytest.raises(ValueError):
        RankRecord.from_dict({"rank": 1, "entries": [[1]], "process": "", "groups": {}})


def test_damaged_lists_and_records_are_refused_or_read():
    """They come from a socket and from a run folder: a hang is named, or it is not, but nothing fails."""
    answer = {"entries": [row(number) for number in range(1, 8)], "pg_config": {"0": {"ranks": "[0, 1]"}}}
    good, other = parse(0, json.dumps(answer).encode()), record(1, STEP[:3], waits=1)
    as_file = json.loads(json.dumps(good.to_dict()))
    for damaged_answer, damaged_file in zip(cases(answer, 400), cases(as_file, 400), strict=True):
        for read in (
            lambda answer=damaged_answer: parse(0, json.dumps(answer).encode()),
            lambda file=damaged_file: RankRecord.from_dict(file),
        ):
            try:
                records = {0: read(), 1: other}
            except ValueError:
                continue
            for find in (find_hang, find_departure):
                if hang := find(records, ORDER.fit):
                    text = hang_words(hang, ORDER)
                    assert len(text) < 1000 and "\x1b" not in text, text


def test_of_a_long_record_the_newest_entries_are_read():
    values = record(0, STEP).to_dict() | {"entries": [["0", number, GATHER, 8, True] for number in range(1, 5000)]}
    entries = RankRecord.from_dict(json.loads(json.dumps(values))).entries
    assert len(entries) == MAX_ENTRIES and entries[-1].number == 4999


@pytest.fixture
def place(monkeypatch):
    """A short path: one of pytest's is too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(rank_server.tempfile, "gettempdir", lambda: folder)
        yield Path(folder)


@pytest.fixture
def sockets(place):
    return socket_folder(KEY)


def test_a_rank_answers_what_it_has_entered(sockets, place):
    """Also while Python does nothing: the server is torch's, in C++."""
    assert sockets.parent == place and sockets.stat().st_mode & 0o777 == 0o700
    assert sockets == socket_folder(KEY) != socket_folder("another")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert serve(sockets, 0) and ranks_in(sockets) == [0]
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
        # those of groups that other tests had in this process are left out once this one has an entry
        newest = parse(0, *ask_lists(sockets, 0)).entries[-1]
        assert newest == Entry("0", newest.number, REDUCE, 24, True)
        with pytest.raises(LookupError):
            ask(sockets, 0, "nothing")
    finally:
        dist.destroy_process_group()


def test_a_rank_that_does_not_answer_and_one_that_is_not_there(sockets, monkeypatch):
    monkeypatch.setattr(rank_server, "ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(FileNotFoundError):
        ask_lists(sockets, 7)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(sockets / "rank1.sock"))
        with pytest.raises(ConnectionRefusedError):
            ask_lists(sockets, 1)
        silent.listen()
        with pytest.raises(TimeoutError):
            ask_lists(sockets, 1)


@pytest.mark.parametrize("what", ["open to others", "a link", "too long"])
def test_a_folder_that_cannot_hold_sockets_is_passed_over(what, sockets, place, monkeypatch):
    if what == "open to others":
        sockets.chmod(0o755)
    elif what == "a link":
        sockets.rmdir()
        sockets.symlink_to(place)
    else:
        monkeypatch.setattr(rank_server.tempfile, "gettempdir", lambda: str(place / ("d" * 90)))
        (place / ("d" * 90)).mkdir()
    other = socket_folder(KEY)
    assert other.parent == Path("/tmp") and other.stat().st_mode & 0o777 == 0o700, "the next place"
    other.rmdir()
