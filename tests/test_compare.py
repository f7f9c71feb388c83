"""Runs compared: only what differs, the best marked, everything escaped; as a page, a table, a figure."""

import csv
import io
import shutil
from xml.etree import ElementTree

import pytest

from mmfsdp import RunParams, cli
from mmfsdp.report.comparison import COLUMNS, compare
from mmfsdp.runs import MetricsWriter, read_json, write_json
from mmfsdp.widgets import Compare
from tests.test_panel import shown
from tests.test_report import Page

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


def test_only_what_differs_is_told_and_the_best_is_marked(two):
    found = compare(two)
    assert found.names == ["first", HOSTILE]
    assert found.differing == {"fsdp.frozen_policy": ["SHARD", "REPLICATE"]}
    names = [column.name for column in COLUMNS]
    assert {(i, names[j]) for i, j in found.best} >= {(0, "loss in the last tenth"), (0, "new pictures right")}
    assert not any(names[j] == "steps" for _, j in found.best)
    rows = list(csv.reader(io.StringIO(found.csv())))
    assert float(rows[1][rows[0].index("loss in the last tenth")]) == pytest.approx((3 / 19 + 3 / 20) / 2)
    assert rows[0][:3] == ["run", "state", "fsdp.frozen_policy"] and rows[2][0] == HOSTILE
    assert float(rows[2][rows[0].index("MiB sent a step, measured")]) == 1
    drawn = found.svg()
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn and "<script" not in found.html() and "★" in found.html()


def test_of_ten_runs_none_looks_like_another_and_a_run_without_files_still_has_a_row(two, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/params.yaml").write_text("{")
    found = compare([two[0], tmp_path / "bare", *(shutil.copytree(two[1], tmp_path / f"r{i}") for i in range(8))])
    assert len(set(found.looks().values())) == 10
    assert found.figures[1][1:] == [None] * (len(COLUMNS) - 1)
    with pytest.raises(ValueError, match="is not a run"):
        compare([tmp_path])


def test_the_widget_picks_runs_and_saves_what_it_shows(two, tmp_path):
    view = Compare(tmp_path)
    assert view.found and sorted(view.found.names) == sorted(["first", HOSTILE])
    assert "REPLICATE" in shown(view) and "<script" not in shown(view)
    for button in (view._csv, view._svg):
        button.click()
    assert (tmp_path / "comparison.csv").read_text() == view.found.csv()
    ElementTree.parse(tmp_path / "comparison.svg")
    view._pick.value = ()
    assert view.found is None and view._csv.disabled and "choose runs" in shown(view)
    assert Compare([two[0]]).found.names == ["first"]
    with pytest.raises(ValueError, match="is not a run"):
        Compare([tmp_path / "none"])


def test_the_command_writes_one_page_for_one_run_and_one_for_several(two, capsys):
    assert cli.main(["report", str(two[0])]) == 0
    assert capsys.readouterr().out.strip() == str(two[0] / "report.html")
    assert cli.main(["report", *map(str, two)]) == 0
    page = Page((two[0].parent / "comparison.html").read_text())
    assert page.fetched == [] and page.open == []
    assert cli.main(["report", str(two[0]), str(two[0] / "none")]) == 2
    assert "is not a run" in capsys.readouterr().err
