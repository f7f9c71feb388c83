"""What is wrong with a run, from its folder alone: each trouble once, with the rank that it began with and the fix."""

import ast
import time
from pathlib import Path

import pytest
import torch
from torch._utils import ExceptionWrapper

import mmfsdp
from mmfsdp import RunParams
from mmfsdp.kit.cli import main
from mmfsdp.kit.run.error_kinds import kind_of
from mmfsdp.kit.run.files.folder import MetricsWriter, read_json, write_json
from mmfsdp.kit.run.files.reasons import (
    ADVICE,
    COLLECTIVES,
    DIFFERENT,
    DISK,
    GONE,
    MEMORY,
    RANK,
    SHORT,
    SILENCE,
    SKIPPED_STEPS,
    TIME_LIMIT,
    Reason,
)
from mmfsdp.kit.run.files.run_record import RunState, Status, because, write_status
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.run.state import read_ranks, run_state
from mmfsdp.kit.run.trouble import headline, is_ending, troubles
from mmfsdp.kit.run.watch import follow
from mmfsdp.kit.widgets.banner import banner, tracebacks
from mmfsdp.kit.widgets.report import report_html
from tests.run.test_runs import record

NAN = float("nan")
PACKAGE = Path(mmfsdp.__path__[0])
KILLED = "rank 1 died without a traceback: killed from outside, out of memory, or a crash"
AFTER_IT = "rank 0: RuntimeError: [gloo] Connection closed by peer"


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of two ranks that goes on as long as this process does."""
    (tmp_path / "logs").mkdir()
    RunParams().to_yaml(tmp_path / "params.yaml")
    record(steps=8).write(tmp_path)
    write_json(tmp_path / "status.json", {"status": "STARTING"})
    return tmp_path


def write_rows(folder, losses, *, rank=0, **more):
    """Steps with these losses; one that is not finite is skipped."""
    writer, skipped, in_a_row = MetricsWriter(folder, rank), 0, 0
    for step, loss in enumerate(losses, start=1):
        bad = loss != loss
        skipped, in_a_row = skipped + bad, (in_a_row + 1) * bad
        counts = {"skipped_steps": skipped, "skipped_in_a_row": in_a_row}
        writer.write({"step": step, "time": float(step), "loss": loss, "grad_norm": loss, **counts, **more})


def beat(folder, rank, activity, *, ago=0.0):
    """A report of a rank, so many seconds ago."""
    Heartbeat(folder, rank)(activity)
    (folder / f"logs/rank{rank}.beat").write_text(f"{activity:<120} {time.time() - ago}\n")


def report_failure(folder, rank, error, *, at, kind=""):
    """A rank's own report of its failure."""
    values = {
        "rank": rank,
        "state": "failed",
        "error": error,
        "traceback": f"lines of {rank}",
        "time": at,
        "kind": kind,
    }
    write_json(folder / f"logs/rank{rank}.json", values)


def of(folder):
    return troubles(folder, run_state(folder))


def test_a_run_that_goes_well_has_no_trouble(folder):
    assert of(folder) == []
    write_rows(folder, [3.0, 2.0, 1.0])
    beat(folder, 0, "step 4 compute")
    beat(folder, 1, "step 4 compute")
    assert of(folder) == []
    for status in (Status.COMPLETED, Status.CANCELLED):
        write_status(folder, because(status, "cancelled by somebody"))
        assert of(folder) == [] and "cancelled by somebody" in headline(run_state(folder), [])


@pytest.mark.parametrize(
    "losses, more, text, fix",
    [
        ([2.0, NAN, NAN], {}, "2 of 3 steps skipped: loss not finite since step 2", "lower train.lr"),
        ([2.0, 2.0, NAN], {}, "1 of 3 steps skipped: loss not finite in step 3", "lower train.lr"),
        ([NAN, NAN, NAN], {}, "no step was ever finite", "in the data and in the weights"),
        ([2.0, NAN, NAN], {"loss_scale": 1.0}, "2 of 3 steps skipped", "bf16 rather than fp16"),
        ([2.0, NAN, 2.0], {}, "1 of 3 steps skipped", "lower train.lr"),
    ],
)
def test_steps_that_are_not_finite_are_told_with_the_likely_cause(folder, losses, more, text, fix):
    write_rows(folder, losses, **more)
    (trouble,) = of(folder)
    assert text in trouble.message and fix in trouble.fix and trouble.rank is None
    assert trouble.code == ("not finite" if losses[-1] != losses[-1] else "skipped")
    write_status(folder, RunState(Status.COMPLETED))
    state = run_state(folder)
    assert [each.code for each in troubles(folder, state)] == [trouble.code]
    assert state.ok == (trouble.code == "skipped")


def test_fp16_skips_steps_to_find_its_loss_scale(folder):
    write_rows(folder, [NAN, NAN, 2.0], loss_scale=1024.0)
    assert of(folder) == []


def test_a_killed_rank_is_told_once(folder):
    """The banner, the headline, the tracebacks and the report together."""
    report_failure(folder, 0, AFTER_IT.removeprefix("rank 0: "), at=2.0)
    state = because(
        Status.FAILED, KILLED, kind=MEMORY, others=(Reason(AFTER_IT, rank=0),), rank=1, traceback="last words"
    )
    assert state.reason == f"{KILLED}; {ADVICE[MEMORY].words}; then {AFTER_IT}"
    write_status(folder, state)
    (trouble,) = of(folder)
    assert trouble.code == "failed" and trouble.rank == 1 and trouble.message == KILLED
    assert trouble.fix == f"{ADVICE[MEMORY].words}; then resume"
    state = run_state(folder)
    lines = [*map(str, follow(folder)), headline(state, [trouble])]
    for shown in ("\n".join(lines), report_html(folder)):
        assert shown.count("died without a traceback") == 1, shown
        assert shown.count("to need less memory") == 1


def test_the_rank_that_failed_first_stands_first_and_is_marked(folder):
    from mmfsdp.kit.widgets.panel import rank_grid

    report_failure(folder, 0, "RuntimeError: Connection closed by peer", at=9.0)
    report_failure(folder, 1, "ValueError: the cause", at=8.0)
    found, ranks = of(folder), read_ranks(folder, 2, run_state(folder))
    assert found[0].rank == 1 and found[0].message == "rank 1: ValueError: the cause", (
        "though the supervisor says nothing"
    )
    html = tracebacks(ranks, found)
    assert html.index("rank 1 failed first") < html.index("then rank 0: RuntimeError") and "the cause" not in html
    assert html.count("<details open>") == 1
    assert "rank 1</b> failed first" in rank_grid(ranks, found) and rank_grid(ranks, found).count("first") == 1


def test_a_run_that_ends_says_no_time_that_is_left(folder):
    state = run_state(folder)
    assert not is_ending(state, of(folder))
    (folder / "cancel").touch()
    assert is_ending(run_state(folder), [])
    report_failure(folder, 1, "ValueError: the cause", at=8.0)
    assert is_ending(state, of(folder))


def test_a_stall_names_the_rank_that_the_others_wait_for(folder):
    for rank in (0, 1):
        write_rows(folder, [3.0, 2.0], rank=rank, step_s=0.5)
    beat(folder, 0, "step 3 compute", ago=3600)
    beat(folder, 1, "step 3 data", ago=3601)
    (trouble,) = of(folder)
    assert trouble.code == "stalled" and trouble.rank == 1 and is_ending(run_state(folder), [trouble])
    assert trouble.message == "rank 1 has reported nothing for 1 h, in step 3 data; the other ranks wait for it"
    beat(folder, 1, "step 3 compute")
    assert of(folder) == [], "as long as one goes on"


@pytest.mark.parametrize("status", [Status.QUEUED, Status.PREPARING, Status.SUSPENDED])
def test_a_run_that_waits_does_not_stall(folder, status):
    """Its ranks have reported something in an earlier life, such as before a preemption."""
    for rank in (0, 1):
        beat(folder, rank, "step 3 compute", ago=3600)
    state = RunState(status)
    assert troubles(folder, state) == [] and {rank.status for rank in read_ranks(folder, 2, state)} == {"waiting"}


@pytest.mark.parametrize("activity", ["importing", "joining", "building", "opening the data", "wrapping: a.weight"])
def test_a_start_that_takes_a_minute_is_normal_work(folder, activity):
    for rank in (0, 1):
        beat(folder, rank, activity, ago=70)
    assert of(folder) == []
    for rank in (0, 1):
        beat(folder, rank, activity, ago=20 * 60)
    assert [trouble.code for trouble in of(folder)] == ["stalled"]


OWN_TEXTS = (
    "my parser crashed on row 3",
    "the sample was never entered into the table",
    "NCCL error is not the cause",
    "row 3 differs; then rank 4 of the table follows",
    "its processes are gone from the picture",
    "DistNetworkError is what my test expects",
    "No space left on device is a caption",
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
    "Connection closed by peer, says my client",
    "op.preamble.length <= op.nbytes. 12 vs 8",
    "insufficient shared memory (shm) in the text of a page",
    "train.max_skipped is a field that I read",
    "no rank reaches the end; was ended by a library in different orders and it does not end",
    "no sign of life; its launch was interrupted; can its node see this? before it started",
)
HANGS = "rank 1 does not answer (in step 4 data): it hangs; the limit is 4 s"


@pytest.mark.parametrize(
    "state, fix",
    [
        (
            because(Status.FAILED, "the time limit was reached", kind=TIME_LIMIT),
            "raise launch.timeout_min",
        ),
        (because(Status.FAILED, HANGS, kind=SILENCE, rank=1), ADVICE[SILENCE].fix),
        (because(Status.FAILED, "rank 0: ValueError: a; b", rank=0), ADVICE[RANK].fix),
        (because(Status.LOST, "its processes are gone without a result: killed", kind=GONE), ADVICE[GONE].fix),
        (
            because(Status.FAILED, "rank 0: MemoryError", kind=MEMORY, rank=0, others=(Reason("rank 1: x"),)),
            ADVICE[MEMORY].fix,
        ),
        (because(Status.FAILED, "what the job printed last; then rank 1 left"), ""),
    ],
)
def test_the_cause_and_the_fix_of_a_state_outlive_its_file(folder, state, fix):
    write_status(folder, state)
    (trouble,) = of(folder)
    assert (trouble.message, trouble.fix, trouble.rank) == (state.why.text, fix, state.rank)


def decided(folder, why):
    """All that is decided by a reason, without a word of it."""
    write_status(folder, RunState(Status.FAILED, why))
    state = run_state(folder)
    found = troubles(folder, state)
    return [(each.code, each.rank, each.fix) for each in found], is_ending(state, found), headline(state, found)


@pytest.mark.parametrize("kind", ["", *ADVICE])
def test_a_sentence_can_be_changed_without_a_change_of_what_is_decided(folder, kind):
    """Whoever improves the words of a reason breaks nothing: what is decided is decided by its kind."""
    write_rows(folder, [2.0, NAN, NAN])
    sentences = {"the loss is not finite", "being cancelled", *OWN_TEXTS, *(advice.words for advice in ADVICE.values())}
    by_kind = decided(folder, Reason("x", kind, rank=1))
    for sentence in sentences - {""}:
        assert decided(folder, Reason(sentence, kind, rank=1, others=(Reason(sentence),))) == by_kind, sentence
    kinds = [each for each, _, _ in by_kind[0]]
    assert kinds == (["failed"] if kind == SKIPPED_STEPS else ["failed", "not finite"]), "that kind says it already"


WORDS = ("reason", "why", "text", "message", "cause", "traceback")
"""Attributes that hold words for people."""
SEARCHES = "startswith endswith removeprefix partition rpartition split find search match fullmatch findall".split()


def searched(tree):
    """Yield each expression that looks for something in words for people."""
    for node in ast.walk(tree):
        places = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            places = [node.func.value, *node.args]
        elif isinstance(node, ast.Compare) and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            places = node.comparators
        if any(isinstance(place, ast.Attribute) and place.attr in WORDS for place in places):
            yield ast.unparse(node)


def test_no_words_for_people_are_searched():
    assert list(searched(ast.parse("'not finite' in trouble.text or state.reason.startswith('x')"))), "it finds them"
    for room in ("run", "hangs", "check", "widgets", "cli"):
        paths = list((PACKAGE / "kit" / room).rglob("*.py"))
        assert paths
        for path in paths:
            assert not list(searched(ast.parse(path.read_text()))), path


def test_a_reason_is_read_as_it_was_written(folder):
    others = (Reason("rank 1: OSError: x", DISK, rank=1), Reason("rank 2 left", rank=2, fix="look at it"))
    why = Reason("rank 0 died", MEMORY, "buy more", 0, others)
    write_status(folder, RunState(Status.FAILED, why))
    assert run_state(folder).why == why
    assert read_json(folder / "status.json")["reason"] == run_state(folder).reason
    assert run_state(folder).reason == "rank 0 died; buy more; then rank 1: OSError: x; then rank 2 left"


GLOO = (
    "rank 0 was ended by a library (in step 3 compute): [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/"
    "transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 52 vs 4. Received data size doesn't match. GLHF! 🏖️"
)


def test_the_sentence_of_a_state_has_rank_place_and_fix_before_the_words_of_libraries(folder):
    cause = "rank 1 never entered the all-reduce of 4 B (collective 7), in which rank 0 waits"
    why = Reason(cause, DIFFERENT, rank=1, others=(Reason(GLOO, COLLECTIVES, rank=0), Reason(f"🏖️ {GLOO}")))
    for reason, first in (
        (why, cause),
        (Reason(GLOO, COLLECTIVES, rank=0), "rank 0 was ended by a library (in step 3"),
    ):
        sentence = str(reason)
        assert sentence.startswith(first) and ADVICE[reason.kind].words in sentence and "🏖" not in sentence
        assert len(sentence) < 1.1 * (len(cause) + len(ADVICE[reason.kind].words) + 2 * SHORT)
    assert str(why).index(ADVICE[DIFFERENT].words) < str(why).index("; then rank 0 was ended by a library (in step 3")
    write_status(folder, RunState(Status.FAILED, Reason(GLOO, COLLECTIVES, rank=0)))
    (trouble,) = of(folder)
    assert trouble.message == GLOO, "all of it"
    own = Reason("rank 1: ValueError: " + "my own words " * 40, rank=1)
    assert str(own) == own.text, "a person's own words are all there"


def test_a_status_of_an_earlier_version_is_shown_as_it_is(folder):
    write_json(folder / "status.json", {"status": "FAILED", "reason": "rank 1: OSError: x; then rank 0: y", "rank": 1})
    (trouble,) = of(folder)
    assert (trouble.message, trouble.fix) == ("rank 1: OSError: x; then rank 0: y", ADVICE[RANK].fix)


ADVICE_WORDS = ("C or C++", "silence_s", "mmfsdp check", "disk", "memory", "train.lr", "rank only", "administrators")


def raise_own(text, error_type):
    raise error_type(text)


@pytest.mark.parametrize("text", OWN_TEXTS)
def test_the_text_of_a_persons_exception_is_neither_searched_nor_cut(folder, text):
    """Whatever type it has, also from a data worker, whose exception PyTorch raises again in the rank."""
    for error_type in (RuntimeError, ValueError, OSError, ConnectionError):
        with pytest.raises(error_type) as raised:
            raise_own(text, error_type)
        assert kind_of(raised.value) == ""
    with pytest.raises(RuntimeError) as raised:
        try:
            raise_own(text, RuntimeError)
        except RuntimeError:
            wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
        wrapped.reraise()
    assert text in str(raised.value) and kind_of(raised.value) == ""
    report_failure(folder, 1, f"RuntimeError: {text}", at=1.0, kind=kind_of(raised.value))
    (trouble,) = of(folder)
    assert (trouble.message, trouble.fix, trouble.rank) == (f"rank 1: RuntimeError: {text}", ADVICE[RANK].fix, 1)
    assert run_state(folder).reason in ("", trouble.message)
    write_status(folder, because(Status.FAILED, "rank 0 died", others=(Reason(trouble.message),), rank=0))
    (trouble,) = of(folder)
    assert trouble.message == "rank 0 died" and not any(word in trouble.fix for word in ADVICE_WORDS)


def too_much_memory():
    torch.empty(1 << 60)


def full_disk():
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def lost_network():
    raise torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error")


def out_of_gpu_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def wraps_a_cause():
    try:
        full_disk()
    except OSError as error:
        raise RuntimeError("rank 1 could not write") from error


KINDS = {
    too_much_memory: "memory",
    lambda: bytearray(1 << 60): "memory",
    out_of_gpu_memory: "memory",
    full_disk: "disk",
    wraps_a_cause: "disk",
    lost_network: "site",
}


@pytest.mark.parametrize("function", KINDS)
def test_an_error_of_a_library_is_known_by_its_type_and_by_what_raised_it(function):
    with pytest.raises(Exception) as raised:
        function()
    assert kind_of(raised.value) == KINDS[function]


def test_a_hostile_error_reaches_no_page_as_html(folder):
    report_failure(folder, 1, "<script>alert(1)</script>\x1b[2J", at=1.0)
    found = of(folder)
    assert "&lt;script" in banner(found) and "<script" not in banner(found) and "\x1b" not in banner(found)


def test_the_command_says_the_state_the_part_and_each_trouble_once(folder, capsys):
    write_rows(folder, [2.0, NAN, NAN])
    for rank in (0, 1):
        beat(folder, rank, "step 4 compute")
    assert main(["status", str(folder)]) == 0, "it goes on"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder.name}: RUNNING, step 3 of 8" and "step 4 compute" in lines[1]
    assert [line for line in lines if line.startswith("trouble: ")] == lines[-1:] and "lower train.lr" in lines[-1]
    write_status(folder, RunState(Status.COMPLETED))
    assert main(["status", str(folder)]) == 1
    assert capsys.readouterr().out.count("not finite") == 1
