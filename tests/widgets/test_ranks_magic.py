"""The cell magic `%%ranks` in a notebook that is not of the course."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mmfsdp.kit.hangs.stacks import short_stacks
from mmfsdp.kit.widgets.ranks_cell import ranks_magic
from tests.tracebacks import shows_package

pytestmark = pytest.mark.real

CELL = """
import of_the_notebook

sum_of_ranks = torch.tensor(rank + of_the_notebook.VALUE)
dist.all_reduce(sum_of_ranks)
save(total=sum_of_ranks)
print("rank", rank, "has", int(sum_of_ranks))
"""


OF_THE_NOTEBOOK = """
VALUE = 10


def half(x):
    return x / None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a notebook, and of what its cells leave, in `made`."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def shell(folder):
    (folder / "of_the_notebook.py").write_text(OF_THE_NOTEBOOK)
    ranks_magic.stop_servers()  # one that another test started knows nothing of this path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_COURSE", str(folder / "made"))
        patch.syspath_prepend(folder)
        shell = InteractiveShell()
        shell.run_line_magic("load_ext", "mmfsdp.kit.widgets.ranks_cell.ranks_magic")
        yield shell
    ranks_magic.stop_servers()


def texts_of(folder, name):
    """Return what is shown of each rank of a cell."""
    return [short_stacks((folder / f"made/{name}/{rank}.log").read_text()).strip() for rank in range(2)]


def test_a_cell_runs_on_ranks_that_import_what_the_notebook_does(shell, folder):
    shell.run_cell_magic("ranks", "2 sums", CELL)
    assert [int(saved["total"]) for saved in ranks_magic.results("sums")] == [21, 21]
    assert "rank 1 has 21" in (folder / "made/sums/1.log").read_text()
    for words in ("2", "9 sums", "two sums"):
        with pytest.raises(ValueError, match="wants a number from 1 to 8 and a name"):
            shell.run_cell_magic("ranks", words, CELL)


HANGING_CELL = """
if rank == 0:
    dist.all_reduce(torch.ones(5))
else:
    input_of_nobody = __import__("threading").Event().wait()
"""


def test_a_cell_that_hangs_says_who_is_missing_and_where(shell, folder):
    shell.run_cell_magic("ranks", "2 hangs", HANGING_CELL)
    for said in texts_of(folder, "hangs"):
        assert "[rank 1 never entered the all-reduce of 20 B (collective 1), in which rank 0 waits; it is in " in said
        assert "(cell.py, line " in said and said.endswith("[ended here, since nothing moved]")
        assert 'cell.py", line ' in said and not shows_package(said) and "runpy" not in said, "no frames of ours"


RECEIVING_CELL = """
if rank == 0:
    HOW
"""


@pytest.mark.parametrize("how", ["dist.recv(torch.ones(1), src=1)", "dist.irecv(torch.ones(1), src=1).wait()"])
def test_a_cell_that_receives_what_nobody_sends_hangs_though_no_list_of_collectives_has_it(shell, folder, how):
    shell.run_cell_magic("ranks", "2 receives", RECEIVING_CELL.replace("HOW", how))
    assert all(said.endswith("[ended here, since nothing moved]") for said in texts_of(folder, "receives"))


SLEEPING_CELL = """
import time

dist.all_reduce(torch.ones(5))
if rank == 0:
    end = time.process_time() + 1
    while time.process_time() < end:
        pass
    dist.destroy_process_group()
else:
    time.sleep(7)
    save(woke=True)
    dist.destroy_process_group()
"""


def test_ranks_that_wait_in_no_collective_have_not_deadlocked(shell, folder):
    """Rank 1 sleeps, which nobody waits for, and rank 0 takes its CPU seconds with it when it ends."""
    shell.run_cell_magic("ranks", "2 sleeps", SLEEPING_CELL)
    assert texts_of(folder, "sleeps") == ["", ""] and ranks_magic.results("sleeps")[1] == {"woke": True}


FAILING_CELL = """
import of_the_notebook
from mmfsdp import make_plan

if rank == 1 or BOTH:
    WHAT(torch.ones(2))
dist.all_reduce(torch.ones(2))
"""
THEIR_LINES = "line 6: of_the_notebook.half(torch.ones(2))\nof_the_notebook.py, line 6: return x / None\nTypeError: "


def test_a_cell_that_fails_shows_the_persons_lines_on_the_first_rank_and_a_line_of_the_other(shell, folder):
    one = FAILING_CELL.replace("BOTH", "False").replace("WHAT", "of_the_notebook.half")
    shell.run_cell_magic("ranks", "2 one_fails", one)
    other, first = texts_of(folder, "one_fails")
    assert first.startswith(THEIR_LINES) and len(first.splitlines()) == 3
    assert (
        other.startswith("[failed after rank 1, with RuntimeError: ")
        or other == "[ended here, since rank 1 had failed]"
    )
    assert len(other.splitlines()) == 1

    both = FAILING_CELL.replace("BOTH", "True").replace("WHAT", "of_the_notebook.half")
    shell.run_cell_magic("ranks", "2 both_fail", both)
    texts = sorted(texts_of(folder, "both_fail"))
    assert texts[0].startswith("[failed with the same error as rank ") and len(texts[0].splitlines()) == 1
    assert texts[1].startswith(THEIR_LINES)

    ours = FAILING_CELL.replace("BOTH", "False").replace("WHAT", "make_plan")
    shell.run_cell_magic("ranks", "2 ours_fails", ours)
    lines = texts_of(folder, "ours_fails")[1].splitlines()
    assert lines[0] == "line 6: make_plan(torch.ones(2))"
    assert not any(line.startswith(("line", "mmfsdp")) or ".py, line" in line for line in lines[1:]), lines

    late = "import time, of_the_notebook\nif rank == 1:\n    time.sleep(0.2)\n    of_the_notebook.half(torch.ones(2))\n"
    shell.run_cell_magic("ranks", "2 fails_late", late)
    other, first = texts_of(folder, "fails_late")
    assert first.splitlines()[0] == "line 4: of_the_notebook.half(torch.ones(2))", "the other rank has ended"
    assert other.startswith(("[failed after rank 1, with RuntimeError: ", "[ended here, since rank 1 had failed]"))

    killed = FAILING_CELL.replace("BOTH", "False").replace("WHAT(torch.ones(2))", "__import__('os')._exit(3)")
    shell.run_cell_magic("ranks", "2 killed", killed)
    other, first = texts_of(folder, "killed")
    assert "ended without an error of Python" in first
    assert other.startswith(("[failed after rank 1, with RuntimeError: ", "[ended here, since rank 1 had failed]"))
