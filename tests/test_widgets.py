"""Widgets without a browser: the form says what the dataclasses say, the plan follows."""

from dataclasses import fields
from typing import get_type_hints

import ipywidgets as w
import pytest

from mmfsdp import ParamError, RunParams
from mmfsdp.params import BackboneParams, ModelParams
from mmfsdp.params.docs import field_docs
from mmfsdp.params.run import plain
from mmfsdp.widgets import Launcher, PlanView, RunForm
from mmfsdp.widgets.fields import Field, Row
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


def rows_of(form):
    return {child.field.name: child for child in form.children if isinstance(child, Row)}


def texts(widget):
    """All HTML below a widget."""
    own = [widget.value] if isinstance(widget, w.HTML) else []
    return own + [text for child in getattr(widget, "children", ()) for text in texts(child)]


def scalars():
    """Dotted names of all fields that are one value."""
    for section, cls in get_type_hints(RunParams).items():
        for f in fields(cls):
            if not isinstance(plain(getattr(getattr(RunParams(), section), f.name)), (dict, list)):
                yield f"{section}.{f.name}"


@pytest.mark.parametrize("name", list(scalars()))
def test_every_field_becomes_an_input_that_holds_its_value_and_its_help(name):
    section, last = name.split(".")
    params = RunParams()
    row = Row(Field.named(name), params.to_dict()[section][last], changed=lambda: None)
    row.say(None)
    assert params.change(**{name: row.value}) == params
    assert row.children[0].tooltip == field_docs(get_type_hints(RunParams)[section])[last]
    assert row.children[1].value


def test_a_choice_changes_the_parameters_and_its_meaning_is_shown(small):
    seen = []
    small.observe(lambda change: seen.append(change.new), "params")
    rows = rows_of(small)
    assert list(rows) == list(MAIN)
    rows["fsdp.frozen_policy"].value = "REPLICATE"
    rows["train.steps"].value = 7777
    assert [str(p.fsdp.frozen_policy) for p in seen] == ["REPLICATE", "REPLICATE"] and seen[-1].train.steps == 7777
    assert "Every rank holds it whole" in rows["fsdp.frozen_policy"].children[1].value
    assert small.params.model == SMALL, "what the form does not show is kept"


def test_a_mistake_is_named_beside_its_field_and_goes_when_it_is_mended(small):
    before, row = small.params, rows_of(small)["train.steps"]
    row.value = 0
    assert "mm-error" in row.children[1].value and "at least 1" in row.children[1].value
    assert isinstance(small.error, ParamError) and small.params == before
    row.value = 50
    assert small.error is None and "mm-error" not in "".join(texts(small)).replace(texts(small)[0], "")


def test_a_mistake_in_a_field_that_is_not_shown_is_named_below(tmp_path):
    path = tmp_path / "hybrid.yaml"
    RunParams().change(
        **{"fsdp.sharding_strategy": "HYBRID_SHARD", "fsdp.dp_shard": 1, "fsdp.dp_replicate": 2}
    ).to_yaml(path)
    form = RunForm(str(path))
    rows_of(form)["launch.ranks"].value = 3
    assert "fsdp.dp_replicate" in texts(form)[-1]


def test_presets_fill_the_form(tmp_path):
    form = RunForm("clip_llama_1b", **{"launch.folder": str(tmp_path)})
    preset = next(child for child in form.children if isinstance(child, w.Dropdown))
    preset.value = "openflamingo_9b"
    assert form.params.launch.ranks == 8 and rows_of(form)["launch.ranks"].value == 8
    assert form.params.launch.folder == str(tmp_path)


def test_what_a_person_types_is_escaped(small):
    rows_of(small)["launch.name"].value = HOSTILE
    assert "<script>" not in "".join(texts(small)) and "&lt;script&gt;" in "".join(texts(small))


def test_the_plan_follows_the_form(small):
    view = PlanView(small)
    assert view.wait().backend == "FSDP2"
    before = texts(view)
    rows_of(small)["fsdp.frozen_policy"].value = "REPLICATE"
    plan = view.wait()
    assert {str(u.frozen_policy) for u in plan.units if u.kind == "frozen"} == {"REPLICATE"}
    assert texts(view) != before and "REPLICATE" in "".join(texts(view))


def test_a_plan_that_cannot_be_made_says_why(small):
    view = PlanView(small)
    small.show(small.params.change(**{"model.freeze": ["visoin_encoder.*"]}))
    with pytest.raises(ValueError, match="visoin"):
        view.wait()
    assert "visoin" in "".join(texts(view)) and "<svg" not in "".join(texts(view))


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
    rows_of(small)["launch.ranks"].value = 0
    assert button.disabled, "a mistake in the form cannot be launched"
