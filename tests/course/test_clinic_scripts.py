"""The scripts of lesson 08 as they ship, and the magics that copy, edit and run them; test_hints.py runs the checks."""

import json
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist
from course import script
from course.script import changes_in, edit_script, number_and_tool, original, own_script, readable, recorder_table
from course.script_rank import verify

import mmfsdp

SCRIPTS = sorted(script.ORIGINALS.glob("[0-9][0-9]_*.py"))
STACK = f"""step 0  loss 4.1649
Stack (most recent call first):
  File "/v/lib/site-packages/torch/distributed/distributed_c10d.py", line 5170 in all_gather_single
  File "/v/lib/site-packages/torch/autograd/graph.py", line 1072 in _engine_run_backward
  File "/v/lib/site-packages/torch/_tensor.py", line 623 in backward
  File "/c/08.bug1/cell.py", line 79 in main
  File "/n/course/script_rank.py", line 43 in run
  File "/c/08.bug1/cell.py", line 94 in <module>
  File "{Path(mmfsdp.__file__).parent}/kit/widgets/ranks_cell/ranks_worker.py", line 131 in _rank
  File "<frozen runpy>", line 88 in _run_code

[rank 1 is in main (cell.py, line 79)]
[ended here, since nothing moved]
line 79: loss.backward()
RuntimeError: Connection closed by peer [127.0.0.1]:13749. GLHF!
"""
DETAIL = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=38, OpType=_ALLGATHER_BASE, TensorShape=[528], TensorDtypes=Float), but Rank "
    "1 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=ALLTOALL)."
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_names_its_command_and_fits_two_screens(path):
    text = path.read_text(encoding="utf-8")
    assert f"torchrun --nproc-per-node 2 {path.name}\n" in text
    assert text.endswith('dist.init_process_group("gloo")\n    main()\n    dist.destroy_process_group()\n')
    assert len(text.splitlines()) < 110


def test_there_are_twelve_scripts_and_each_has_its_number():
    assert [int(path.name[:2]) for path in SCRIPTS] == list(range(1, 13))
    with pytest.raises(ValueError, match="there is no script 13; there are 1, 2, 3"):
        original(13)


def test_a_learners_copy_is_made_once_and_kept():
    copy = own_script(1)
    assert copy.read_text() == original(1).read_text()
    copy.write_text("mine")
    assert own_script(1).read_text() == "mine"


def test_an_edit_replaces_lines_of_the_script_as_it_ships(capsys):
    diff = "-    wrap(model)\n+    wrap(model)  # here\n"
    edit_script("1", diff)
    edit_script("1", diff)
    assert own_script(1).read_text() == original(1).read_text().replace("wrap(model)\n", "wrap(model)  # here\n")
    assert "+    wrap(model)  # here" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has these lines 0 times"):
        edit_script("1", "-no such line\n+another\n")


def test_an_edit_may_have_several_places():
    assert changes_in("-a\n-b\n+c\n-d\n+e\n+f\n") == [("a\nb\n", "c\n"), ("d\n", "e\nf\n")]


@pytest.mark.parametrize("words", ["", "one", "1 gdb", "1 stacks detail"])
def test_other_words_are_refused_with_the_tools_that_there_are(words):
    with pytest.raises(ValueError, match=r"wants a number and perhaps a tool \(stacks, detail, recorder"):
        number_and_tool(words)


def test_a_stack_shows_the_collective_and_the_learners_own_lines():
    (text,) = readable(1, [STACK], "recorder")
    assert text.splitlines()[2:] == [
        '  File "/v/lib/site-packages/torch/distributed/distributed_c10d.py", line 5170 in all_gather_single',
        "  ... 2 more of torch ...",
        '  File "01_hangs_with_some_batches.py", line 79 in main',
        "",
        "[rank 1 is in main (01_hangs_with_some_batches.py, line 79)]",
        "[ended here, since nothing moved]",
    ], "the line that the tool appends is no line of the learner's, and what comes after the end is no error of theirs"


def test_which_rank_is_missing_is_said_beside_the_records_only():
    named = "step 0\n[1.0]\n[rank 1 never entered the all-gather]\n[ended here, since nothing moved]"
    assert readable(1, [named], "stacks") == ["step 0\n[1.0]\n[ended here, since nothing moved]"]
    assert readable(1, [named], "recorder") == [named]


def test_of_two_fingerprints_the_ranks_own_is_shown():
    shown = script.short_fingerprints(f"step 1\n{DETAIL}")
    assert shown == "step 1\nDETAIL: rank 0 is in collective 38: ALLGATHER_BASE, a tensor of [528]"


def test_the_recorders_table_marks_where_the_ranks_differ(tmp_path):
    kinds = ["gloo:all_gather", "gloo:all_gather"], ["gloo:all_gather", "gloo:barrier"]
    for rank, names in enumerate(kinds):
        entries = [
            {"collective_seq_id": i + 1, "profiling_name": name, "input_sizes": [[528]], "retired": i == 0}
            for i, name in enumerate(names)
        ]
        (tmp_path / f"records_{rank}.json").write_text(json.dumps(entries))
    same, different = recorder_table(tmp_path).splitlines()[1:3]
    assert "!" not in same and same.count("all_gather [528] (done)") == 2
    assert different.split()[:2] == ["2", "!"] and "barrier [528] (waits)" in different


def test_verify_says_which_check_is_wrong_and_leaves_the_reason_to_the_learner(capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify(runpy.run_path(str(original(2))))
    finally:
        dist.destroy_process_group()
    said = capsys.readouterr().out
    assert "wrong  evaluation\n" in said and "ok     optimizer: " in said
    assert "gathered" not in said and "Fix" not in said and "note " not in said
