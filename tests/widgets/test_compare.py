"""Runs compared: only what differs, everything escaped; in a notebook and as a page."""

import html
import re
import shutil

import pytest

from mmfsdp import RunParams
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import MetricsWriter, read_json, write_json
from mmfsdp.kit.train.prepare import preview
from mmfsdp.kit.widgets.charts.charts_page import run_names
from mmfsdp.kit.widgets.compare import comparison
from mmfsdp.kit.widgets.compare_pair import pair_html
from mmfsdp.widgets import show_comparison
from tests.run.test_runs import GONE, record
from tests.tiny import MODEL
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


def column_of(page, name):
    """The cells of a column of the table, from the top."""
    head = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<th scope.*?</th>", page)]
    if name not in head:
        return None
    rows = re.findall("<tr>(<td.*?)</tr>", page)
    return [re.findall("<td.*?>(.*?)</td>", row)[head.index(name)] for row in rows]


def test_results_and_what_differs_are_shown_the_best_run_first(two):
    page = comparison(two)
    assert column_of(page, "fsdp.frozen_policy") == ["SHARD", "REPLICATE"] and column_of(page, "train.steps") is None
    assert column_of(page, "new pictures right") == ["93.0%", "50.0%"]
    assert column_of(page, "loss")[1] == f"{(4 / 19 + 4 / 20) / 2:.4g}"
    assert column_of(page, "sent a step")[1] == "1 MiB" and column_of(page, "peak memory") == ["–", "3 MiB"]
    head = re.findall(r"<th scope.*?>(.*?)</th>", page)
    assert head.index("state") < head.index("loss") < head.index("fsdp.frozen_policy"), "results first"
    assert "<script" not in page and html.escape(HOSTILE) in page
    Page(page)
    assert comparison(two[::-1]) == page, "by what they reached, not as they were named"


def test_runs_are_named_by_their_paths_from_the_folder_that_they_share(two, tmp_path, monkeypatch):
    page = comparison(two)
    for run, name in zip(two, column_of(page, "run"), strict=True):
        path = html.escape(str(run))
        assert name.endswith(f" {html.escape(run.name)}") and f'title="{path}" data-path="{path}"' in page
    assert run_names(["/runs/rates/0", "/runs/tiny/", "/runs/x/../rates/1"]) == ["rates/0", "tiny", "rates/1"]
    assert run_names(["/runs/tiny"]) == ["tiny"] and run_names([]) == []
    monkeypatch.chdir(tmp_path)
    assert run_names(["runs/tiny", "/data/other/tiny"]) == ["runs/tiny", "/data/other/tiny"]
    shown = show_comparison(two)
    assert [button.description for button in shown.open_buttons] == [run.name for run in two]
    shown.filter.value = str(tmp_path)
    assert column_of(shown.table.value, "run") == [], "as on the page, the words that are shown are searched"
    shown.close()


def test_a_loss_of_zero_is_the_least(two):
    for run, loss in zip(two, (0.0, 1.0), strict=True):
        (run / "result.json").unlink()
        (run / "metrics.jsonl").write_text("")
        MetricsWriter(run).write({"step": 1, "loss": loss})
    assert column_of(comparison(two[::-1]), "loss") == ["0", "1"]


def test_in_a_notebook_the_table_sorts_and_filters_and_a_click_opens_a_run(two):
    record(**GONE).write(two[0])
    shown = show_comparison(two)
    assert column_of(shown.table.value, "fsdp.frozen_policy") == ["SHARD", "REPLICATE"]
    shown.sort_by.value = "new pictures right"
    assert column_of(shown.table.value, "fsdp.frozen_policy") == ["REPLICATE", "SHARD"]
    shown.descending.value = True
    assert column_of(shown.table.value, "fsdp.frozen_policy") == ["SHARD", "REPLICATE"]
    shown.sort_by.value, shown.descending.value = "peak memory", True
    assert column_of(shown.table.value, "peak memory") == ["3 MiB", "–"], "what is not known stands last"
    shown.filter.value = "replicate 3 mib"
    assert column_of(shown.table.value, "fsdp.frozen_policy") == ["REPLICATE"]
    shown.filter.value = "<nothing>"
    assert column_of(shown.table.value, "fsdp.frozen_policy") == []
    assert [len(table["step"]) for table in asked(shown.charts)["tables"]] == [20, 20]
    assert shown.panel is None
    shown.open_buttons[0].click()
    assert shown.panel.run.path == two[0]
    shown.close()


def test_a_run_whose_loss_is_not_finite_stands_last_and_has_no_loss(two):
    record(**GONE).write(two[0])
    write_json(two[0] / "status.json", {"status": "COMPLETED"})
    MetricsWriter(two[0]).write({"step": 21, "loss": float("nan"), "skipped_steps": 1, "skipped_in_a_row": 1})
    page = comparison(two)
    assert column_of(page, "loss") == [f"{(4 / 19 + 4 / 20) / 2:.4g}", "not finite"]
    assert column_of(page, "fsdp.frozen_policy") == ["REPLICATE", "SHARD"]


def test_runs_without_files_have_a_row_and_other_folders_are_refused(two, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/params.yaml").write_text("{")
    page = comparison([tmp_path / "bare", two[0]])
    assert column_of(page, "loss")[1] == "–"
    with pytest.raises(ValueError, match="is not a run"):
        comparison([tmp_path])


def test_the_command_writes_one_page_for_several(two, capsys):
    assert cli.main(["report", *map(str, two)]) == 0
    page = (two[0].parent / "comparison.html").read_text()
    parsed = Page(page.replace("<input", "<br"))
    assert parsed.fetched == [] and parsed.open == [] and len(page) < 400_000
    assert cli.main(["report", str(two[0]), str(two[0] / "none")]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_two_runs_are_compared_by_what_differs_uncut_and_by_what_each_costs(two):
    first, second = two
    for folder, policy in ((first, "SHARD"), (second, "REPLICATE")):
        params = RunParams(model=MODEL).change(**{"fsdp.frozen_policy": policy, "launch.ranks": 2})
        params.to_yaml(folder / "params.yaml")
        plan, cost = preview(params)
        write_json(folder / "plan.json", {"plan": plan.to_dict(), "estimate": cost.to_dict()})
    html = pair_html(first, second)
    assert html.index("fsdp.frozen_policy") < html.index("sent a step") < html.index("seconds a step")
    assert html.count("<svg") == 4 and HOSTILE not in html
    pictures = html.split("<h4>")[1:]
    axes = [re.findall(r'text-anchor="end"[^>]*>([\d.]+)</text>', picture)[-3:] for picture in pictures]
    assert axes[0] == axes[1], "both steps are drawn on one scale"
    (first / "plan.json").write_text("{")
    assert pair_html(first, second).count("<svg") == 2, "a damaged plan has no picture"
