"""Own scores in the charts: a curve for each, whoever wrote the file."""

import json
import math

from mmfsdp.checkpoint.saving import remove_old
from mmfsdp.checkpoint.steps import MARKER, best_of, complete_checkpoints, mark_best
from mmfsdp.kit.run.files.folder import best_words
from mmfsdp.kit.run.sweep import Sweep
from mmfsdp.kit.run.trackers.track import numbers
from mmfsdp.kit.widgets.charts.chart_data import Columns
from mmfsdp.kit.widgets.charts.charts_page import charts_html


def test_each_score_has_a_curve(tmp_path):
    rows = [{"step": step, "loss": 1.0, "scores": {"vqa": step / 10, "length": 3}} for step in (2, 4)]
    rows.append({"step": 6, "scores": {"vqa": "high", "<b>bold</b>": 0.5, "length": math.inf}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(tmp_path)
    columns.read()
    values = columns.table(100)["values"]
    assert values["scores.vqa"] == [0.2, 0.4, None]
    assert values["scores.length"] == [3, 3, "nan"]
    html = charts_html([tmp_path])
    assert all(title in html for title in ("vqa: 0.2 at first, 0.4 now", "\\u003cb>bold", ">length<"))
    assert "<b>bold" not in html
    assert numbers(rows[1]) == {"loss": 1.0, "scores/vqa": 0.4, "scores/length": 3}


def test_damaged_scores_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "scores": [1]}\n{"step": 2, "scores": {"a": {}}}\n')
    columns = Columns(tmp_path)
    columns.read()
    assert columns.rows == 2 and not columns.columns
    assert best_words({"step": "1", "name": "a", "score": 1}) == best_words([]) == best_words({"step": 1}) == ""
    assert best_words({"step": 4, "name": "-loss", "score": 0.25}) == "loss 0.25 at step 4"


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    for step in range(1, 6):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / MARKER).touch()
    assert best_of(tmp_path) is None
    mark_best(tmp_path, {"step": 2, "name": "vqa", "score": 0.5})
    remove_old(tmp_path, 2)
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == [2, 4, 5]
    mark_best(tmp_path, {"step": 5, "name": "vqa", "score": 0.6})
    remove_old(tmp_path, 1)
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == [5]
    for damage in ("[]", "{", '{"step": 4, "name": "vqa", "score": 1}', '{"step": "5", "name": 1, "score": 1}'):
        (tmp_path / "best.json").write_text(damage)
        assert best_of(tmp_path) is None


def test_a_sweep_shows_the_best_scores_of_its_members(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"members": [{"train.lr": 0.1}, {"train.lr": 0.2}]}))
    assert " best " not in str(Sweep.open(tmp_path))
    (tmp_path / "001/checkpoints/step_00000004").mkdir(parents=True)
    (tmp_path / "001/checkpoints/step_00000004" / MARKER).touch()
    mark_best(tmp_path / "001/checkpoints", {"step": 4, "name": "vqa", "score": 0.5})
    head, first, second = str(Sweep.open(tmp_path)).splitlines()
    assert "best" in head and "vqa" not in first and "vqa 0.5 at step 4" in second
