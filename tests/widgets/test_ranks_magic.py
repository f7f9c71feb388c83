"""The cell magic `%%ranks` in a notebook that is not of the course."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mmfsdp.widgets import ranks_magic

pytestmark = pytest.mark.real

CELL = """
import of_the_notebook

sum_of_ranks = torch.tensor(rank + of_the_notebook.VALUE)
dist.all_reduce(sum_of_ranks)
save(total=sum_of_ranks)
print("rank", rank, "has", int(sum_of_ranks))
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_COURSE", str(tmp_path / "made"))
    (tmp_path / "of_the_notebook.py").write_text("VALUE = 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    ranks_magic._stop()  # one that another test started knows nothing of this path
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "mmfsdp.widgets.ranks_magic")
    yield shell
    ranks_magic._stop()


def test_a_cell_runs_on_ranks_that_import_what_the_notebook_does(shell, tmp_path):
    shell.run_cell_magic("ranks", "2 sums", CELL)
    assert [int(saved["total"]) for saved in ranks_magic.results("sums")] == [21, 21]
    assert "rank 1 has 21" in (tmp_path / "made/sums/1.log").read_text()
    for words in ("2", "9 sums", "two sums"):
        with pytest.raises(ValueError, match="wants a number from 1 to 8 and a name"):
            shell.run_cell_magic("ranks", words, CELL)


HANGING_CELL = """
if rank == 0:
    dist.all_reduce(torch.ones(5))
else:
    input_of_nobody = __import__("threading").Event().wait()
"""


def test_a_cell_that_hangs_says_who_is_missing_and_where(shell, tmp_path):
    shell.run_cell_magic("ranks", "2 hangs", HANGING_CELL)
    for rank in range(2):
        said = (tmp_path / f"made/hangs/{rank}.log").read_text()
        assert "[rank 1 never entered the all-reduce of 20 B (collective 1), in which rank 0 waits; it is in " in said
        assert "(cell.py, line " in said and said.endswith("[ended here, since nothing moved]\n")
