"""Widgets without a browser: the form says what the models of the parameters say, the plan follows."""

import ipywidgets as w
import pytest

from mmfsdp import ParamError, RunParams
from mmfsdp.kit.run.state import runs_table
from mmfsdp.kit.widgets.fields import FieldRow, field_names
from mmfsdp.kit.widgets.form import MAIN, WARMUP
from mmfsdp.kit.widgets.markup import error_note
from mmfsdp.kit.widgets.plan_thread import Planner
from mmfsdp.kit.widgets.report import write_report
from mmfsdp.kit.widgets.starter import Starter
from mmfsdp.params import load
from mmfsdp.params.launching import SLURM_FIELDS
from mmfsdp.widgets import RunForm, RunPanel
from tests.tiny import MODEL
from tests.widgets.test_panel import shown


@pytest.fixture
def small(tmp_path):
    """A form of a model that is planned in no time."""
    path = tmp_path / "small.yaml"
    RunParams(model=MODEL).to_yaml(path)
    return RunForm(str(path))


def choose(form, name, typed):
    """What a person does: type or pick something in a row."""
    form.reveal(name).choose(typed)


def said(form, name):
    """What is beside a field."""
    return form.rows[name].children[1].value


def everything(widget):
    return [widget, *(w for child in getattr(widget, "children", ()) for w in everything(child))]


def test_the_form_offers_the_profiles_of_the_class_and_takes_any_other(tmp_path, monkeypatch):
    (tmp_path / "course.yaml").write_text("partition: gpu\n")
    monkeypatch.setenv("MMFSDP_CLUSTERS", str(tmp_path))
    changes = []
    row = FieldRow("launch.cluster", RunParams(), changed=lambda: changes.append(row.value))
    assert row.input.options[0] == "course" and "single_node_8gpu" in row.input.options
    row.input.value = "course"
    row.input.value = "/shared/other.yaml"
    row.input.value = ""
    assert changes == ["course", "/shared/other.yaml", None]
    monkeypatch.setenv("MMFSDP_CLUSTERS", str(tmp_path / "none"))
    assert FieldRow("launch.cluster", RunParams(), changed=lambda: None).input.options == ()


@pytest.mark.parametrize("preset", ["tiny", "llava_7b"])
def test_every_field_becomes_an_input_that_holds_its_value_and_its_help(preset):
    params = load(preset)
    for name in field_names():
        row = FieldRow(name, params, changed=lambda: None)
        assert params.change(**{name: row.value}) == params
        assert row.children[0].tooltip == row.help != "" and row.children[0].description and row.children[1].value


def test_all_fields_are_in_the_form_those_of_beginners_in_sight(small):
    assert tuple(small.rows) == tuple(sorted(MAIN, key=list(small.rows).index)) and set(small.rows) == set(MAIN)
    for name in field_names():
        small.reveal(name)
    assert set(small.rows) == set(field_names())


def test_a_choice_changes_the_parameters_and_its_meaning_is_shown(small):
    seen = []
    small.observe(lambda change: seen.append(change.new), "params")
    choose(small, "fsdp.frozen_policy", "REPLICATE")
    choose(small, "train.steps", 7777)
    assert [str(p.fsdp.frozen_policy) for p in seen] == ["REPLICATE", "REPLICATE"] and seen[-1].train.steps == 7777
    assert "Every rank holds it whole" in said(small, "fsdp.frozen_policy")
    assert small.params.model == MODEL, "what the form does not show is kept"


def test_a_mistake_is_named_beside_its_field_and_goes_when_it_is_mended(small):
    before = small.params
    choose(small, "train.steps", 0)
    assert "mm-error" in said(small, "train.steps") and "equal to 1" in said(small, "train.steps")
    assert isinstance(small.error, ParamError) and small.params == before
    choose(small, "train.steps", 50)
    assert small.error is None and "mm-error" not in shown(small)
    choose(small, "model.vision.config", "{a: [")
    assert "is not YAML" in said(small, "model.vision.config")


@pytest.mark.parametrize("typed, steps", [("1e3", 1000), ("1_000", 1000), ("1,000", 1000), (" 12 ", 12)])
def test_a_whole_number_is_read_as_people_write_it(small, typed, steps):
    choose(small, "train.steps", typed)
    assert small.params.train.steps == steps and small.error is None


@pytest.mark.parametrize("typed", ["1.5", "1e9x", "", "nan", "inf"])
def test_what_is_no_whole_number_is_a_mistake(small, typed):
    choose(small, "train.steps", typed)
    assert "integer" in said(small, "train.steps") and small.error


def test_the_warm_up_follows_the_steps_until_it_is_set(small):
    assert (small.params.train.steps, small.params.train.warmup_steps) == (100, 10)
    choose(small, "train.steps", 7)
    assert small.params.train.warmup_steps == 1
    choose(small, "train.steps", 200)
    assert small.params.train.warmup_steps == 20, "the share of the preset, whatever was between"
    choose(small, WARMUP, 5)
    choose(small, "train.steps", 100)
    assert small.params.train.warmup_steps == 5
    choose(small, "train.steps", 2)
    assert small.error and "is more than steps" in said(small, WARMUP)
    assert RunForm("tiny", **{"train.steps": 40}).params.train.warmup_steps == 2
    assert RunForm("tiny", **{"train.steps": 40, WARMUP: 7}).params.train.warmup_steps == 7


TYPED = {
    "train.eval_every": ("20", 20),
    "train.keep_best": ("-heldout_loss", "-heldout_loss"),
    "train.patience": ("3", 3),
    "train.min_delta": (0.001, 0.001),
    "train.ema": ("0.99", 0.99),
    "train.optimizer": ("muon", "muon"),
    "train.freeze_from": (
        "40: [language_model.*]\n20: ['vision_encoder.*']",
        {20: ("vision_encoder.*",), 40: ("language_model.*",)},
    ),
    "train.start_from": ("runs/first", "runs/first"),
    "train.start_adapters": ("merge", "merge"),
}
"""What a person types for early stop, an average, another freeze and a new stage, and the value."""


def test_early_stop_average_unfreezing_and_a_new_stage_are_typed_into_the_form(small):
    for name, (typed, value) in TYPED.items():
        choose(small, name, typed)
        section, _, field = name.partition(".")
        assert small.error is None, small.error
        assert getattr(getattr(small.params, section), field) == value
        assert "mm-error" not in said(small, name)
    assert RunParams.from_dict(small.params.to_dict()) == small.params


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("train.patience", "3", "needs the score that it watches; set keep_best"),
        ("train.min_delta", 0.1, "has no effect without patience"),
        ("train.ema", "1", "should be less than 1"),
        ("train.freeze_from", "{100: ['*']}", "the run ends after step 100"),
        ("train.freeze_from", "{soon: ['*']}", "should be a valid integer"),
        ("train.freeze_from", "20", "should be a valid dictionary"),
        ("train.start_adapters", "merge", "merge has no effect without start_from"),
    ],
)
def test_a_mistake_in_these_fields_is_named_beside_the_field(small, name, typed, message):
    before = small.params
    choose(small, name, typed)
    assert small.params == before and "mm-error" in said(small, name)
    assert message in said(small, name)


def test_every_parameter_is_found_by_its_name_or_its_words(small):
    small.search.value = "accumulation"
    assert small.sheet.layout.display == "none"
    names = [row.name for row in small.found.children[1:]]
    assert "train.accumulation" in names and len(names) < 10
    small.search.value = "fsdp.reshard"
    small.search.value = ""
    assert small.sheet.layout.display is None and small.found.layout.display == "none"
    assert all(f'<code class="mm-name">{name}</code>' in said(small, name) for name in names)


def test_a_mistake_in_a_folded_field_unfolds_it(tmp_path):
    form = RunForm("tiny")
    form.show(form.params.change(**{"fsdp.sharding_strategy": "HYBRID_SHARD", "fsdp.dp_shard": 2}))
    assert "fsdp.dp_replicate" not in form.rows
    form.show(form.params.change(**{"fsdp.dp_replicate": 1}))
    choose(form, "launch.ranks", "3")
    assert "makes 2 ranks" in said(form, "fsdp.dp_replicate") and form.error


def test_what_cannot_be_chosen_is_off_with_the_reason_the_checks_give():
    form = RunForm("tiny")
    budget = form.rows["fsdp.memory_budget_gib"].children[0]
    assert budget.disabled and "unless frozen_policy is AUTO" in said(form, "fsdp.memory_budget_gib")
    choose(form, "fsdp.frozen_policy", "AUTO")
    assert not budget.disabled and "needs a budget" in said(form, "fsdp.memory_budget_gib")
    choose(form, "fsdp.memory_budget_gib", "2")
    assert form.error is None and form.params.fsdp.memory_budget_gib == 2
    choose(form, "fsdp.frozen_policy", "KEEP")
    assert form.error is None and form.params.fsdp.memory_budget_gib is None and budget.disabled
    choose(form, "fsdp.backend", "FSDP1")
    assert "AUTO not now: cannot be honored by FSDP1" in said(form, "fsdp.frozen_policy")
    choose(form, "fsdp.frozen_policy", "AUTO")
    assert form.error and "FSDP2" in said(form, "fsdp.frozen_policy")
    choose(form, "fsdp.frozen_policy", "KEEP")
    assert form.error is None
    for name in ("data.max_length", "train.warmup_steps", "model.num_latents", "data.weight", "launch.timeout_min"):
        assert not form.reveal(name).children[0].disabled
    for name in SLURM_FIELDS:
        assert form.reveal(f"launch.{name}").children[0].disabled and "slurm" in said(form, f"launch.{name}")
    choose(form, "launch.executor", "slurm")
    assert not any(form.reveal(f"launch.{name}").children[0].disabled for name in SLURM_FIELDS)


def test_presets_files_and_folders_of_runs_fill_the_form(tmp_path):
    form = RunForm("clip_llama_1b", **{"launch.folder": "<b>runs"})
    preset = next(x for x in everything(form) if isinstance(x, w.Dropdown) and x.description == "preset")
    preset.value = "openflamingo_9b"
    assert form.params.launch.ranks == 8 and form.rows["launch.ranks"].value == 8
    assert form.params.launch.folder == "<b>runs"
    (tmp_path / "params.yaml").write_text("train: {steps: 3, warmup_steps: 1}")
    form = RunForm(str(tmp_path))
    assert form.params.train.steps == 3
    (tmp_path / "params.yaml").write_text("train: {stpes: 3}")
    with pytest.raises(ParamError, match="did you mean steps"):
        RunForm(str(tmp_path))


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A folder with a reader, a callback, and a file that leaves a trace where it is imported."""

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rows.py").write_text(
        "from PIL import Image\n"
        "def read(size=40):\n    return [{'image': Image.new('RGB', (8, 9)), 'text': f'<b>{i}'} for i in range(size)]\n"
        "def fail():\n    raise ValueError('<script>alert(1)</script>')\n"
    )
    (tmp_path / "my_log.py").write_text("class Log:\n    def on_save(self, step): ...\n")
    (tmp_path / "traced.py").write_text("open('imported', 'w').close()\ndef build(): ...\ndef read(): ...\n")
    return tmp_path


def test_own_code_is_run_by_its_button_which_shows_what_is_there(small, own_code):
    choose(small, "data.reader", "my_rows:read")
    choose(small, "train.callbacks", "my_log:Log")
    row = small.reveal("data.reader")
    assert str(small.params.data.source) == "own"
    assert "my_rows" not in __import__("sys").modules, "imported before the button was pressed"
    row.try_now()
    words = row.wait()
    assert "my_rows:read: 39 rows to train on, 1 held out; first: user: &lt;image&gt; assistant: &lt;b&gt;" in words
    assert "pictures of 8 x 9 pixels" in words
    choose(small, "data.reader", "{call: my_rows:read, size: 3}")
    assert row.found.value == ""
    row.try_now()
    assert "2 rows to train on, 1 held out" in row.wait()
    log = small.reveal("train.callbacks")
    log.try_now()
    assert "my_log:Log: on_save" in log.wait()
    choose(small, "data.source", "shapes")
    data = small.params.data
    assert (str(data.source), data.reader, small.error) == ("shapes", None, None), "another source replaces the reader"


def test_an_error_of_own_code_is_shown_with_its_lines_escaped(small, own_code):
    choose(small, "data.reader", "my_rows:fail")
    row = small.reveal("data.reader")
    row.try_now()
    html = row.wait()
    assert "data.reader: &#x27;my_rows:fail&#x27; raised ValueError: &lt;script&gt;" in html
    assert "my_rows.py&quot;, line 5, in fail" in html
    assert "<script>" not in html
    starter = Starter(small, show=lambda: None)
    starter.start(small.params)
    with pytest.raises(ParamError, match="raised ValueError") as raised:
        starter.wait()
    shown_error = error_note(raised.value)
    assert "line 5, in fail" in shown_error and "<script>" not in shown_error


def test_what_a_handed_over_folder_names_is_not_imported_to_show_it(own_code, finished_run, tmp_path):
    """Neither by the form and its plan, nor by a panel, a report and a list of runs."""
    own = {"data.reader": "traced:read", "train.callbacks": ["traced:read"]}
    folder = finished_run
    RunParams(model=MODEL).change(**own).to_yaml(folder / "params.yaml")
    (folder / "code").mkdir()
    (folder / "code/traced.py").write_text((tmp_path / "traced.py").read_text())
    (folder / "status.json").write_text('{"status": "COMPLETED"}')
    RunPanel(folder).wait(600)
    write_report(folder)
    assert runs_table({"theirs": folder})
    form = RunForm(str(folder))
    for name in own:
        form.reveal(name)
    planner = Planner(form, show=lambda: None)
    planner.request(form.params)
    planner.wait()
    assert not (tmp_path / "imported").exists()

    for name in ("train.optimizer", "model.build"):
        path = tmp_path / "theirs.yaml"
        RunParams().change(**{name: "traced:build"}).to_yaml(path)
        form = RunForm(str(path))
        planner = Planner(form, show=lambda: None)
        form.observe(lambda _, form=form, planner=planner: planner.request(form.params), "allowed")
        planner.request(form.params)
        with pytest.raises(ParamError, match="'traced:build' comes from a file; it is not run before you press Try"):
            planner.wait()
        assert "press Try" in said(form, name)
        assert not (tmp_path / "imported").exists()
    row = form.reveal("model.build")
    row.try_now()
    assert "model.build: traced:build returned a NoneType" in row.wait()
    assert (tmp_path / "imported").exists()
    with pytest.raises(ParamError, match="returned a NoneType"):
        planner.wait()  # it plans again, since the person has let the code run
