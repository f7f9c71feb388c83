"""Runs compared: only what differs, everything escaped; in a notebook and as a page."""

import html
import re
import shutil

import pytest

from mmfsdp import RunParams, cli
from mmfsdp.run.folder import MetricsWriter, read_json, write_json
from mmfsdp.widgets import show_comparison
from mmfsdp.widgets.compare import comparison
from tests.run.test_runs import GONE, record
from tests.widgets.test_charts import asked
from tests.widgets.test_report import Page

HOSTILE = "<script>alert(1)<"


@pytest.fixture
def two(finished_run):
    """A finished run and one that learned less, with another policy and a hostile name."""
    other = shutil.copytree(finished_run, finished_run.with_name(HOSTILE))
    RunParams().change(**{"fsdp.frozen_policy": "REPLICATE", "train.steps": 20, "launch.name": "b"}).to_yaml(
        other / "params.yaml"
    )
    write_json(other / "result.json", read_json(other / "result.json") | {"heldout_exact_match": 0.5})
    (other / "metrics.jsonl").unlink()
    for step in range(1, 21):
        row = {"step": step, "loss": 4.0 / step, "samples_per_s": 90.0, "wire_bytes": 2**20}
        MetricsWriter(other).write(row | {"memory_bytes": 3 * 2**20})
    return finished_run, other


def row_of(page, name):
    """The cells of a row of the table."""
    row = re.search(f"<tr><td>{re.escape(name)}</td>(.*?)</tr>", page)
    return re.findall("<td>(.*?)</td>", row[1]) if row else None


def test_only_what_differs_is_shown(two):
    page = comparison(two)
    assert row_of(page, "fsdp.frozen_policy") == ["SHARD", "REPLICATE"] and row_of(page, "train.steps") is None
    assert row_of(page, "loss")[1] == f"{(4 / 19 + 4 / 20) / 2:,.4g}"
    assert row_of(page, "new pictures right")[1] == "0.5"
    assert row_of(page, "MiB sent in a step")[1].endswith("1")
    assert "<script" not in page and html.escape(HOSTILE) in page
    Page(page)
    shown = show_comparison(two)
    assert shown.children[0].value.endswith(page)
    assert [len(table["step"]) for table in asked(shown.children[1])["tables"]] == [20, 20]


def test_a_run_whose_loss_is_not_finite_stands_last_and_has_no_loss(two):
    record(**GONE).write(two[0])
    write_json(two[0] / "status.json", {"status": "COMPLETED"})
    MetricsWriter(two[0]).write({"step": 21, "loss": float("nan"), "skipped_steps": 1, "skipped_in_a_row": 1})
    page = comparison(two)
    assert row_of(page, "loss") == [f"{(4 / 19 + 4 / 20) / 2:,.4g}", "not finite"]
    assert row_of(page, "fsdp.frozen_policy") == ["REPLICATE", "SHARD"]


def test_runs_without_files_have_a_column_and_other_folders_are_refused(two, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/params.yaml").write_text("{")
    page = comparison([two[0], tmp_path / "bare"])
    assert row_of(page, "loss")[1] == "–"
    with pytest.raises(ValueError, match="is not a run"):
        comparison([tmp_path])


def test_the_command_writes_one_page_for_several(two, capsys):
    assert cli.main(["report", *map(str, two)]) == 0
    page = Page((two[0].parent / "comparison.html").read_text())
    assert page.fetched == [] and page.open == []
    assert cli.main(["report", str(two[0]), str(two[0] / "none")]) == 2
    assert "is not a run" in capsys.readouterr().err
