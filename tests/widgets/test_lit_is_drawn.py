"""The lit choice is the plan that is drawn, and what Launch would write; or the page says why not."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmfsdp import RunParams
from mmfsdp.core.plan import Unit
from mmfsdp.kit.train.prepare import preview
from mmfsdp.kit.widgets import starter
from mmfsdp.kit.widgets.controls import BUDGET_STEPS, Buttons
from mmfsdp.kit.widgets.data_look import DataLook
from mmfsdp.kit.widgets.launch_buttons import LAUNCH
from mmfsdp.params import FSDPParams, ParamError, load
from mmfsdp.params.base import leaves
from mmfsdp.params.in_words import size
from mmfsdp.planning import make_plan
from mmfsdp.widgets import Cockpit
from tests.tiny import MODEL, tiny_flamingo

SEQUENCES, CLICKS = 8, 7
NOWHERE = "/no/such/folder"


class NotStarted(Exception):
    """Ends a launch before there are ranks."""


def control(cockpit, name):
    (found,) = [control for control in cockpit.choices.controls if control.name == name]
    return found


def settle(cockpit):
    """Wait until all that was asked for is shown."""
    workers = (cockpit.choices.data, cockpit.budgets, cockpit.planner, cockpit.starter)
    while any(worker.busy for worker in workers):
        for worker in workers:
            worker.wait_for_work()


def press(name, value, cockpit):
    """Press a button, unless the page has disabled it."""
    buttons = control(cockpit, name).toggles
    if not buttons.disabled:
        buttons.value = value


def slide(name, value, cockpit):
    slider = control(cockpit, name)
    if slider.layout.display != "none":
        slider.slider.value = value


def write(name, words, cockpit):
    field = control(cockpit, name)
    (field.path if isinstance(field, DataLook) else field.number).value = words


def toggle(name, cockpit):
    button = getattr(cockpit, name)
    button.value = not button.value


def all_buttons():
    cockpit = Cockpit("tiny")
    found = []
    for each in cockpit.choices.controls:
        if isinstance(each, Buttons):
            found += [partial(press, each.name, value) for value in each.toggles.options]
    cockpit.close()
    return found


CLICK = st.one_of(
    st.sampled_from(all_buttons()),
    st.sampled_from([partial(press, "fsdp.frozen_policy", value) for value in ("AUTO", "KEEP", "REPLICATE")]),
    st.builds(partial, st.just(slide), st.just("fsdp.memory_budget_gib"), st.integers(0, BUDGET_STEPS)),
    st.builds(partial, st.just(slide), st.just("launch.ranks"), st.integers(0, 3)),
    st.builds(partial, st.just(write), st.just("train.steps"), st.sampled_from(["0", "20", "many"])),
    st.builds(partial, st.just(write), st.just("data.path"), st.sampled_from([NOWHERE, ""])),
    st.sampled_from([partial(toggle, "pin_toggle"), partial(toggle, "activations")]),
)


def lit(each):
    """The value that an input shows, as it is written in YAML; None where nothing is chosen."""
    if isinstance(each, Buttons):
        return None if each.toggles.value == each.unset else each.toggles.value
    if isinstance(each, DataLook):
        return each.path.value or None
    return each.number.value or None


def check(cockpit):
    """Assert that what is lit is what is drawn, or that the page says so."""
    stale = "mm-stale" in cockpit.right._dom_classes
    assert stale == bool(cockpit.stale.value)
    if stale:
        assert cockpit.form.error or cockpit.planner.failure
        assert cockpit.message.value, "and why stands beside Launch"
        assert not cockpit.form.error or cockpit.buttons.buttons[LAUNCH].disabled
        return
    values = leaves(cockpit.params.to_dict())
    for each in cockpit.choices.controls:
        value = values[each.name]
        if each.layout.display != "none":
            assert lit(each) == (None if value is None else str(value)), each.name
        idle = bool(cockpit.params.why_idle(each.name)) and not isinstance(each, DataLook)
        assert idle == ("mm-idle" in each._dom_classes) and idle == any(part.disabled for part in each.inputs)
    plan, cost = preview(cockpit.params)
    drawn = cockpit.figures.value
    assert size(cost.wire_bytes) in drawn and size(sum(unit.bytes_at_rest for unit in plan.units)) in drawn
    assert size(cost.memory_bytes) in drawn and size(cost.peak_bytes) in drawn
    top = cost.peak_bytes if cockpit.activations.value else cost.memory_bytes
    assert f">{size(top)}</text></g>" in cockpit.pictures.value, "the top of the step is marked with its figure"


class Quiet(Cockpit):
    """A cockpit that a failed test does not print whole."""

    def __repr__(self):
        return "cockpit"


@pytest.fixture(scope="module")
def cockpit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lit")
    params = RunParams(model=MODEL).change(**{"launch.folder": str(folder / "runs"), "launch.ranks": 2})
    params.to_yaml(folder / "small.yaml")
    cockpit = Quiet(str(folder / "small.yaml"))
    assert cockpit.plan
    yield cockpit
    cockpit.close()


@given(st.lists(CLICK, min_size=CLICKS, max_size=CLICKS))
@settings(max_examples=SEQUENCES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_after_any_clicks_the_lit_choice_is_drawn_and_would_be_launched(cockpit, clicks):
    first = load(cockpit.form.preset.value)
    cockpit.choices.data.path.value = ""
    settle(cockpit)
    cockpit.form.choose_preset(cockpit.form.preset.value)
    settle(cockpit)
    assert cockpit.params == first
    for click in clicks:
        click(cockpit)
        settle(cockpit)
        check(cockpit)
    launched = []

    def launch(prepared):
        launched.append(prepared.params)
        raise NotStarted

    before, starter.launch = starter.launch, launch
    try:
        if not cockpit.buttons.buttons[LAUNCH].disabled:
            cockpit.buttons.buttons[LAUNCH].click()
            settle(cockpit)
    finally:
        starter.launch = before
    if launched:
        asked, written = cockpit.params.to_dict(), launched[0].to_dict()
        for section in ("model", "data", "train", "fsdp"):
            assert written[section] == asked[section]
    else:
        assert cockpit.message.value, "nothing is launched without a reason"


# A choice without effect


def drawn_of(unit: Unit):
    """What the pictures show of a unit, but for its policy's letter."""
    gathers = unit.gathers_forward, unit.gathers_backward, unit.reshard_after_forward
    return unit.modules, unit.sharded, gathers, unit.bytes_at_rest, unit.unsharded_bytes, unit.reduced_bytes


@pytest.mark.parametrize("name", ["frozen_policy", "sharding_strategy", "backend"])
@pytest.mark.parametrize(
    "base", [{"backend": "DDP"}, {"backend": "FSDP1"}, {}, {"sharding_strategy": "NO_SHARD"}, {"enable_fsdp": False}]
)
def test_a_choice_is_without_effect_where_every_value_of_it_gives_one_plan(base, name):
    params, model = FSDPParams(**base), tiny_flamingo()
    plans = set()
    for value in type(getattr(params, name)):
        try:
            plan = make_plan(model, params.change(**{name: value.value, "dp_shard": None}), world_size=2)
        except ParamError:  # AUTO needs an example, and what a backend cannot honor is refused
            continue
        plans.add((str(plan.backend), tuple(map(drawn_of, plan.units))))
    assert bool(params.why_idle(name)) == (len(plans) == 1)


def test_a_choice_that_is_set_aside_comes_back_with_what_it_needs(cockpit):
    cockpit.form.choose_preset(cockpit.form.preset.value)
    for policy in ("KEEP", "AUTO"):
        press("fsdp.frozen_policy", policy, cockpit)
        settle(cockpit)
        chosen = cockpit.params
        press("fsdp.backend", "DDP", cockpit)
        settle(cockpit)
        assert cockpit.params.fsdp.backend == "DDP" and cockpit.form.error is None
        press("fsdp.backend", "FSDP2", cockpit)
        settle(cockpit)
        assert cockpit.params == chosen
    budget = cockpit.params.fsdp.memory_budget_gib
    press("fsdp.frozen_policy", "SHARD", cockpit)
    assert cockpit.params.fsdp.memory_budget_gib is None
    press("fsdp.frozen_policy", "AUTO", cockpit)
    assert cockpit.params.fsdp.memory_budget_gib == budget


def test_auto_without_a_budget_proposes_one_between_those_that_it_can_use(cockpit):
    cockpit.form.aside.clear()
    cockpit.form.choose_preset(cockpit.form.preset.value)
    press("fsdp.frozen_policy", "AUTO", cockpit)
    settle(cockpit)
    least, most = cockpit.budgets.least_and_most
    assert least < cockpit.params.fsdp.memory_budget_gib * 2**30 < most
    sent = []
    for place in (0, BUDGET_STEPS // 2, BUDGET_STEPS):
        slide("fsdp.memory_budget_gib", place, cockpit)
        settle(cockpit)
        assert cockpit.planner.failure is None, "each place of the slider has a plan"
        sent.append(cockpit.planner.planned.cost.wire_bytes)
    assert sent == sorted(sent, reverse=True) and sent[0] > sent[-1]


def test_a_wrong_path_that_is_cleared_leaves_nothing_behind(cockpit):
    cockpit.form.choose_preset(cockpit.form.preset.value)
    data = cockpit.choices.data
    write("data.path", NOWHERE, cockpit)
    settle(cockpit)
    assert "mm-error" in data.wait() and cockpit.buttons.buttons[LAUNCH].disabled
    write("train.steps", "30", cockpit)
    assert cockpit.buttons.buttons[LAUNCH].disabled, "another choice does not make the path right"
    write("data.path", "", cockpit)
    settle(cockpit)
    assert "mm-error" not in data.wait() and cockpit.message.value == ""
    assert cockpit.params.train.steps == 30 and cockpit.params.data.path is None


def test_the_scale_of_the_step_stays_while_something_is_pinned(cockpit):
    def scale_and_most():
        return cockpit.top_bytes, cockpit.planner.planned.cost.memory_bytes

    cockpit.form.choose_preset(cockpit.form.preset.value)
    press("fsdp.frozen_policy", "REPLICATE", cockpit)
    settle(cockpit)
    cockpit.pin()
    scale, most = scale_and_most()
    press("fsdp.frozen_policy", "SHARD", cockpit)
    settle(cockpit)
    assert scale_and_most()[0] == scale and scale_and_most()[1] < most
    cockpit.pin(False)
    assert cockpit.top_bytes == scale
