"""Widgets without a browser: the form says what the dataclasses say, the plan follows."""

import html

import ipywidgets as w
import pytest

from mmfsdp import ParamError, RunParams
from mmfsdp.launch import sbatch_text
from mmfsdp.params import BackboneParams, ModelParams, load
from mmfsdp.params.launch import SLURM_FIELDS
from mmfsdp.widgets import Launcher, PlanView, RunForm
from mmfsdp.widgets.fields import Field, Row, at, names
from mmfsdp.widgets.form import MAIN

HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b[0m"
SMALL = ModelParams(
    vision=BackboneParams(
        source="open_clip",
        config={
            "embed_dim": 32,
            "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
            "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
        },
    ),
    language=BackboneParams(
        config={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
        | {"n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    ),
    num_latents=4,
    perceiver_depth=1,
    attention_heads=2,
    attention_head_dim=16,
)


@pytest.fixture
def small(tmp_path):
    """A form of a model that is planned in no time."""
    path = tmp_path / "small.yaml"
    RunParams(model=SMALL).to_yaml(path)
    return RunForm(str(path))


def choose(form, name, typed):
    """What a person does: type or pick something in a row."""
    form.reveal(name).children[0].value = typed


def said(form, name):
    """What is beside a field."""
    return form.rows[name].children[1].value


def texts(widget):
    """All HTML below a widget, style sheets apart."""
    own = [widget.value] if isinstance(widget, w.HTML) and "<style>" not in widget.value else []
    return own + [text for child in getattr(widget, "children", ()) for text in texts(child)]


def press(widget, label):
    buttons = [b for b in everything(widget) if isinstance(b, w.Button) and b.description == label]
    assert len(buttons) == 1
    buttons[0].click()


def everything(widget):
    return [widget, *(w for child in getattr(widget, "children", ()) for w in everything(child))]


@pytest.mark.parametrize("preset", ["tiny", "llava_7b"])
def test_every_field_becomes_an_input_that_holds_its_value_and_its_help(preset):
    params = load(preset)
    for name in names():
        field = Field.named(name)
        row = Row(field, at(params, name), changed=lambda name: None)
        row.say(None)
        assert params.change(**{name: row.value}) == params
        assert row.children[0].tooltip == field.help and row.children[0].description and row.children[1].value


def test_all_fields_are_in_the_form_those_of_beginners_in_sight(small):
    assert tuple(small.rows) == tuple(sorted(MAIN, key=list(small.rows).index)) and set(small.rows) == set(MAIN)
    for name in names():
        small.reveal(name)
    assert set(small.rows) == set(names())


def test_a_choice_changes_the_parameters_and_its_meaning_is_shown(small):
    seen = []
    small.observe(lambda change: seen.append(change.new), "params")
    choose(small, "fsdp.frozen_policy", "REPLICATE")
    choose(small, "train.steps", 7777)
    assert [str(p.fsdp.frozen_policy) for p in seen] == ["REPLICATE", "REPLICATE"] and seen[-1].train.steps == 7777
    assert "Every rank holds it whole" in said(small, "fsdp.frozen_policy")
    assert small.params.model == SMALL, "what the form does not show is kept"
    assert "frozen_policy SHARD → <b>REPLICATE</b>" in texts(small)[-1]


def test_a_mistake_is_named_beside_its_field_and_goes_when_it_is_mended(small):
    before = small.params
    choose(small, "train.steps", 0)
    assert "mm-error" in said(small, "train.steps") and "at least 1" in said(small, "train.steps")
    assert isinstance(small.error, ParamError) and small.params == before
    choose(small, "train.steps", 50)
    assert small.error is None and "mm-error" not in "".join(texts(small))
    choose(small, "model.vision.config", "{a: [")
    assert "is not YAML" in said(small, "model.vision.config")


def test_a_mistake_in_a_folded_field_unfolds_it(tmp_path):
    form = RunForm("tiny")
    form.show(form.params.change(**{"fsdp.sharding_strategy": "HYBRID_SHARD", "fsdp.dp_shard": 2}))
    assert "fsdp.dp_replicate" not in form.rows
    form.show(form.params.change(**{"fsdp.dp_replicate": 1}))
    choose(form, "launch.ranks", 3)
    assert "makes 2 ranks" in said(form, "fsdp.dp_replicate") and form.error


def test_what_cannot_be_chosen_is_off_with_the_reason_the_checks_give():
    form = RunForm("tiny")
    policy, budget = form.rows["fsdp.frozen_policy"], form.rows["fsdp.memory_budget_gib"].children[0]
    assert budget.disabled and "unless frozen_policy is AUTO" in said(form, "fsdp.memory_budget_gib")
    choose(form, "fsdp.frozen_policy", "AUTO")
    assert not budget.disabled and "needs a budget" in said(form, "fsdp.memory_budget_gib")
    choose(form, "fsdp.memory_budget_gib", "2")
    assert form.error is None and form.params.fsdp.memory_budget_gib == 2
    choose(form, "fsdp.frozen_policy", "KEEP")
    assert form.params.fsdp.memory_budget_gib is None and budget.disabled
    assert "memory_budget_gib is unset" in texts(form)[-1], "what has no effect any more goes, and that is said"
    choose(form, "fsdp.backend", "FSDP1")
    assert "AUTO" not in policy.children[0].options and "needs backend FSDP2, not FSDP1" in policy.children[1].value
    assert policy.value == "KEEP"
    choose(form, "fsdp.backend", "FSDP2")
    assert "AUTO" in policy.children[0].options
    for name in ("data.max_length", "train.warmup_steps", "model.num_latents", "data.weight", "launch.timeout_min"):
        assert not form.reveal(name).children[0].disabled
    assert "above 0 to 0.15" in said(form, "data.unseen_fraction") if form.reveal("data.unseen_fraction") else None
    for name in SLURM_FIELDS:
        assert form.reveal(f"launch.{name}").children[0].disabled and "Slurm" in said(form, f"launch.{name}")
    choose(form, "launch.executor", "slurm")
    assert not any(form.reveal(f"launch.{name}").children[0].disabled for name in SLURM_FIELDS)


def test_yaml_and_command_line_say_what_the_form_says_and_the_other_way_round(small):
    form = RunForm("tiny")
    choose(form, "train.steps", 60)
    line = form.text("Command line").area
    assert line.value == "mmfsdp run --config tiny --train.steps 60"
    line.value = "mmfsdp run --config small --fsdp.frozen-policy KEEP --launch.name été"
    assert form.params == load("small").change(**{"fsdp.frozen_policy": "KEEP", "launch.name": "été"})
    assert form.rows["fsdp.frozen_policy"].value == "KEEP"
    yaml = form.text("YAML").area
    assert yaml.value == form.params.to_yaml()
    yaml.value = "# mine\n" + yaml.value.replace("KEEP", "REPLICATE")
    assert form.rows["fsdp.frozen_policy"].value == "REPLICATE" and yaml.value.startswith("# mine")
    assert form.text("Command line").area.value.endswith("--fsdp.frozen-policy REPLICATE --launch.name 'été'")
    choose(form, "fsdp.frozen_policy", "SHARD")
    assert not form.text("YAML").area.value.startswith("#"), "written anew once it says something else"


@pytest.mark.parametrize(
    "label, text, words",
    [
        ("YAML", "train: [", "is not YAML"),
        ("YAML", "- " * 5000, "is not YAML"),
        ("YAML", "train: {stpes: 1}", "did you mean steps?"),
        ("YAML", "train: {steps: <script>}", "not a whole number"),
        ("YAML", "model: {vision: {name: x, config: &a {b: *a}}}", "Circular"),
        ("YAML", "just words", "not a mapping"),
        ("Command line", "mmfsdp run --config nope", "neither a file nor a preset"),
        ("Command line", 'mmfsdp run "', "close the quote"),
        ("Command line", "rm -rf /", "begin it with mmfsdp"),
        ("Batch file", "", "differs: beside #SBATCH lines"),
    ],
)
def test_a_wrong_text_stays_with_its_error_and_changes_nothing(label, text, words):
    form = RunForm("tiny", **{"launch.executor": "slurm", "launch.gpus_per_node": 0})
    before, tab = form.params, form.text(label)
    tab.area.value = text
    assert words in html.unescape(tab.children[-1].value) and "<script>" not in tab.children[-1].value
    assert form.error is not None and form.params == before
    assert form.text("YAML") and form.text(label).area.value == text, "a look at another tab loses nothing"
    choose(form, "train.steps", 33)
    assert form.error is None and form.text(label).area.value != text


def test_the_batch_file_is_what_slurm_gets_and_its_options_can_be_edited():
    form = RunForm("tiny")
    area = form.text("Batch file").area
    assert area.disabled and "executor is local" in form.text("Batch file").children[-1].value
    form.show(form.params.change(**{"launch.executor": "slurm", "launch.gpus_per_node": 0, "launch.ranks": 4}))
    area = form.text("Batch file").area
    assert area.value == sbatch_text(form.params) and not area.disabled
    edits = {"--nodes=1": "--nodes=2", "--time=720": "--time=30\n#SBATCH --partition=gpu\n#SBATCH --exclusive"}
    text = area.value
    for old, new in edits.items():
        text = text.replace(old, new)
    area.value = text
    launch = form.params.launch
    assert (launch.nodes, launch.ranks, launch.timeout_min, launch.partition, launch.sbatch) == (
        *(2, 8, 30, "gpu"),
        ("exclusive",),
    )
    area.value = area.value.replace("srun", "srun --overlap")
    assert "nothing here can be edited" in form.text("Batch file").children[-1].value and form.error


def test_presets_and_files_fill_the_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = RunForm("clip_llama_1b", **{"launch.folder": "<b>runs"})
    preset = next(x for x in everything(form) if isinstance(x, w.Dropdown) and x.description == "preset")
    file = next(x for x in everything(form) if isinstance(x, w.Text) and x.description == "file")
    preset.value = "openflamingo_9b"
    assert form.params.launch.ranks == 8 and form.rows["launch.ranks"].value == 8
    assert form.params.launch.folder == "<b>runs"
    choose(form, "train.steps", 123)
    press(form, "Save")
    assert RunParams.from_yaml("openflamingo-9b.yaml") == form.params and preset.value == "openflamingo-9b.yaml"
    choose(form, "train.steps", 5000)
    press(form, "Load")
    assert form.params.train.steps == 123
    (tmp_path / "mine.yaml").write_text("train: {steps: 3, warmup_steps: 1}")
    file.value = "mine.yaml"
    press(form, "Save")
    assert "press Save again" in "".join(texts(form)) and "steps: 3" in (tmp_path / "mine.yaml").read_text()
    press(form, "Load")
    assert form.params.train.steps == 3
    for wrong in ("nothing.yaml", ".", "\0"):
        file.value = wrong
        press(form, "Load")
        assert "mm-error" in "".join(texts(form)) and form.params.train.steps == 3


def test_a_duplicate_has_a_new_name_and_shows_what_it_changes(tmp_path):
    (tmp_path / "tiny-2").mkdir()
    form = RunForm("tiny", **{"launch.folder": str(tmp_path)})
    press(form, "Duplicate")
    assert form.params.launch.name == "tiny-3"
    choose(form, "train.lr", 0.5)
    below = texts(form)[-1]
    assert "Changed from tiny: " in below and "lr 0.002 → <b>0.5</b>" in below and "folder" not in below


def test_what_a_person_types_is_escaped(small):
    choose(small, "launch.name", HOSTILE)
    assert "<script>" not in "".join(texts(small)) and "&lt;script&gt;" in "".join(texts(small))


def test_the_plan_follows_the_form_and_stands_beside_another(small):
    view = PlanView(small)
    assert view.wait().backend == "FSDP2"
    before = texts(view)
    view.pin()
    choose(small, "fsdp.frozen_policy", "REPLICATE")
    plan = view.wait()
    assert {str(u.frozen_policy) for u in plan.units if u.kind == "frozen"} == {"REPLICATE"}
    shown = "".join(texts(view))
    assert shown.count("<section") == 2 and "frozen_policy</b>: SHARD → REPLICATE" in shown
    assert shown.count(", differs") == 2 * 2 * len([u for u in plan.units if u.kind == "frozen"])
    choose(small, "fsdp.frozen_policy", "SHARD")
    view.wait()
    assert "The two plans are the same" in "".join(texts(view))
    view.unpin()
    assert texts(view) == before


def test_only_the_newest_choice_is_planned_and_no_thread_stays(small):
    view = PlanView(small)
    view.wait()
    for steps in range(10, 60):
        choose(small, "train.batch_size", steps)
    view.wait()
    assert view._shown.params == small.params and view._worker._thread is None and view._counter._thread is None
    view.close()
    choose(small, "train.batch_size", 7)
    assert view._worker._thread is None, "what is closed plans no more"
    before = len(w.widgets.widget._instances)
    again = RunForm("tiny")
    again.reveal("launch.nodes")
    again.close()
    assert len(w.widgets.widget._instances) == before, "nothing is left of a closed form"


def test_a_plan_that_cannot_be_made_says_why_beside_the_field_too(small):
    view = PlanView(small)
    small.show(small.params.change(**{"model.freeze": ["visoin_encoder.*"]}))
    with pytest.raises(ValueError, match="visoin"):
        view.wait()
    assert "visoin" in "".join(texts(view)) and view.page.layout.display == "none"
    small.show(small.params.change(**{"fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 1e-6}))
    small.show(small.params.change(**{"model.freeze": SMALL.freeze}))
    with pytest.raises(ParamError, match="too little"):
        view.wait()
    assert "too little" in said(small, "fsdp.memory_budget_gib")
    choose(small, "fsdp.memory_budget_gib", "3")
    view.wait()
    assert "too little" not in "".join([*texts(small), *texts(view)]) and view.page.layout.display is None


def test_a_launch_that_cannot_start_says_why_and_can_be_tried_again(small, tmp_path):
    (tmp_path / "first").mkdir()
    small.show(small.params.change(**{"launch.folder": str(tmp_path)}))
    launcher = Launcher(small)
    button = next(child for child in launcher.children if isinstance(child, w.Button))
    launcher.launch()
    assert button.disabled, "one at a time"
    with pytest.raises(ParamError, match="is not a run; choose another name"):
        launcher.wait()
    assert not button.disabled and "choose another name" in "".join(texts(launcher))
    choose(small, "launch.ranks", 0)
    assert button.disabled, "a mistake in the form cannot be launched"
