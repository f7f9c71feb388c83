"""The cockpit without a browser: the plan follows the choices, mistakes stand where they were made, runs are found."""

import json
import time
from dataclasses import replace
from pathlib import Path

import ipywidgets as w
import pytest

from mmfsdp import ParamError, Run, RunParams
from mmfsdp.kit.run.adopt import differences, find_same
from mmfsdp.kit.run.files.folder import MetricsWriter, write_json
from mmfsdp.kit.run.rank_count import available_cores, crowding
from mmfsdp.kit.run.start import free_name
from mmfsdp.kit.run.state import RankProgress
from mmfsdp.kit.run.watch import LogLine
from mmfsdp.kit.train.fit import fit
from mmfsdp.kit.widgets import starter
from mmfsdp.kit.widgets.charts import charts
from mmfsdp.kit.widgets.launch_buttons import AGAIN, DUPLICATE, LAUNCH, RESUME, STOP
from mmfsdp.kit.widgets.pictures.rank_grid import MAP_FROM, rank_grid
from mmfsdp.kit.widgets.run_list import COMPARE, CONFIRM, DELETE, OPEN
from mmfsdp.kit.widgets.share import batch_file, command
from mmfsdp.params import load
from mmfsdp.params.base import read_yaml
from mmfsdp.predict import MACHINES
from mmfsdp.widgets import Cockpit
from tests.run.test_runs import GONE, record
from tests.tiny import MODEL
from tests.widgets.test_panel import shown


@pytest.fixture
def small(tmp_path):
    """A cockpit of a model that is planned in no time."""
    path = tmp_path / "small.yaml"
    RunParams(model=MODEL).change(**{"launch.folder": str(tmp_path / "runs"), "launch.ranks": 2}).to_yaml(path)
    cockpit = Cockpit(str(path))
    yield cockpit
    cockpit.close()


def figures(cockpit):
    return cockpit.figures.value


def said(cockpit, name):
    """What stands below the input of a parameter."""
    (control,) = [control for control in cockpit.choices.controls if control.name == name]
    return control.words.value


def possible(cockpit):
    """The buttons that can be pressed."""
    return [name for name, button in cockpit.buttons.buttons.items() if not button.disabled]


def finished(folder, params, status="COMPLETED"):
    """The folder of a run of these parameters that has ended."""
    folder.mkdir(parents=True)
    params.to_yaml(folder / "params.yaml")
    record(**GONE).write(folder)
    write_json(folder / "status.json", {"status": status})
    MetricsWriter(folder).write({"step": 5, "loss": 1.0})


def test_the_plan_follows_the_choices_and_stands_beside_a_pinned_one(small):
    assert small.plan.backend == "FSDP2" and small.params.fsdp.frozen_policy == "SHARD"
    before = figures(small)
    assert "sent in a step" in before and "mm-more" not in before
    small.pin()
    small.choose(**{"fsdp.frozen_policy": "REPLICATE"})
    assert {str(unit.frozen_policy) for unit in small.plan.units if unit.kind == "frozen"} == {"REPLICATE"}
    small.planner.wait()
    assert "mm-less" in figures(small) and "mm-more" in figures(small)
    assert "Every rank holds it whole" in said(small, "fsdp.frozen_policy")
    small.choose(**{"fsdp.frozen_policy": "SHARD"})
    assert small.plan.backend and "mm-more" not in figures(small)
    small.pin(False)
    assert figures(small) == before


def test_the_four_ways_draw_differently(small):
    pictures = set()
    for changes in ({"fsdp.frozen_policy": way} for way in ("SHARD", "KEEP", "REPLICATE")):
        small.choose(**changes)
        assert small.plan
        pictures.add(small.pictures.value)
    small.choose(**{"fsdp.frozen_policy": "SHARD"})
    small.choose(**{"fsdp.backend": "DDP"})
    assert small.plan.backend == "DDP"
    pictures.add(small.pictures.value)
    assert len(pictures) == 4


def test_a_mistake_stands_where_it_was_made_and_beside_the_button_that_it_disables(small):
    with pytest.raises(ParamError, match="greater than or equal to 1"):
        small.choose(**{"train.steps": 0})
    assert "mm-error" in said(small, "train.steps") and "train.steps" in small.message.value
    assert small.buttons.buttons[LAUNCH].disabled
    small.choose(**{"train.steps": "1e3"})
    assert small.params.train.steps == 1000 and small.message.value == ""
    assert "mm-error" not in said(small, "train.steps") and not small.buttons.buttons[LAUNCH].disabled
    small.form.choose("fsdp.frozen_policy", "AUTO")
    assert small.choices.budget.layout.display is None
    small.choose(**{"fsdp.memory_budget_gib": 2})
    assert small.params.fsdp.frozen_policy == "AUTO" and small.form.error is None


def test_what_a_page_holds_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "NO_ANSWER_S", 1000.0)  # pictures in place of charts are for a page that has no charts
    folder = tmp_path / "long"
    folder.mkdir()
    load("tiny").to_yaml(folder / "params.yaml")
    metrics = MetricsWriter(folder)
    for step in range(1, 2001):
        metrics.write({"step": step, "time": float(step), "loss": 1.0, "grad_norm": 1.0, "memory_bytes": 1 << 20})
    before = set(w.widgets.widget._instances)
    cockpit = Cockpit(str(folder))
    cockpit.choices.data.wait()  # its pictures are drawn in a thread
    assert cockpit.plan and cockpit.form.rows == {}, "the inputs of a drawer that nobody has opened are not there"
    cockpit.panel.logs.add([LogLine(0, "x" * 300)] * 3000)
    cockpit.panel.logs.draw(refiltered=True)
    traits = {}
    for name in set(w.widgets.widget._instances) - before:
        widget = w.widgets.widget._instances[name]
        state = widget.get_state(drop_defaults=True) | {key: getattr(widget, key, "") for key in ("_esm", "_css")}
        traits[name] = len(json.dumps(state, default=str))
    pictures = len(cockpit.pictures.value)
    assert "x" * 300 in shown(cockpit) and sum(traits.values()) - pictures < 220_000 and pictures < 100_000
    assert len(traits) < 400
    rows_before = len(cockpit.form.rows)
    cockpit.all_choices.value = True
    assert len(cockpit.form.rows) > rows_before and "launch.ranks" in shown(cockpit.form)
    cockpit.close()


def test_only_the_newest_choice_is_planned_and_no_thread_stays(small):
    assert small.plan
    for size in range(10, 60):
        small.choose(**{"train.batch_size": size})
    assert small.plan and small.planner.planned.params == small.params and not small.planner.busy
    before = len(w.widgets.widget._instances)
    again = Cockpit(small.form.preset.value)
    assert again.plan
    again.close()
    again.form.show(again.params.change(**{"train.batch_size": 7}))
    assert not again.planner.busy, "what is closed plans no more"
    assert len(w.widgets.widget._instances) == before, "nothing is left of a closed cockpit"


def test_a_plan_that_cannot_be_made_says_why(small):
    assert small.plan
    small.form.show(small.params.change(**{"model.freeze": ["visoin_encoder.*"]}))
    with pytest.raises(ValueError, match="visoin"):
        _ = small.plan
    assert "visoin" in small.message.value
    small.form.show(small.params.change(**{"model.freeze": MODEL.freeze}))
    assert small.plan and small.message.value == ""


def test_a_launch_that_cannot_start_says_why_and_can_be_tried_again(small, tmp_path):
    (tmp_path / "file").write_text("")
    small.form.show(small.params.change(**{"launch.folder": str(tmp_path / "file")}))
    small.launch()
    with pytest.raises(ParamError, match="cannot hold runs"):
        small.wait()
    assert "cannot hold runs" in small.message.value and not small.buttons.buttons[LAUNCH].disabled


def test_a_run_of_the_same_choices_is_found_again(small, tmp_path):
    runs = tmp_path / "runs"
    finished(runs / small.params.launch.name, small.params)
    small.launch()
    assert small.wait().ok and small.run.path == runs / small.params.launch.name
    assert possible(small) == [AGAIN, DUPLICATE]
    small.choose(**{"train.steps": 50})
    assert possible(small) == [LAUNCH], "a run of these choices can be started, and that run has others"
    assert small.run.path.is_dir()


@pytest.mark.parametrize("status, buttons", [("FAILED", [RESUME, AGAIN, DUPLICATE]), ("COMPLETED", [AGAIN, DUPLICATE])])
def test_a_cockpit_of_a_run_shows_it_with_what_can_be_done(tmp_path, status, buttons):
    finished(tmp_path / "runs/one", RunParams(model=MODEL), status)
    cockpit = Cockpit(tmp_path / "runs/one")
    cockpit.wait()
    assert cockpit.params.model == MODEL and possible(cockpit) == buttons
    assert cockpit.buttons.buttons[LAUNCH].description == status.capitalize()
    cockpit.close()


def test_no_position_changes_its_meaning_and_a_running_run_cannot_be_launched_again(small, monkeypatch):
    """Five clicks on Launch start one run; the buttons keep their places."""
    launched = []

    def launch(prepared):
        launched.append(prepared.params)
        folder = Path(prepared.params.launch.folder) / prepared.params.launch.name
        finished(folder, prepared.params, "RUNNING")
        record().write(folder)
        return Run(folder)

    monkeypatch.setattr(starter, "launch", launch)
    places = [list(small.buttons.children), list(small.buttons.of_run.children)]
    button = small.buttons.buttons[LAUNCH]
    for _ in range(5):
        if not button.disabled:
            button.click()
        small.starter.wait_for_work()
    assert len(launched) == 1 and button.disabled and button.description == "Running"
    assert possible(small) == [STOP, DUPLICATE]
    assert [list(small.buttons.children), list(small.buttons.of_run.children)] == places
    small.choose(**{"train.steps": 50})
    assert possible(small) == [LAUNCH, STOP] and button.description == LAUNCH


def test_runs_are_listed_opened_compared_and_deleted(small, tmp_path):
    runs = tmp_path / "runs"
    finished(runs / "one", small.params.change(**{"launch.name": "one"}))
    finished(runs / "<b>two", small.params.change(**{"fsdp.frozen_policy": "KEEP", "train.lr": 0.5}), "FAILED")
    small.listing.value = True
    listed = small.run_list
    listed.wait_for_work()
    assert len(listed.runs.options) == 2 and "2 runs in" in listed.head.value
    lines = dict((path, line) for line, path in listed.runs.options)
    assert "FSDP2 KEEP" in lines[str(runs / "<b>two")] and "COMPLETED" in lines[str(runs / "one")]
    assert [name for name, button in listed.buttons.items() if not button.disabled] == [CONFIRM]
    listed.runs.value = [str(runs / "<b>two")]
    listed.press(OPEN)
    assert small.run.path == runs / "<b>two" and possible(small) == [LAUNCH, RESUME], "its choices are others"
    listed.runs.value = [str(runs / "one"), str(runs / "<b>two")]
    listed.press(COMPARE)
    html = shown(listed)
    assert "train.lr" in html and "fsdp.frozen_policy" in html and "<b>two" not in html
    listed.runs.value = [str(runs / "<b>two")]
    assert listed.buttons[CONFIRM].layout.visibility == "hidden"
    listed.press(DELETE)
    assert listed.buttons[CONFIRM].layout.visibility == "visible" and (runs / "<b>two").exists()
    listed.work("list", lambda: time.sleep(0.5))  # a list of many runs is being read: the press counts all the same
    listed.press(CONFIRM)
    listed.wait_for_work()
    assert not (runs / "<b>two").exists() and len(listed.runs.options) == 1 and small.run is None
    (runs / "linked").symlink_to(runs / "one")
    with pytest.raises(OSError, match="symbolic link"):
        Run(runs / "linked").delete()
    record().write(runs / "one")
    write_json(runs / "one/status.json", {"status": "RUNNING"})
    with pytest.raises(ParamError, match="cancel it before it is deleted"):
        Run(runs / "one").delete()


def test_other_choices_get_the_next_free_name_and_why_is_told(tmp_path):
    params = RunParams().change(**{"launch.folder": str(tmp_path), "launch.name": "a", "launch.ranks": 2})
    assert find_same(params) == (None, params, "")
    finished(tmp_path / "a", params)
    assert find_same(params).run.path == tmp_path / "a"
    assert find_same(params.change(**{"launch.replace": True})).run, "this makes no other run"
    other = params.change(**{"train.steps": 50})
    match = find_same(other)
    assert match.run is None and match.params.launch.name == "a-2"
    assert match.words == "the run a has other choices: train.steps 100, not 50. This one is a-2."
    finished(tmp_path / "a-2", other)
    assert find_same(other).run.path == tmp_path / "a-2" and free_name(tmp_path, "a") == "a-3"
    (tmp_path / "a-2/params.yaml").write_text("{")
    assert "cannot be read" in differences(Run(tmp_path / "a-2"), other)


def test_the_command_and_the_batch_file_make_the_same_run():
    params = load("tiny").change(**{"fsdp.frozen_policy": "KEEP", "train.lr": 1e-3, "model.freeze": ["a.*"]})
    words = command("tiny", params)
    assert words.startswith("mmfsdp run --config tiny ") and "--fsdp.frozen-policy KEEP" in words
    assert command("tiny", load("tiny")) == "mmfsdp run --config tiny"
    assert "#SBATCH" in batch_file(load("tiny"))
    assert read_yaml(params.to_yaml(), name="yaml")["train"]["lr"] == 1e-3


def test_many_ranks_on_few_cores_are_warned_of():
    many = RunParams().change(**{"launch.ranks": 64 * available_cores(), "train.device": "cpu"})
    assert "ranks would share" in crowding(many)
    assert crowding(many.change(**{"launch.ranks": 2})) == ""
    assert crowding(many.change(**{"launch.executor": "slurm", "launch.gpus_per_node": 0})) == ""


def test_from_many_ranks_on_a_map_shows_the_slow_and_names_the_odd():
    ranks = [RankProgress(rank, "running", step=3, tokens_per_s=100.0) for rank in range(MAP_FROM)]
    assert "mm-rank-map" not in rank_grid(ranks[1:])
    ranks[5] = replace(ranks[5], tokens_per_s=60.0)
    ranks[6] = replace(ranks[6], status="failed")
    html = rank_grid(ranks)
    assert html.count("<i ") == MAP_FROM and "slowest has 60% of the median" in html
    assert html.count("mm-rank-failed") == 2 and "✖ rank 6" in html, "in the map, and as a cell"
    assert len({part.split('"')[0] for part in html.split("background:")[1:]}) == 2
    unknown = rank_grid([replace(rank, tokens_per_s=None) for rank in ranks])
    assert "mm-rank-map" in unknown and "slowest" not in unknown, "nothing is said of what no rank has told"


def test_a_path_of_data_is_looked_at_when_it_is_typed(small, tmp_path):
    from PIL import Image

    folder = tmp_path / "mine"
    folder.mkdir()
    for number in range(30):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"<b>picture {number}")
    (folder / "0.png").write_bytes(b"no picture")
    data = small.choices.data
    data.wait()
    data.path.value = str(folder)
    data.wait()
    html = data.wait()
    assert "records train" in html and html.count("<img") == 3 and "&lt;b&gt;picture" in html and "<b>pic" not in html
    assert small.params.data.path == str(folder) and small.params.data.source == "folder"
    assert small.form.error is None
    assert "skipped, as far as they were read: 1; 0.png" in html
    data.path.value = str(tmp_path / "nowhere")
    data.wait()
    assert "mm-error" in data.wait() and small.params.data.path == str(folder)
    data.path.value = ""
    data.wait()
    assert small.params.data.source == "shapes" and small.params.data.path is None


def test_what_is_shown_is_escaped(small):
    hostile = "<script>alert(1)</script>"
    small.form.choose("launch.name", hostile)
    html = shown(small)
    assert "<script" not in html.replace("onclick", "") and json.dumps(hostile) not in html


def test_a_plan_that_does_not_fit_on_a_gpu_is_made_to_fit(small, monkeypatch):
    small.choose(**{"train.batch_size": 400})
    assert small.plan and small.choices.fit_button is None, "a laptop is no GPU"
    half = replace(
        MACHINES["h100-nvlink"], capacity=small.planner.planned.cost.peak_bytes / 2, context=0.0, fragmentation=0.0
    )
    monkeypatch.setitem(MACHINES, "h100-nvlink", half)
    small.choices.machine.value = "h100-nvlink"
    button = small.choices.fit_button
    assert "DOES NOT FIT" in shown(small.choices) and button.button.layout.display is None
    (answer,) = fit(small.params, half, "batch").answers
    button.press()
    button.wait_for_work()
    assert small.params.train.batch_size == answer.value < 400
    assert small.plan and "DOES NOT FIT" not in shown(small.choices)
    assert f"batch {answer.value}: the largest that fits" in shown(button) and button.button.layout.display == "none"
    small.choose(**{"train.batch_size": answer.further})
    assert small.plan and "DOES NOT FIT" in shown(small.choices)
    assert button.button.layout.display is None and "the largest that fits" not in shown(button)
    button.press()
    small.choose(**{"train.batch_size": 7})
    button.wait_for_work()
    assert small.params.train.batch_size == 7, "what was chosen meanwhile stays"
